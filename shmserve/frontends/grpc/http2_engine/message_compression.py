"""gRPC's message compression: gzip and deflate (zlib's format), with a size limit."""

import gzip
import zlib
from collections.abc import Iterator

from shmserve.errors import ResourceExhausted
from shmserve.frontends.grpc.message_heap import GrowingMemory
from shmserve.frontends.inflating import STEP_BYTES, inflated

ACCEPTED = ("identity", "deflate", "gzip")
_LEVEL = 6


def inflate(data: memoryview | bytes, encoding: str, limit: int, heap_bytes: int) -> memoryview:
    """Return a compressed message decompressed, in memory counted until freed.

    Args:
        data: the compressed message.
        encoding: compression of the message, gzip or deflate.
        limit: largest decompressed size, in bytes.
        heap_bytes: the setting `max_heap_bytes`.

    Raises:
        InvalidArgument: the data are not valid for the encoding.
        ResourceExhausted: the message is larger than `limit` bytes.
        Unavailable: there is no memory for the message.
    """
    memory = GrowingMemory(heap_bytes)
    try:
        for part in inflated(_pieces(data), encoding, "a message"):
            if memory.size + len(part) > limit:
                raise ResourceExhausted(
                    f"a message is larger than {limit} bytes (max_request_bytes)"
                )
            memory.add(part)
    except BaseException:
        memory.close()
        raise
    return memory.view()


def _pieces(data: memoryview | bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), STEP_BYTES):
        yield view[start : start + STEP_BYTES]


def deflate(message: bytes, encoding: str) -> bytes:
    """Return the message compressed, or unchanged if compression does not make it smaller."""
    compressed = (
        gzip.compress(message, _LEVEL, mtime=0)
        if encoding == "gzip"
        else zlib.compress(message, _LEVEL)
    )
    return compressed if len(compressed) < len(message) else message
