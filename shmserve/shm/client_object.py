"""Client memory as the coordinator sees it: open an object by its key, look at it.

The only place that opens what a client names. The object is opened once; from then on the
descriptor stands for it, whatever becomes of the name. Nothing here unlinks anything.
"""

from __future__ import annotations

import os
import stat

from shmserve.core.regions.region_book import ObjectFacts
from shmserve.core.regions.region_names import object_name
from shmserve.core.registry import Region
from shmserve.errors import InvalidArgument, PermissionDenied, ResourceExhausted, ShmserveError

_DIRECTORY = "/dev/shm"
# Without waiting (a FIFO), without following a link, without keeping it over an exec.
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


def open_object(key: str, region: str) -> int:
    """A descriptor of the object a well-formed key names.

    Raises:
        InvalidArgument: there is no such object.
        PermissionDenied: the server's user may not open it.
        ResourceExhausted: this process has no descriptors left.
    """
    name = object_name(key, region)
    try:
        return os.open(os.path.join(_DIRECTORY, name), _FLAGS)
    except PermissionError:
        raise PermissionDenied(
            f"Unable to open shared memory region '{region}': the server's user may not"
        ) from None
    except OSError as ex:
        if ex.errno in (23, 24):  # ENFILE, EMFILE
            raise ResourceExhausted("the server can hold no more shared memory regions") from None
        # A link (ELOOP), a directory (EISDIR), a device: all the same to the caller
        raise InvalidArgument(
            f"Unable to open shared memory region '{region}': its key leads to no memory object"
        ) from None


def facts(fd: int, own: frozenset[tuple[int, int]] = frozenset()) -> ObjectFacts:
    """What the kernel says of an open object; `own`: (device, inode) of the server's files."""
    info = os.fstat(fd)
    device, inode = info.st_dev, info.st_ino
    regular, ours = stat.S_ISREG(info.st_mode), (device, inode) in own
    return ObjectFacts(device, inode, info.st_size, info.st_uid, regular, ours)


def is_object_of(region: Region, fd: int) -> bool:
    """Whether it is the object a region was registered on."""
    info = os.fstat(fd)
    return (info.st_dev, info.st_ino) == (region.device, region.inode)


def reopen(region: Region) -> int | None:
    """The object a region was registered on, if its key still leads there."""
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
    """(device, inode) of everything in the run directory: a link to it may lie elsewhere."""
    with os.scandir(run_dir) as entries:
        stats = [entry.stat(follow_symlinks=False) for entry in entries]
    return frozenset((info.st_dev, info.st_ino) for info in stats)
