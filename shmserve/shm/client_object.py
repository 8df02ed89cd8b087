"""Client memory in the coordinator: opens an object by its key and looks at its facts.

No other module opens a path that a client names. The object is opened once. From then on the
descriptor stands for the object, whatever happens to the name. Nothing here unlinks a file.
"""

import os
import resource
import stat

from shmserve.core.regions.region_book import ObjectFacts
from shmserve.core.regions.region_names import object_name
from shmserve.core.registry import Region
from shmserve.errors import InvalidArgument, PermissionDenied, ResourceExhausted, ShmserveError

_DIRECTORY = "/dev/shm"
# Do not block (a FIFO), do not follow a link, do not keep the descriptor over an exec.
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NO_MORE = "the server can hold no more shared memory regions"

# Descriptors kept for connections and messages. The supervisor copies each region's descriptor, and
# needs as many.
_SPARE_FDS = 256


def open_object(key: str, region: str) -> int:
    """Return a descriptor of the object that a well-formed key names. Raise InvalidArgument if the
    object does not exist. Raise PermissionDenied if the server's user may not open the object.
    Raise ResourceExhausted if this process has no descriptors left."""
    name = object_name(key, region)
    try:
        return os.open(os.path.join(_DIRECTORY, name), _FLAGS)
    except PermissionError:
        raise PermissionDenied(
            f"Unable to open shared memory region '{region}': the server's user may not"
        ) from None
    except OSError as ex:
        if ex.errno in (23, 24):  # ENFILE, EMFILE
            raise ResourceExhausted(_NO_MORE) from None
        # A link (ELOOP), a directory (EISDIR) and a device get the same answer.
        raise InvalidArgument(
            f"Unable to open shared memory region '{region}': its key leads to no memory object"
        ) from None


def facts(fd: int, own: frozenset[tuple[int, int]] = frozenset()) -> ObjectFacts:
    """Return the kernel's facts on an open object. `own`: (device, inode) of the server's files."""
    info = os.fstat(fd)
    device, inode = info.st_dev, info.st_ino
    regular, ours = stat.S_ISREG(info.st_mode), (device, inode) in own
    return ObjectFacts(device, inode, info.st_size, info.st_uid, regular, ours)


def check_room(fd: int) -> None:
    """Raise ResourceExhausted if hardly any descriptors are left beyond a region's new one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and fd >= limit - min(_SPARE_FDS, limit // 2):
        raise ResourceExhausted(_NO_MORE)


def is_object_of(region: Region, fd: int) -> bool:
    """Return True if the descriptor is the object on which the region was registered."""
    info = os.fstat(fd)
    return (info.st_dev, info.st_ino) == (region.device, region.inode)


def reopen(region: Region) -> int | None:
    """Return the object on which a region was registered, or None if its key leads elsewhere."""
    if not region.memory.has_key:
        return None
    try:
        fd = open_object(region.key, region.name)
    except ShmserveError:
        return None
    if is_object_of(region, fd):
        return fd
    os.close(fd)
    return None


def own_files(run_dir: str) -> frozenset[tuple[int, int]]:
    """Return (device, inode) of every file in the run directory.

    A hard link elsewhere has the same (device, inode), so clients cannot register the server's
    files.
    """
    with os.scandir(run_dir) as entries:
        stats = [entry.stat(follow_symlinks=False) for entry in entries]
    return frozenset((info.st_dev, info.st_ino) for info in stats)
