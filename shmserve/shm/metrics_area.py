"""Where an executor publishes the metrics of its model: behind its status page.

The area is in the same object, so whoever has the page's descriptor has it as well, from the
moment it is made. It is made for the first metric, and made larger when it has to be.

    word 0   magic and version of this layout
    word 1   how often the directory was written; odd while it is being written
    word 2   how many values there are
    word 3   bytes of the directory
    then     the values, doubles, one word each
    then     the directory: `Family`s in MessagePack, without values

A value is one aligned word, so a reader sees each as it was at some moment. The directory changes
seldom; whoever reads while it does looks again.
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
_LOOKS = 5  # of a reader, where it finds the directory being written

_encode = msgspec.msgpack.Encoder().encode
_decode = msgpack_decoder(tuple[Family, ...])


class MetricsArea:
    """The writer's side. `fd`: of the object that the status page is in; it stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._view = memoryview(b"")

    def write(self, families: Sequence[Family], values: Sequence[float]) -> memoryview[float]:
        """Publish other families than before; gives the words of the values, as doubles.

        Raises:
            ArenaExhausted: there is no memory for it; what was published stays.
        """
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
            os.posix_fallocate(self._fd, SIZE, size)  # ENOSPC now instead of SIGBUS later
            self._view = memoryview(mmap.mmap(self._fd, size, offset=SIZE))
        except OSError as ex:
            log.error("no shared memory for %d bytes of metrics: %s", size, ex.strerror)
            raise ArenaExhausted("the server's shared memory is full") from ex


def read(fd: int) -> tuple[Family, ...]:
    """What is published behind the status page that `fd` is of.

    Raises:
        UnreadableMessage: nothing that can be understood, or it changed whenever it was read.
    """
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
