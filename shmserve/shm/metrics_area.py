"""Area in which an executor publishes its model's metrics, behind the status page.

The area lies in the status page's object, so a reader with the page's descriptor can read the area
as soon as it exists. The area is made for the first metric and grows when needed.

    word 0   magic and version of this layout
    word 1   number of changes of the directory; odd during a change
    word 2   number of values
    word 3   bytes of the directory
    then     the values, doubles, one word each
    then     the directory: `Family`s in MessagePack, without values

A value is one aligned word, so a reader never sees half of a value. The directory changes seldom;
a reader that meets a change reads again.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Sequence

import msgspec

from shmserve.core.stats.custom_metrics import Family, with_values
from shmserve.errors import ArenaExhausted, UnreadableMessage
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.shm.status_page import SIZE

log = logging.getLogger(__name__)

MAGIC = 0x73686D6D74720001  # "shmmtr", layout 1
MAX_BYTES = 4 << 20
_HEAD = 4 * 8
_CHANGES, _VALUES, _DIRECTORY = 1, 2, 3
_FIRST = 16 << 10
_LOOKS = 5  # attempts of a reader that finds the directory being written

_encode = msgspec.msgpack.Encoder().encode
_decode = msgpack_decoder(tuple[Family, ...])


class MetricsArea:
    """The writer's side. `fd`: descriptor of the status page's object, which the caller keeps and
    closes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._view = memoryview(b"")

    def write(self, families: Sequence[Family], values: Sequence[float]) -> memoryview[float]:
        """Publish a new set of families. Return the words of the values, as doubles. Raise
        ArenaExhausted if no memory is left; the former families stay published."""
        directory = _encode(families)
        nbytes = _HEAD + 8 * len(values) + len(directory)
        if nbytes > len(self._view):
            self._grow(nbytes)
        head = self._view[:_HEAD].cast("Q")
        changes = head[_CHANGES]
        head[_CHANGES] = changes | 1
        head[0] = MAGIC
        head[_VALUES] = len(values)
        head[_DIRECTORY] = len(directory)
        end = _HEAD + 8 * len(values)
        words = self._view[_HEAD:end].cast("d")
        for index, value in enumerate(values):
            words[index] = value
        self._view[end:nbytes] = directory
        head[_CHANGES] = (changes | 1) + 1
        return words

    def _grow(self, nbytes: int) -> None:
        size = max(_FIRST, len(self._view))
        while size < nbytes:
            size *= 2
        if size > MAX_BYTES:
            raise ArenaExhausted(f"there is no room for more than {MAX_BYTES} bytes of metrics")
        try:
            os.posix_fallocate(self._fd, SIZE, size)  # get ENOSPC now, not SIGBUS later
            self._view = memoryview(mmap.mmap(self._fd, size, offset=SIZE))
        except OSError as ex:
            log.error("no shared memory for %d bytes of metrics: %s", size, ex.strerror)
            raise ArenaExhausted("the server's shared memory is full") from ex


def read(fd: int) -> tuple[Family, ...]:
    """Return the families published behind the status page with the descriptor `fd`. Raise
    UnreadableMessage if the area makes no sense, or changed at every attempt."""
    for _ in range(_LOOKS):
        data = os.pread(fd, max(0, min(os.fstat(fd).st_size - SIZE, MAX_BYTES)), SIZE)
        if len(data) < _HEAD:
            return ()
        magic, changes, count, directory = memoryview(data[:_HEAD]).cast("Q")
        if changes % 2 == 0 and os.pread(fd, _HEAD, SIZE) == data[:_HEAD]:
            if changes and magic != MAGIC:
                raise UnreadableMessage("no area of metrics")
            return _parse(data, count, directory) if changes else ()
    raise UnreadableMessage("the directory of metrics is being written")


def _parse(data: bytes, count: int, directory: int) -> tuple[Family, ...]:
    end = _HEAD + 8 * count
    if end + directory > len(data):
        raise UnreadableMessage("an area of metrics that is cut short")
    values = memoryview(data[_HEAD:end]).cast("d").tolist()
    families = with_values(_decode(data[end : end + directory]), values)
    if families is None:
        raise UnreadableMessage("metrics that make no sense")
    return families
