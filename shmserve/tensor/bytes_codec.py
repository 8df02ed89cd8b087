"""Framing of BYTES tensors: each element is a 4-byte little-endian length followed by its bytes.

Source: binary tensor data extension. All arithmetic uses exact integers. Every length is checked
against the available bytes before use.
"""

import struct
from collections.abc import Iterable, Sequence

from shmserve.errors import InvalidArgument

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
MAX_ELEMENT_BYTES = (1 << 32) - 1


def to_bytes(elements: Iterable[bytes | str]) -> list[bytes]:
    """Return the elements as bytes. Text is encoded as UTF-8. Raise InvalidArgument if an
    element is too long for the length field, or is text outside Unicode (a lone surrogate)."""
    encoded: list[bytes] = []
    for index, element in enumerate(elements):
        if isinstance(element, str):
            try:
                element = element.encode()
            except UnicodeEncodeError:
                raise InvalidArgument(f"string element {index} is not valid Unicode") from None
        if len(element) > MAX_ELEMENT_BYTES:
            raise InvalidArgument(
                f"string element {index} has {len(element)} bytes, at most {MAX_ELEMENT_BYTES}"
                " are allowed"
            )
        encoded.append(element)
    return encoded


def encoded_size(elements: Sequence[bytes]) -> int:
    """Return the number of bytes that `write` needs for these elements."""
    return LENGTH_BYTES * len(elements) + sum(map(len, elements))


def write(elements: Iterable[bytes | memoryview], view: memoryview) -> int:
    """Write the framed elements to the start of `view`. Return the number of bytes written. Raise
    ValueError if `view` is too small."""
    position = 0
    pack = _LENGTH.pack
    for element in elements:
        start = position + LENGTH_BYTES
        end = start + len(element)
        view[position:start] = pack(len(element))
        view[start:end] = element
        position = end
    return position


def encode(elements: Iterable[bytes | str]) -> bytes:
    """Return the framed elements as one bytes object."""
    pack = _LENGTH.pack
    return b"".join(part for e in to_bytes(elements) for part in (pack(len(e)), e))


def decode(
    data: memoryview | bytes, count: int, name: str, model: str, kind: str = "input"
) -> list[bytes]:
    """Return the elements, copied out of `data`, which must hold exactly `count` elements.

    `name`, `model` and `kind` ("input" or "output") are for the error message.

    Raise InvalidArgument for a cut-off length or element, or too few or too many elements.
    """
    view = memoryview(data)
    return [bytes(view[start:end]) for start, end in _spans(view, count, name, model, kind)]


def check(data: memoryview | bytes, count: int, name: str, model: str) -> None:
    """Check that `data` is exactly `count` framed elements. Raises as `decode`."""
    for _ in _spans(memoryview(data), count, name, model, "input"):
        pass


def extent(data: memoryview | bytes, count: int) -> int:
    """Return the bytes of the first `count` framed elements of `data`. More bytes may follow. Raise
    InvalidArgument if the elements extend beyond the end of `data`."""
    position, total = 0, len(data)
    for _ in range(count):
        start = position + LENGTH_BYTES
        position = start + _LENGTH.unpack_from(data, position)[0] if start <= total else start
        if position > total:
            raise InvalidArgument(f"{count} string elements take more than the {total} bytes there")
    return position


def _spans(
    view: memoryview, count: int, name: str, model: str, kind: str
) -> Iterable[tuple[int, int]]:
    """Yield start and end of each element, checked one by one."""
    position, seen, total = 0, 0, view.nbytes
    unpack = _LENGTH.unpack_from
    where = f"for inference {kind} '{name}' for model '{model}'"
    while position < total:
        if seen == count:
            raise InvalidArgument(
                f"unexpected number of string elements {count + 1} {where}, expecting {count}"
            )
        start = position + LENGTH_BYTES
        if start > total:
            raise InvalidArgument(
                f"incomplete string length indicator {where}, expecting {LENGTH_BYTES} bytes"
                f" but only {total - position} bytes available"
            )
        (length,) = unpack(view, position)
        end = start + length
        if end > total:
            raise InvalidArgument(
                f"incomplete string data {where}, expecting string of length {length}"
                f" but only {total - start} bytes available"
            )
        yield start, end
        position = end
        seen += 1
    if seen != count:
        raise InvalidArgument(f"expected {count} string elements {where}, got {seen}")
