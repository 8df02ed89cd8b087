"""gRPC's message compression: gzip and deflate (zlib's format), with a bound."""

from __future__ import annotations

import gzip
import zlib

from shmserve.errors import InvalidArgument, ResourceExhausted

ACCEPTED = ("identity", "deflate", "gzip")
_WINDOWS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_LEVEL = 6


def inflate(data: memoryview | bytes, encoding: str, most: int) -> bytes:
    """A compressed message.

    Raises:
        InvalidArgument: it is not what its encoding says, or has none.
        ResourceExhausted: it is larger than `most` bytes.
    """
    window = _WINDOWS.get(encoding)
    if window is None:
        raise InvalidArgument("a message is compressed, and 'grpc-encoding' does not say how")
    reader = zlib.decompressobj(window)
    try:
        message = reader.decompress(data, most + 1)
    except zlib.error:
        raise InvalidArgument(f"a message is not valid {encoding}") from None
    if len(message) > most:
        raise ResourceExhausted(f"a message is larger than {most} bytes (grpc_max_message_bytes)")
    if not reader.eof:
        raise InvalidArgument(f"a message is not valid {encoding}")
    return message


def deflate(message: bytes, encoding: str) -> bytes:
    """The message compressed; as it was, if that does not make it smaller."""
    made = (
        gzip.compress(message, _LEVEL, mtime=0)
        if encoding == "gzip"
        else zlib.compress(message, _LEVEL)
    )
    return made if len(made) < len(message) else message
