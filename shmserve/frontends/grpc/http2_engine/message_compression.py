"""gRPC's message compression: gzip and deflate (zlib's format), with a size limit."""

from __future__ import annotations

import gzip
import zlib

from shmserve.errors import InvalidArgument, ResourceExhausted
from shmserve.frontends.grpc.message_heap import MessageHeap, counted_memory

ACCEPTED = ("identity", "deflate", "gzip")
_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_LEVEL = 6
_PART_BYTES = 1 << 20


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
    heap = MessageHeap(heap_bytes)
    try:
        parts = _parts(data, encoding, limit, heap)
        whole = counted_memory(sum(map(len, parts)), heap_bytes)
        position = 0
        for part in parts:
            whole[position : position + len(part)] = part
            position += len(part)
        return whole
    finally:
        heap.close()


def _parts(data: memoryview | bytes, encoding: str, limit: int, heap: MessageHeap) -> list[bytes]:
    reader = zlib.decompressobj(_WINDOWS[encoding])
    parts: list[bytes] = []
    rest: memoryview | bytes = data
    size = 0
    try:
        while not reader.eof and (part := reader.decompress(rest, _PART_BYTES)):
            heap.take(len(part))
            parts.append(part)
            size += len(part)
            if size > limit:
                raise ResourceExhausted(
                    f"a message is larger than {limit} bytes (max_request_bytes)"
                )
            rest = reader.unconsumed_tail
    except zlib.error:
        raise InvalidArgument(f"a message is not valid {encoding}") from None
    if not reader.eof:
        raise InvalidArgument(f"a message is not valid {encoding}")
    return parts


def deflate(message: bytes, encoding: str) -> bytes:
    """Return the message compressed, or unchanged if compression does not make the message
    smaller."""
    compressed = (
        gzip.compress(message, _LEVEL, mtime=0)
        if encoding == "gzip"
        else zlib.compress(message, _LEVEL)
    )
    return compressed if len(compressed) < len(message) else message
