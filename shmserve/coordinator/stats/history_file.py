"""The history in a file of the state directory: the next coordinator, or service, goes on with it.

The file is replaced as a whole, once a minute and at the end. Its body is compressed, which tells a
part of a file from all of it, too. One that cannot be read is left out with a line of the log:
the service is worth more than its history.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable

import msgspec

from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.core.stats.time_series import SavedSeries
from shmserve.errors import UnreadableMessage
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.shm.replaced_file import ReplacedFile

_log = logging.getLogger(__name__)

FILE = "history"
SAVE_S = 60.0
_MAGIC = b"shmserve history 1\n"
_MAX_BYTES = 64 << 20  # three times what the most models and reported values come to
_LAST_WAIT_S = 2.0  # at the end, for a disk that is at work on the one before

Later = Callable[[Callable[[], None]], object]
_decode = msgpack_decoder(SavedSeries)


class HistoryFile:
    """The file of a service. `later`: runs what may wait for a disk, off the caller's thread."""

    def __init__(self, folder: str, monitoring: Monitoring, later: Later, now: float) -> None:
        self._path = os.path.join(folder, FILE)
        self._file = ReplacedFile(self._path)
        self._monitoring = monitoring
        self._later = later
        self._due = now + SAVE_S
        self._writing = threading.Lock()

    def read(self) -> None:
        """Give the history what was written last, if there is something that can be read."""
        try:
            with open(self._path, "rb") as file:
                saved = decode(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return
        except (OSError, UnreadableMessage) as ex:
            why = ex.strerror if isinstance(ex, OSError) else str(ex)
            _log.warning("the history begins anew: its file in state_dir is unreadable: %s", why)
            return
        self._monitoring.resume(saved)

    def tick(self, now: float) -> None:
        """Write it, if that is due: what is written is of now, and goes to the disk later."""
        if now < self._due:
            return
        self._due = now + SAVE_S
        if not self._writing.locked():
            data = msgspec.msgpack.encode(self._monitoring.saved(now))
            self._later(lambda: self._write(data, 0.0))

    def close(self, now: float) -> None:
        """Write what there is at the end."""
        self._write(msgspec.msgpack.encode(self._monitoring.saved(now)), _LAST_WAIT_S)

    def _write(self, data: bytes, wait_s: float) -> None:
        if not self._writing.acquire(timeout=wait_s):
            return
        try:
            self._file.write(_MAGIC + zlib.compress(data, 1))
        finally:
            self._writing.release()


def decode(data: bytes) -> SavedSeries:
    """Raises UnreadableMessage: this is not all of such a file, or of another version's."""
    if not data.startswith(_MAGIC):
        raise UnreadableMessage("it is no history of this version")
    unpacked = zlib.decompressobj()
    try:
        body = unpacked.decompress(data[len(_MAGIC) :], _MAX_BYTES)
    except zlib.error:
        raise UnreadableMessage("its bytes were changed") from None
    if not unpacked.eof:
        raise UnreadableMessage("its end is missing")
    saved: SavedSeries = _decode(body)
    return saved
