"""The cache of fetched models: bounded, shared by services of one user, and never half written.

    lock                      held for moments, while the folders below are looked at and changed
    leases/<process>          a service's: the snapshots it uses, one a line; locked while its
                              fetcher lives
    repositories/<…>.catalog  what remote repositories have (`shmserve.repository.catalog`)
    snapshots/<digest>/       a model that is complete: <model>/…, and `.files.json`, what it is of
    incoming/<digest>/        one that is being fetched, with what has come
    incoming/<digest>.lock    locked by who fetches it; in it the bytes it will have
    doomed/                   what is being removed

A snapshot appears with a rename, after everything in it has been written to the disk, and goes with
another. Files that two snapshots have in common are one on the disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from shmserve.errors import DeadlineExceeded, ResourceExhausted
from shmserve.repository.catalog import SNAPSHOTS

INCOMING, LEASES, REPOSITORIES, DOOMED = "incoming", "leases", "repositories", "doomed"
FILES, PARTS = ".files.json", ".parts"  # beside the model, whose name cannot begin so
_FOLDERS = (SNAPSHOTS, INCOMING, LEASES, REPOSITORIES, DOOMED)
_LOCK_S = 30.0  # for the lock that is held for moments
_AGAIN_S = 0.05
_STALE_S = 600.0  # without its fetcher a service's lease counts so long


class Cache:
    """One process's view. For several threads.

    Args:
        path: the folder, which is this user's alone.
        most: bytes it may hold.
        owner: the process's id, under which its lease is.
    """

    def __init__(self, path: str, most: int, owner: str) -> None:
        self.path = path
        self._most = most
        for name in _FOLDERS:
            os.makedirs(os.path.join(path, name), 0o700, exist_ok=True)
        self._lease_path = self.file(LEASES, owner)
        self._lease = os.open(self._lease_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lease, fcntl.LOCK_EX)

    def close(self) -> None:
        """Let the fetcher's hold of the lease go; what is in it counts for a while yet."""
        os.close(self._lease)

    def file(self, *names: str) -> str:
        return os.path.join(self.path, *names)

    def snapshot(self, digest: str) -> str:
        """Where a complete snapshot is; "": there is none."""
        path = self.file(SNAPSHOTS, digest)
        return path if digest and os.path.isdir(path) else ""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes the cache meanwhile.

        Raises:
            DeadlineExceeded: somebody holds it for long.
        """
        descriptor = _lock(self.file("lock"), time.monotonic() + _LOCK_S)
        try:
            yield
        finally:
            os.close(descriptor)

    # ----------------------------------------------------------------- leases

    def use(self, digests: set[str]) -> None:
        """These snapshots are what this service uses, from now on. With the lock."""
        data = "\n".join(sorted(digests)).encode()
        os.pwrite(self._lease, data, 0)
        os.ftruncate(self._lease, len(data))
        os.utime(self._lease)
        for digest in digests & set(os.listdir(self.file(SNAPSHOTS))):
            os.utime(self.file(SNAPSHOTS, digest, FILES))

    def leased(self) -> set[str]:
        """Snapshots that any service uses. With the lock; forgets leases of services that ended."""
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
        """The folder of a snapshot that is being fetched, for its only fetcher; "": by now it is
        complete.

        Raises:
            DeadlineExceeded: another one has it all the time.
        """
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
        """Have room for a snapshot of so many bytes, at the expense of what nobody uses.

        Args:
            kept: its files that are there already: links to those of a snapshot that may go.

        Raises:
            ResourceExhausted: there is not enough.
        """
        with self.locked():
            self._make_room(nbytes, digest, kept)
            total = nbytes + sum(map(os.path.getsize, kept))
            with open(self.file(INCOMING, f"{digest}.lock"), "r+b") as file:
                file.write(b"%020d" % total)

    def publish(self, digest: str) -> None:
        """What is incoming is complete, and on the disk. With `incoming`."""
        sync_folders(self.file(INCOMING, digest))
        with self.locked():
            os.rename(self.file(INCOMING, digest), self.file(SNAPSHOTS, digest))
            os.unlink(self.file(INCOMING, f"{digest}.lock"))
        sync(self.file(SNAPSHOTS))

    def usage(self, but: str = "", kept: Collection[str] = ()) -> int:
        """Bytes that are there, or will be; of what is incoming as `but`, the `kept` files alone.
        With the lock."""
        seen: dict[int, int] = {}
        claimed = 0
        for name in os.listdir(self.file(SNAPSHOTS)):
            _add_files(self.file(SNAPSHOTS, name), seen)
        for name in os.listdir(self.file(INCOMING)):
            digest = name.removesuffix(".lock")
            if digest != but and name.endswith(".lock"):
                found: dict[int, int] = {}
                _add_files(self.file(INCOMING, digest), found)
                claimed += max(0, self._claimed(digest) - sum(found.values()))
                seen |= found
        for path in kept:
            info = os.lstat(path)
            seen[info.st_ino] = info.st_size
        return sum(seen.values()) + claimed

    def _claimed(self, digest: str) -> int:
        """What an unfinished snapshot will take in the end; 0: nobody goes on with it."""
        try:
            with open(self.file(INCOMING, f"{digest}.lock"), "rb") as file:
                return 0 if _try_lock(file.fileno()) else int(file.read() or b"0")
        except FileNotFoundError:  # it was complete all the time
            return 0

    def _leftover(self, digest: str) -> bool:
        """Whether nobody goes on with an unfinished snapshot."""
        try:
            with open(self.file(INCOMING, f"{digest}.lock"), "rb") as file:
                return _try_lock(file.fileno())
        except FileNotFoundError:
            return False

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
        """What may go first: leftovers, then the snapshot that was used longest ago; "": none."""
        for name in os.listdir(self.file(INCOMING)):
            digest = name.removesuffix(".lock")
            if name.endswith(".lock") and digest != own and self._leftover(digest):
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
                    return  # somebody goes on with it after all
                if os.path.isdir(self.file(name)):
                    os.rename(self.file(name), self.file(DOOMED, os.path.basename(name)))
                os.unlink(self.file(f"{name}.lock"))
        self._empty_doomed()

    def _empty_doomed(self) -> None:
        for name in os.listdir(self.file(DOOMED)):
            shutil.rmtree(self.file(DOOMED, name), ignore_errors=True)


def write(path: str, data: bytes) -> None:
    """Replace a file as a whole, on the disk as well."""
    with open(f"{path}.new", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)
    sync(os.path.dirname(path))


def sync(folder: str) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: str) -> None:
    """Have a file's content on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folders(root: str) -> None:
    """The same of a folder and all below it."""
    for folder, _, _ in os.walk(root):
        sync(folder)


def _add_files(root: str, seen: dict[int, int]) -> None:
    """Sizes of the files below a folder, by inode: some have several names."""
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                info = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:  # its fetcher has put it elsewhere
                continue
            seen[info.st_ino] = info.st_size


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock(path: str, until: float) -> int:
    """A descriptor of the file of this name, locked; raises DeadlineExceeded."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_lock(descriptor) and _is_named(descriptor, path):
            return descriptor
        os.close(descriptor)
        if time.monotonic() > until:
            raise DeadlineExceeded("another service holds the cache")
        time.sleep(_AGAIN_S)


def _is_named(descriptor: int, path: str) -> bool:
    """Whether what was locked is the file of that name still: it may have been removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
