"""Files that are replaced as a whole, even on a full file system.

The next content goes to `<path>.new`, which is renamed over the file. Room for the next content is
allocated right after a rename has freed the former content. So a file can be replaced on a full
file system as long as its size grows by no more than the spare room. A published file is never
written to: readers see one content or the next, nothing in between.

So executors are replaced and published even while the file system of the run directory is full. If
a file cannot be written nevertheless, the log says so once, and the owner tries again every
second. Until then frontends have the former snapshot, registrations of client memory wait, and
decisions are lost if the coordinator dies, too. The last inodes are left for sockets: no flight
recorder creates a ring then.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shmserve.errors import UnreadableMessage
from shmserve.log_fields import log_fields

_log = logging.getLogger(__name__)

# bytes of spare room, in addition to the last content and a quarter of its size
_SPARE = 16 * 1024
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


class ReplacedFile:
    """A file with its only writer. `yields`: leaves the last inode to sockets, because the service
    can do without the file. `late`: the last content could not be written. The owner tries again.
    """

    def __init__(self, path: str, yields: bool = False) -> None:
        self._path = path
        self._yields = yields
        self._coming = path + ".new"
        self._has_room = False
        self._size = 0  # bytes of the last content
        self._reason = ""

    @property
    def late(self) -> bool:
        return bool(self._reason)

    def read(self, decode: Callable[[bytes], Any]) -> Any:
        """Return the decoded content, or None if the file is missing or unreadable."""
        try:
            with open(self._path, "rb") as file:
                return decode(file.read())
        except (OSError, UnreadableMessage):
            return None

    def write(self, data: bytes) -> bool:
        """Replace the content. Return False and log the reason if the file cannot be written."""
        try:
            self._replace(data)
        except OSError as ex:
            self._failed(str(ex.strerror or ex))
            self._leave_inode()
            return False
        if self._reason:
            self._reason = ""
            _log.warning("written again", extra=log_fields(file=os.path.basename(self._path)))
        self.keep_room()
        return True

    def keep_room(self) -> None:
        """Allocate room for the next content, unless it is allocated already."""
        if self._has_room:
            return
        try:
            fd = os.open(self._coming, _FLAGS, 0o666)
            try:
                os.posix_fallocate(fd, 0, self._size + self._size // 4 + _SPARE)
                self._has_room = True
            finally:
                os.close(fd)
        except OSError:
            # The file system is full: a later call tries again.
            self._leave_inode()

    def _replace(self, data: bytes) -> None:
        # Not truncated before: the allocated blocks may be the last blocks available.
        fd = os.open(self._coming, _FLAGS, 0o666)
        with open(fd, "r+b", buffering=0) as file:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[file.write(remaining) :]
            file.truncate(len(data))
        os.replace(self._coming, self._path)
        self._has_room, self._size = False, len(data)

    def _leave_inode(self) -> None:
        """Remove the next content's file, unless it has room or the service needs the file."""
        if self._yields and not self._has_room:
            with suppress(OSError):
                os.unlink(self._coming)

    def _failed(self, reason: str) -> None:
        if reason != self._reason:
            self._reason = reason
            about = log_fields(file=os.path.basename(self._path), reason=reason)
            _log.error("cannot be written, serving goes on from memory, trying again", extra=about)
