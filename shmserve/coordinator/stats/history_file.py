"""History file: keeps the history in the state directory, for the next coordinator or service.

The file is replaced as a whole, once a minute and at the end. Its body is compressed, so a
truncated file is recognized. An unreadable file is skipped with a line in the log, because the
service matters more than its history.
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
_MAX_BYTES = 64 << 20  # three times the size for the most models and reported values
_LAST_WAIT_S = 2.0  # seconds to wait at the end for a write under way

Later = Callable[[Callable[[], None]], object]
_decode = msgpack_decoder(SavedSeries)


class HistoryFile:
    """History file of a service. `later`: runs disk work outside the caller's thread."""

    def __init__(self, folder: str, monitoring: Monitoring, later: Later, now: float) -> None:
        self._path = os.path.join(folder, FILE)
        self._file = ReplacedFile(self._path, yields=True)
        self._monitoring = monitoring
        self._later = later
        self._due = now + SAVE_S
        self._writing = threading.Lock()

    def read(self) -> None:
        """Restore the history from the file, if readable."""
        try:
            with open(self._path, "rb") as file:
                saved = decode(file.read(_MAX_BYTES))
        except FileNotFoundError:
            return
        except (OSError, UnreadableMessage) as ex:
            reason = ex.strerror if isinstance(ex, OSError) else str(ex)
            _log.warning("the history begins anew: its file in state_dir is unreadable: %s", reason)
            return
        self._monitoring.resume(saved)

    def tick(self, now: float) -> None:
        """Encode the current history if a save is due, and have the bytes written in the
        background. Skip the save if the previous one is still being written."""
        if now < self._due:
            return
        self._due = now + SAVE_S
        if not self._writing.locked():
            data = msgspec.msgpack.encode(self._monitoring.saved(now))
            self._later(lambda: self._write(data, 0.0))

    def close(self, now: float) -> None:
        """Write the final history."""
        self._write(msgspec.msgpack.encode(self._monitoring.saved(now)), _LAST_WAIT_S)

    def _write(self, data: bytes, wait_s: float) -> None:
        if not self._writing.acquire(timeout=wait_s):
            return
        try:
            self._file.write(_MAGIC + zlib.compress(data, 1))
        finally:
            self._writing.release()


def decode(data: bytes) -> SavedSeries:
    """Return the history in a file's bytes. Raise UnreadableMessage if the file is truncated,
    damaged, or of another version."""
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
