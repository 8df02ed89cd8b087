"""Cache of fetched models: bounded, shared by the services of one user, without half-written
models.

    lock                      held for moments, while the folders below are read and changed
    leases/<process>          a service's lease: the snapshots in use, one a line; locked while
                              the service's fetcher lives
    repositories/<…>.catalog  models of a remote repository (`shmserve.repository.catalog`)
    snapshots/<digest>/       a complete model: <model>/…, and `.files.json` with its origin
    incoming/<digest>/        a model being fetched, with the files received so far
    incoming/<digest>.lock    locked by the fetching process; holds the model's final size in bytes
    doomed/                   folders being removed

A snapshot appears by a rename after all of its files have reached the disk, and disappears by a
rename. Snapshots share equal files as hard links.
"""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from shmserve.errors import DeadlineExceeded, ResourceExhausted
from shmserve.repository.catalog import SNAPSHOTS

INCOMING, LEASES, REPOSITORIES, DOOMED = "incoming", "leases", "repositories", "doomed"
# beside the model's folder; model names cannot start with a dot
FILES, PARTS = ".files.json", ".parts"
_FOLDERS = (SNAPSHOTS, INCOMING, LEASES, REPOSITORIES, DOOMED)
_LOCK_S = 30.0  # longest wait in seconds for the short-term lock
_AGAIN_S = 0.05
_STALE_S = 600.0  # seconds after the last `use` for which a lease counts without its fetcher


