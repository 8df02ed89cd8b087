"""Packs: environments of models in archives of conda-pack, and the folders of unpacked packs.

    environments/<key>/      an unpacked pack; the key stands for the file: place, size and time
    environments/<key>.lock  shared lock: the folder is in use; exclusive lock: a process fills or
                             removes the folder. Content `_DONE`: the folder is complete

The folders lie beside fetched models (`model_places.cache_dir`). All services of a user share the
folders. The kernel releases the locks of a killed process, so a sweep finds unused folders.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
import time
from collections.abc import Iterator

from shmserve.errors import ConfigError

_FOLDER = "environments"
_DONE = b"complete"
_MOST_FILES = 1_000_000
_AGAIN_S = 0.1
_MOST_FOLDERS = 200  # in one another: functions that create and remove folders recurse
# LookupError: a link to a member that is missing
_MALFORMED = (tarfile.TarError, EOFError, ValueError, OverflowError, LookupError)


def folder_in(cache_dir: str) -> str:
    """Return the folder of all unpacked packs."""
    return os.path.join(cache_dir, _FOLDER)


def acquire(pack: str, root: str, most: int, until: float) -> tuple[str, int]:
    """Unpack a pack, unless an earlier call has. Return the folder, and the descriptor of the
    lock, which keeps the folder until the descriptor is closed.

    Args:
        root: folder of all unpacked packs.
        most: limit of an unpacked pack in bytes.
        until: end (monotonic) of unpacking, and of waiting for another process that unpacks.

    Raises:
        ConfigError: the pack cannot be read or unpacked, or the time is over.
    """
    try:
        os.makedirs(root, 0o700, exist_ok=True)
        info = os.stat(pack)
        if not stat.S_ISREG(info.st_mode):  # opening a FIFO waits without end
            raise ConfigError("the pack is no file")
        place = f"{info.st_dev} {info.st_ino} {info.st_size} {info.st_mtime_ns}"
        key = hashlib.sha256(place.encode()).hexdigest()[:24]
        folder = os.path.join(root, key)
        while time.monotonic() < until:
            with _lock(f"{folder}.lock", fcntl.LOCK_SH) as fd:
                if fd >= 0 and os.pread(fd, len(_DONE), 0) == _DONE:
                    return folder, os.dup(fd)
            with _lock(f"{folder}.lock", fcntl.LOCK_EX) as fd:
                if fd >= 0 and os.pread(fd, len(_DONE), 0) != _DONE:
                    _fill(folder, pack, most, until)
                    os.pwrite(fd, _DONE, 0)
                    continue
            time.sleep(_AGAIN_S)
    except OSError as ex:
        raise ConfigError(f"the pack cannot be unpacked: {ex.strerror}") from None
    raise ConfigError("another process has not unpacked the pack in time")


def sweep(root: str) -> None:
    """Remove unused folders of packs."""
    with contextlib.suppress(OSError):  # no folder, or one that this user may not change
        for name in os.listdir(root):
            path = os.path.join(root, name)
            if name.endswith(".lock"):
                with _lock(path, fcntl.LOCK_EX) as fd:
                    if fd >= 0:
                        os.ftruncate(fd, 0)  # an interrupted removal must not look complete
                        folder = path.removesuffix(".lock")
                        shutil.rmtree(folder, ignore_errors=True)
                        if not os.path.exists(folder):  # else the next sweep tries again
                            os.unlink(path)


@contextlib.contextmanager
def _lock(path: str, kind: int) -> Iterator[int]:
    """Yield a descriptor of the locked file. Yield -1 if another process has locked or removed the
    file."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        held = os.path.samestat(os.fstat(fd), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        held = False
    try:
        yield fd if held else -1
    finally:
        os.close(fd)


def _fill(folder: str, pack: str, most: int, until: float) -> None:
    """Unpack into the folder. Remove the remains of an interrupted attempt first."""
    if not hasattr(tarfile, "data_filter"):
        raise ConfigError("packs need Python 3.11.4 or newer for the server")
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder, 0o700)
    try:
        with tarfile.open(pack, "r|*") as archive:
            _extract(archive, folder, most, until)
        _relocate(folder, until)
    except tarfile.FilterError as ex:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"the pack has a harmful member: {ex}") from None
    except _MALFORMED as ex:
        shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(f"the pack is not an archive of tar ({ex})") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _extract(archive: tarfile.TarFile, folder: str, most: int, until: float) -> None:
    total = 0
    for count, member in enumerate(archive):
        total += member.size
        if total > most or count >= _MOST_FILES:
            raise ConfigError(
                f"the pack has more than {most} bytes (repository_cache_bytes) or {_MOST_FILES}"
                " files"
            )
        if member.name.count("/") > _MOST_FOLDERS:
            raise ConfigError(f"the pack has more than {_MOST_FOLDERS} folders in one another")
        if time.monotonic() > until:
            raise ConfigError("unpacking the pack takes longer than load_timeout_s")
        archive.extract(member, folder, filter="data")


def _relocate(folder: str, until: float) -> None:
    """Run the pack's `conda-unpack`, which replaces paths of the packing host by the folder's
    path."""
    script = os.path.join(folder, "bin", "conda-unpack")
    if os.path.exists(script):
        python = os.path.join(folder, "bin", "python")
        try:
            done = subprocess.run(
                # not -I: the script imports conda_unpack_progress.py, which lies beside it
                [python, "-E", "-s", "-B", script],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=max(until - time.monotonic(), 0.0),
            )
        except subprocess.TimeoutExpired:
            raise ConfigError("the pack's conda-unpack takes longer than load_timeout_s") from None
        if done.returncode:
            last = done.stderr.rstrip().rpartition("\n")[2]
            raise ConfigError(f"the pack's conda-unpack failed: {last}")
