"""The protobuf wire format: reading messages without copying them, and writing fields.

Source: the encoding chapter of the Protocol Buffers documentation. Where the chapter leaves a
choice, this module follows the Python implementation: a known field with another wire type is an
unknown field, and unknown fields are skipped. As in newer versions of that implementation, lengths
and tags of more than five bytes are refused.

A tag is a field's number and wire type as on the wire: ``number << 3 | type``.
"""

import sys
from collections.abc import Iterator

from shmserve.errors import InvalidArgument

VARINT, FIXED64, LEN, GROUP, END_GROUP, FIXED32 = range(6)
MAX_VARINT = 10  # bytes of a 64-bit varint
_MASK64 = (1 << 64) - 1
_SIGN64 = 1 << 63
_MAX_LENGTH = 5  # bytes of a length or a tag, each a 32-bit number
_MAX_TAG = (1 << 32) - 1
_MAX_GROUPS = 64  # depth of nested unknown groups
_FIRST_TAG = 1 << 3  # field number 0 is invalid


class Malformed(InvalidArgument):
    """Bytes that are no message of the expected type, by default the type of a request."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the request is not a valid protobuf message: {problem}")
        self.problem = problem


class Uncommon(Malformed):
    """Bytes that some implementations of protobuf read, but this module does not."""


class Walk:
    """Reader of the messages in `data`, for at most `limit` fields in all."""

    __slots__ = ("_limit", "_remaining", "data")

    def __init__(self, data: bytes | memoryview, limit: int = sys.maxsize) -> None:
        self.data = data
        self._limit = self._remaining = limit

    def fields(self, position: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield tag, start and stop of each field's value in data[position:end].

        The value of a LEN field comes without its length. Groups are skipped.

        Raise Malformed if the data is truncated or wrong. Raise InvalidArgument if the data has too
        many fields.
        """
        data = self.data
        groups: list[int] = []  # tags of the open groups
        try:
            while position < end:
                self._remaining -= 1
                if self._remaining < 0:
                    raise self._too_many()
                tag = data[position]
                position += 1
                if tag >= 0x80:
                    tag, position = uint32(data, position - 1, "a tag")
                kind = tag & 7
                if kind == LEN:
                    length = data[position]
                    position += 1
                    if length >= 0x80:
                        length, position = uint32(data, position - 1, "a length")
                    start = position
                    position += length
                elif kind == VARINT:
                    start = position
                    position = _varint_end(data, position)
                elif kind == FIXED32:
                    start = position
                    position += 4
                elif kind == FIXED64:
                    start = position
                    position += 8
                else:
                    start = position
                    _nest(groups, tag, kind)
                if tag < _FIRST_TAG:
                    raise Malformed("field number 0")
                if position > end:
                    raise Malformed(f"field {tag >> 3} is truncated")
                if not groups and kind != END_GROUP:
                    yield tag, start, position
        except IndexError:
            raise Malformed("it is truncated") from None
        if groups:
            raise Malformed(f"group {groups[-1] >> 3} has no end")

    def text(self, start: int, stop: int, where: str) -> str:
        """Return a string. Raise Malformed, naming `where`, if the bytes are not UTF-8."""
        try:
            return str(self.data[start:stop], "utf-8")
        except UnicodeDecodeError:
            raise Malformed(f"{where} is not valid UTF-8") from None

    def varint(self, start: int) -> int:
        """Return the unsigned value of a varint that `fields` has found."""
        value = self.data[start]
        return value if value < 0x80 else varint(self.data, start)[0]

    def int64s(self, start: int, stop: int) -> tuple[int, ...]:
        """Return packed int64 elements. Each byte counts as a field."""
        self._remaining -= stop - start
        if self._remaining < 0:
            raise self._too_many()
        chunk = bytes(self.data[start:stop])
        if chunk.isascii():  # no byte has the continuation bit
            return tuple(chunk)
        values: list[int] = []
        position = 0
        try:
            while position < len(chunk):
                value, position = varint(chunk, position)
                values.append(value if value < _SIGN64 else value - (1 << 64))
        except IndexError:
            raise Malformed("it is truncated") from None
        return tuple(values)

    def _too_many(self) -> InvalidArgument:
        return InvalidArgument(
            f"the request has more than {self._limit} fields, each BYTES"
            " element outside raw_input_contents counting as one"
        )


def _nest(groups: list[int], tag: int, kind: int) -> None:
    """Open or close a group."""
    if kind == GROUP:
        if len(groups) == _MAX_GROUPS:
            raise Uncommon(f"more than {_MAX_GROUPS} groups in each other")
        groups.append(tag)
    elif kind != END_GROUP:
        raise Malformed(f"unknown wire type {kind}")
    elif not groups or groups.pop() != tag - 1:  # the tags of a pair differ only in the type
        raise Malformed(f"the end of group {tag >> 3} has no start")


def varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return an unsigned 64-bit value and the position after it. Raise IndexError if the data ends
    within the value. Raise Malformed if the value has more than ten bytes."""
    value = shift = 0
    for index in range(position, position + MAX_VARINT):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK64, index + 1
        shift += 7
    raise Malformed(f"a varint of more than {MAX_VARINT} bytes")


def signed(value: int, bits: int = 64) -> int:
    """Return the lowest `bits` bits of an unsigned value as a signed number."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _varint_end(data: bytes | memoryview, position: int) -> int:
    for index in range(position, position + MAX_VARINT):
        if data[index] < 0x80:
            return index + 1
    raise Malformed(f"a varint of more than {MAX_VARINT} bytes")


def uint32(data: bytes | memoryview, position: int, what: str) -> tuple[int, int]:
    """Return a tag or length and the position after it. Raise Malformed for more than 32 bits."""
    value, stop = varint(data, position)
    if stop - position > _MAX_LENGTH or value > _MAX_TAG:
        raise Uncommon(f"{what} of more than 32 bits")
    return value, stop


def encode_varint(value: int) -> bytes:
    """Encode a value of at most 64 bits. Negative values are two's complement."""
    if 0 <= value < 0x80:
        return _SMALL[value]
    value &= _MASK64
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_field(tag: int, payload: bytes) -> bytes:
    """Encode a LEN field with its payload. `tag` is below 128."""
    size = len(payload)
    return b"%c%b%b" % (tag, _SMALL[size] if size < 0x80 else encode_varint(size), payload)


_SMALL = tuple(bytes([value]) for value in range(0x80))