class Cache:
    """Access of one process to the cache. Thread-safe. `path`: folder of the cache, private to this
    user. `most`: limit of the cache in bytes. `owner`: id of this process, which names the
    lease."""

    def __init__(self, path: str, most: int, owner: str) -> None:
        self.path = path
        self._most = most
        for name in _FOLDERS:
            os.makedirs(os.path.join(path, name), 0o700, exist_ok=True)
        self._lease_path = self.file(LEASES, owner)
        self._lease = os.open(self._lease_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lease, fcntl.LOCK_EX)

    def close(self) -> None:
        """Unlock the lease; its snapshots count as used until `_STALE_S` seconds after the last
        `use`."""
        os.close(self._lease)

    def file(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def snapshot(self, digest: str) -> str:
        """Return the folder of a complete snapshot, or ""."""
        path = self.file(SNAPSHOTS, digest)
        return path if digest and os.path.isdir(path) else ""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock for all changes of the cache. Raise DeadlineExceeded after `_LOCK_S`."""
        descriptor = _lock(self.file("lock"), time.monotonic() + _LOCK_S)
        try:
            yield
        finally:
            os.close(descriptor)

    # ----------------------------------------------------------------- leases

    def use(self, digests: set[str]) -> None:
        """Replace the snapshots in this service's lease. The caller holds the lock."""
        data = "\n".join(sorted(digests)).encode()
        os.pwrite(self._lease, data, 0)
        os.ftruncate(self._lease, len(data))
        os.utime(self._lease)
        for digest in digests & set(os.listdir(self.file(SNAPSHOTS))):
            os.utime(self.file(SNAPSHOTS, digest, FILES))

    def leased(self) -> set[str]:
        """Return used snapshots, and delete leases of ended services. Needs the lock."""
        used: set[str] = set()
        for name in os.listdir(self.file(LEASES)):
            path = self.file(LEASES, name)
            with open(path, "rb") as file:
                stale = time.time() - os.fstat(file.fileno()).st_mtime > _STALE_S
                if stale and path != self._lease_path and _try_lock(file.fileno()):
                    os.unlink(path)
                    continue
                used.update(file.read().decode().split())
        return used

    # ------------------------------------------------------------ being fetched

    @contextmanager
    def incoming(self, digest: str, until: float) -> Iterator[str]:
        """Lock a snapshot for fetching, and yield the folder to fill. Yield "" if the snapshot is
        already complete. Raise DeadlineExceeded if another process still holds the snapshot at
        `until`."""
        descriptor = _lock(self.file(INCOMING, f"{digest}.lock"), until)
        try:
            if self.snapshot(digest):
                os.unlink(self.file(INCOMING, f"{digest}.lock"))
                yield ""
            else:
                os.makedirs(self.file(INCOMING, digest), 0o700, exist_ok=True)
                yield self.file(INCOMING, digest)
        finally:
            os.close(descriptor)

    def claim(self, digest: str, nbytes: int, kept: Collection[str] = ()) -> None:
        """Make room for `nbytes` further bytes of a snapshot by removing unused snapshots. `kept`:
        files already in the snapshot: links to files of other snapshots, which may be removed."""
        with self.locked():
            self._make_room(nbytes, digest, kept)
            total = nbytes + sum(map(os.path.getsize, kept))
            with open(self.file(INCOMING, f"{digest}.lock"), "r+b") as file:
                file.write(b"%020d" % total)

    def publish(self, digest: str) -> None:
        """Complete an incoming snapshot: all files are on the disk. Needs `incoming`."""
        sync_folders(self.file(INCOMING, digest))
        with self.locked():
            os.rename(self.file(INCOMING, digest), self.file(SNAPSHOTS, digest))
            os.unlink(self.file(INCOMING, f"{digest}.lock"))
        sync(self.file(SNAPSHOTS))

    def abandon(self, digest: str) -> None:
        """Remove the files of an incoming snapshot, unless a process is fetching the snapshot."""
        with self.locked(), contextlib.suppress(FileNotFoundError):
            self._remove(os.path.join(INCOMING, digest))

    def usage(self, but: str = "", kept: Collection[str] = ()) -> int:
        """Return the bytes in the cache, including bytes still to come. Of the incoming snapshot
        `but`, only the `kept` files count. The caller holds the lock."""
        seen: dict[int, int] = {}
        claimed = 0
        for name in os.listdir(self.file(SNAPSHOTS)):
            _add_files(self.file(SNAPSHOTS, name), seen)
        for name in os.listdir(self.file(INCOMING)):
            digest = name.removesuffix(".lock")
            if digest != but and name.endswith(".lock"):
                incoming_sizes: dict[int, int] = {}
                _add_files(self.file(INCOMING, digest), incoming_sizes)
                claimed += max(0, (self._claimed(digest) or 0) - sum(incoming_sizes.values()))
                seen |= incoming_sizes
        for path in kept:
            info = os.lstat(path)
            seen[info.st_ino] = info.st_size
        return sum(seen.values()) + claimed

    def _claimed(self, digest: str) -> int | None:
        """Return an unfinished snapshot's final bytes; None if no process is fetching; 0 if the
        fetching process has stated no size yet or has completed the snapshot."""
        try:
            with open(self.file(INCOMING, f"{digest}.lock"), "rb") as file:
                return None if _try_lock(file.fileno()) else int(file.read() or b"0")
        except FileNotFoundError:
            return 0

    def _make_room(self, nbytes: int, digest: str, kept: Collection[str]) -> None:
        self._empty_doomed()
        used = self.leased()
        while (usage := self.usage(digest, kept)) + nbytes > self._most or self._disk_lacks(nbytes):
            victim = self._least_used(used, digest)
            if not victim:
                what = f"{nbytes} bytes do not fit beside {usage} bytes that are in use"
                why = f"repository_cache_bytes is {self._most}"
                raise ResourceExhausted(
                    f"{what}: {why}" if usage + nbytes > self._most else f"{what}: the disk is full"
                )
            self._remove(victim)

    def _disk_lacks(self, nbytes: int) -> bool:
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize < nbytes

    def _least_used(self, used: set[str], own: str) -> str:
        """Return what to remove next: a leftover, else the least recently used; "": all is used."""
        for name in os.listdir(self.file(INCOMING)):
            digest = name.removesuffix(".lock")
            if name.endswith(".lock") and digest != own and self._claimed(digest) is None:
                return os.path.join(INCOMING, digest)
        ages = {}
        for digest in set(os.listdir(self.file(SNAPSHOTS))) - used:
            try:
                ages[digest] = os.stat(self.file(SNAPSHOTS, digest, FILES)).st_mtime_ns
            except FileNotFoundError:
                ages[digest] = 0
        return os.path.join(SNAPSHOTS, min(ages, key=ages.__getitem__)) if ages else ""

    def _remove(self, name: str) -> None:
        if name.startswith(SNAPSHOTS):
            os.rename(self.file(name), self.file(DOOMED, os.path.basename(name)))
        else:
            with open(self.file(f"{name}.lock"), "rb") as file:
                if not _try_lock(file.fileno()):
                    return  # a process has resumed fetching
                if os.path.isdir(self.file(name)):
                    os.rename(self.file(name), self.file(DOOMED, os.path.basename(name)))
                os.unlink(self.file(f"{name}.lock"))
        self._empty_doomed()

    def _empty_doomed(self) -> None:
        for name in os.listdir(self.file(DOOMED)):
            shutil.rmtree(self.file(DOOMED, name), ignore_errors=True)


def write(path: str, data: bytes) -> None:
    """Replace a file atomically, and flush file and folder to the disk."""
    with open(f"{path}.new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    sync(os.path.dirname(path))


def sync(folder: str) -> None:
    """Flush the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str) -> None:
    """Flush a file's content to the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folders(root: str) -> None:
    """Flush the entries of a folder and of all folders below to the disk."""
    for folder, _, _ in os.walk(root):
        sync(folder)


def _add_files(root: str, seen: dict[int, int]) -> None:
    """Add the sizes of the files below a folder, by inode, because snapshots share files."""
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                info = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:  # moved by the fetching process
                continue
            seen[info.st_ino] = info.st_size


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(path: str, until: float) -> int:
    """Return a descriptor of the locked file at `path`. Raise DeadlineExceeded at `until`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor) and _is_named(descriptor, path):
            return descriptor
        os.close(descriptor)
        if time.monotonic() > until:
            raise DeadlineExceeded("another service holds the cache")
        time.sleep(_AGAIN_S)


def _is_named(descriptor: int, path: str) -> bool:
    """Return False if the file was removed from `path` before the lock was taken."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
