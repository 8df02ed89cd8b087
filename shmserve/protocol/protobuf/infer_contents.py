"""Typed tensor contents (InferTensorContents), converted to a tensor's bytes in bulk.

Packed fixed-size elements are the tensor's bytes already. Packed varints are decoded by numpy, a
block at a time. An unpacked element has the encoding of an element in a packed field, so any
mixture of both forms is one packed field in pieces. Stricter than Triton: an integer that does not
fit its datatype is refused, not truncated.
"""

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shmserve.errors import InvalidArgument
from shmserve.protocol.protobuf import varints, wire
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES

_BLOCK = 1 << 18  # bytes of varints decoded at a time; bounds the temporary arrays
_BYTES_FIELD = 8
# Field number to the datatype named in error messages
_ELEMENTS = ("", "BOOL", "INT32", "INT64", "UINT32", "UINT64", "FP32", "FP64", "BYTES")
_FIELDS = {kind.name: kind.contents_field for kind in DATATYPES.values() if kind.contents_field}
_WIDTH = {6: 4, 7: 8}  # bytes of an element on the wire; other fields hold varints
_UNPACKED = {6: wire.FIXED32, 7: wire.FIXED64}
_TAGS = {number << 3 | wire.LEN: number for number in range(1, 9)}
_TAGS |= {number << 3 | _UNPACKED.get(number, wire.VARINT): number for number in range(1, 8)}

_NONE = array("q")
_Array = NDArray[Any]

# Field number to start, stop, start, stop, … of the field's pieces. Only pieces of BYTES may be
# empty.
Spans = dict[int, "array[int]"]


def collect(walk: wire.Walk, start: int, stop: int, spans: Spans) -> None:
    """Add the pieces of an InferTensorContents to `spans`, merging messages as protobuf does."""
    data = walk.data
    for tag, first, end in walk.fields(start, stop):
        number = _TAGS.get(tag)
        if number is None:
            continue
        if number != _BYTES_FIELD:
            if first == end:
                continue
            width = _WIDTH.get(number)
            if (end - first) % width if width else data[end - 1] >= 0x80:
                raise wire.Malformed(f"{_ELEMENTS[number]} contents end within an element")
        span = spans.get(number)
        if span is None:
            span = spans[number] = array("q")
        span.append(first)
        span.append(end)


class Contents(Struct, frozen=True):
    """Explicit data of input `name` of a request to `model`: the pieces `spans` of `data`. Varints
    of more than ten bytes are found only by `write`."""

    data: bytes | memoryview
    spans: Spans
    name: str
    model: str

    def nbytes(self, datatype: str, count: int) -> int:
        """Return the tensor's size in bytes, for `count` elements of the request's datatype. Raise
        InvalidArgument for elements of another datatype, more or fewer than `count` elements, or a
        datatype without typed contents."""
        number = _FIELDS.get(datatype)
        if number is None:
            problem = "has no typed contents" if datatype in DATATYPES else "is unknown"
            raise InvalidArgument(
                f"explicit tensor data for {self._where()}: datatype '{datatype}' {problem}"
            )
        for other in self.spans:
            if other != number:
                raise InvalidArgument(
                    f"unexpected explicit tensor data for {self._where()} of type"
                    f" '{_ELEMENTS[other]}', expected datatype '{datatype}'"
                )
        given = self._count(number)
        itemsize = DATATYPES[datatype].itemsize
        if itemsize:
            if given != count:
                raise InvalidArgument(
                    f"input byte size mismatch for input '{self.name}' for model"
                    f" '{self.model}'. Expected {count * itemsize}, got {given * itemsize}"
                )
            return count * itemsize
        if given != count:
            raise InvalidArgument(
                f"expected {count} string elements for inference input '{self.name}' for model"
                f" '{self.model}', got {given}"
            )
        return bytes_codec.LENGTH_BYTES * count + self._size(number)

    def write(self, view: memoryview, datatype: str) -> None:
        """Write the elements into `view`, which has exactly `nbytes` bytes. Raise InvalidArgument
        for an integer that the datatype cannot hold, or a malformed integer."""
        if not self.spans:
            return
        number = _FIELDS[datatype]
        pieces = self._pieces(number)
        if number == _BYTES_FIELD:
            bytes_codec.write(pieces, view)
        elif number in _WIDTH:
            position = 0
            for piece in pieces:
                view[position : position + len(piece)] = piece
                position += len(piece)
        else:
            self._write_varints(_joined(pieces), view, datatype)

    def _count(self, number: int) -> int:
        if number == _BYTES_FIELD:
            return len(self.spans.get(number, ())) // 2
        width = _WIDTH.get(number)
        if width:
            return self._size(number) // width
        return sum(_count_varints(piece) for piece in self._pieces(number))

    def _size(self, number: int) -> int:
        spans = self.spans.get(number, _NONE)
        return sum(spans[1::2]) - sum(spans[::2])

    def _pieces(self, number: int) -> Iterator[memoryview]:
        spans = self.spans.get(number, _NONE)
        view = memoryview(self.data)
        for index in range(0, len(spans), 2):
            yield view[spans[index] : spans[index + 1]]

    def _write_varints(self, packed: memoryview, view: memoryview, datatype: str) -> None:
        target = np.frombuffer(view, DATATYPES[datatype].numpy)
        position = 0
        for block in _varints(packed):
            values = _narrowed(block, datatype)
            part = target[position : position + len(values)]
            part[:] = values
            if part.dtype.itemsize < values.dtype.itemsize and part.dtype.kind != "b":
                wrong = np.flatnonzero(part != values)
                if wrong.size:
                    index = int(wrong[0])
                    raise InvalidArgument(
                        f"explicit tensor data for {self._where()}: element {position + index}"
                        f" does not fit {datatype}, got {values[index]}"
                    )
            position += len(values)

    def _where(self) -> str:
        return f"input tensor '{self.name}' for model '{self.model}'"


def _joined(pieces: Iterator[memoryview]) -> memoryview:
    """Return the pieces as one packed field. Only several pieces are copied."""
    parts = list(pieces)
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _narrowed(values: _Array, datatype: str) -> _Array:
    """Convert 64-bit values to the wire's type. 32-bit types drop the upper half."""
    kind = DATATYPES[datatype].numpy.kind
    if kind == "b":
        return np.not_equal(values, 0)
    size = 8 if datatype in ("INT64", "UINT64") else 4
    return values.astype(f"u{size}", copy=False).view(f"{kind}{size}")


def _count_varints(packed: memoryview) -> int:
    array_ = np.frombuffer(packed, np.uint8)
    return sum(
        int(np.count_nonzero(array_[start : start + _BLOCK] < 0x80))
        for start in range(0, len(array_), _BLOCK)
    )


def _varints(packed: memoryview) -> Iterator[_Array]:
    """Yield the values of packed varints in blocks. The last byte must end a varint."""
    data = np.frombuffer(packed, np.uint8)
    position = 0
    while position < len(data):
        block = data[position : position + _BLOCK]
        ends = np.flatnonzero(block < 0x80)
        if not ends.size:
            raise wire.Malformed(f"a varint of more than {wire.MAX_VARINT} bytes")
        used = int(ends[-1]) + 1
        position += used
        yield varints.unpack(block[:used])
