"""The protobuf wire format: walking messages without copying them, and writing fields.

Source: the encoding chapter of the Protocol Buffers documentation. Where that leaves a
choice, this reads what the python implementation reads: a known field of another wire
type is an unknown field, and unknown fields are skipped. Lengths and tags of more than
five bytes are refused, as its newer versions do.

A tag is a field's number and wire type as they stand on the wire: ``number << 3 | type``.
"""

from __future__ import annotations

from collections.abc import Iterator

from shmserve.errors import InvalidArgument

VARINT, FIXED64, LEN, GROUP, END_GROUP, FIXED32 = range(6)
MAX_VARINT = 10  # bytes of a 64-bit varint
MASK64 = (1 << 64) - 1
_MAX_LENGTH = 5  # bytes of a length or a tag, both of 32 bits
_MAX_TAG = (1 << 32) - 1
_MAX_GROUPS = 64  # unknown groups in each other
_FIRST_TAG = 1 << 3  # there is no field 0


def malformed(problem: str) -> InvalidArgument:
    """The error for bytes that are no message of the expected type."""
    return InvalidArgument(f"the request is not a valid protobuf message: {problem}")


class Walk:
    """Reads messages out of `data`, at most `most` fields altogether (setting `max_fields`)."""

    __slots__ = ("_left", "_most", "data")

    def __init__(self, data: bytes, most: int) -> None:
        self.data = data
        self._most = self._left = most

    def fields(self, position: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Tag, start and stop of each field's value in data[position:end].

        The value of a LEN field comes without its length. Groups are skipped.

        Raises:
            InvalidArgument: truncated or malformed data, or too many fields.
        """
        data = self.data
        groups: list[int] = []  # tags of the groups that are open
        try:
            while position < end:
                self._left -= 1
                if self._left < 0:
                    raise self._too_many()
                tag = data[position]
                position += 1
                if tag >= 0x80:
                    tag, position = _uint32(data, position - 1, "a tag")
                kind = tag & 7
                if kind == LEN:
                    length = data[position]
                    position += 1
                    if length >= 0x80:
                        length, position = _uint32(data, position - 1, "a length")
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
                    raise malformed("field number 0")
                if position > end:
                    raise malformed(f"field {tag >> 3} is truncated")
                if not groups and kind != END_GROUP:
                    yield tag, start, position
        except IndexError:
            raise malformed("it is truncated") from None
        if groups:
            raise malformed(f"group {groups[-1] >> 3} has no end")

    def charge(self, fields: int) -> None:
        """Count `fields` more, e.g. packed elements that are read one by one."""
        self._left -= fields
        if self._left < 0:
            raise self._too_many()

    def text(self, start: int, stop: int, where: str) -> str:
        """A string; raises InvalidArgument naming `where` if it is not UTF-8."""
        try:
            return self.data[start:stop].decode()
        except UnicodeDecodeError:
            raise malformed(f"{where} is not valid UTF-8") from None

    def varint(self, start: int) -> int:
        """The unsigned value of a varint that `fields` has found."""
        value = self.data[start]
        return value if value < 0x80 else varint(self.data, start)[0]

    def int64s(self, start: int, stop: int) -> tuple[int, ...]:
        """Packed int64 elements."""
        self.charge(stop - start)
        chunk = self.data[start:stop]
        if chunk.isascii():  # no byte has the continuation bit
            return tuple(chunk)
        values: list[int] = []
        position = 0
        try:
            while position < len(chunk):
                value, position = varint(chunk, position)
                values.append(signed64(value))
        except IndexError:
            raise malformed("it is truncated") from None
        return tuple(values)

    def _too_many(self) -> InvalidArgument:
        return InvalidArgument(
            f"the request has more than {self._most} fields (setting max_fields), each BYTES"
            " element outside raw_input_contents counting as one"
        )


def _nest(groups: list[int], tag: int, kind: int) -> None:
    """Open or close a group."""
    if kind == GROUP:
        if len(groups) == _MAX_GROUPS:
            raise malformed(f"more than {_MAX_GROUPS} groups in each other")
        groups.append(tag)
    elif kind != END_GROUP:
        raise malformed(f"unknown wire type {kind}")
    elif not groups or groups.pop() != tag - 1:  # the tags of a pair differ in the type only
        raise malformed(f"the end of group {tag >> 3} has no start")


def varint(data: bytes, position: int) -> tuple[int, int]:
    """An unsigned value of 64 bits and the position behind it; IndexError at the end."""
    value = shift = 0
    for index in range(position, position + MAX_VARINT):
        byte = data[index]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & MASK64, index + 1
        shift += 7
    raise malformed(f"a varint of more than {MAX_VARINT} bytes")


def signed64(value: int) -> int:
    """An unsigned value of 64 bits as the signed one of the same bits."""
    return value if value < 1 << 63 else value - (1 << 64)


def _varint_end(data: bytes, position: int) -> int:
    for index in range(position, position + MAX_VARINT):
        if data[index] < 0x80:
            return index + 1
    raise malformed(f"a varint of more than {MAX_VARINT} bytes")


def _uint32(data: bytes, position: int, what: str) -> tuple[int, int]:
    value, stop = varint(data, position)
    if stop - position > _MAX_LENGTH or value > _MAX_TAG:
        raise malformed(f"{what} of more than 32 bits")
    return value, stop


def encode_varint(value: int) -> bytes:
    """An unsigned value of at most 64 bits."""
    if value < 0x80:
        return _SMALL[value]
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_field(tag: int, payload: bytes) -> bytes:
    """A LEN field with its payload; `tag` is below 128."""
    return b"%c%b%b" % (tag, encode_varint(len(payload)), payload)


_SMALL = tuple(bytes([value]) for value in range(0x80))
