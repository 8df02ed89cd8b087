"""Tensor data as JSON arrays: to elements, and into a tensor's bytes.

The usual case, a flat array of the right type, takes one typed msgspec decode and one numpy
assignment. Nested numbers lose their inner brackets first and then take the same path. Nested
strings, NaN tokens and errors take slower paths. Types are as strict as in the protocol: integers
only for integer types, true and false only for BOOL, strings only for BYTES. Floating point types
accept integers, too.
"""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct

from shmserve.errors import InvalidArgument, UnreadableMessage
from shmserve.protocol import bounds
from shmserve.protocol.decoding import json_decoder
from shmserve.protocol.oip import strict_parser
from shmserve.protocol.oip.answer import JsonData
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES, Datatype

_Decode = Callable[[Any], list[Any]]


class _Kind(Struct, frozen=True):
    """JSON form of the elements of a datatype. Bounds are inclusive."""

    flat: _Decode
    types: tuple[type, ...]
    what: str
    in_triton: str = ""  # text that Triton's clients look for in the error for a wrong type
    low: int | None = None
    high: int | None = None


def _kind(datatype: Datatype) -> _Kind:
    char = datatype.numpy.kind
    element: Any
    if char in "iu":
        info = np.iinfo(datatype.numpy)
        low, high = int(info.min), int(info.max)
        # msgspec knows only bounds of 64 signed bits. numpy refuses integers that UINT64 cannot
        # hold.
        element = Annotated[int, Meta(ge=low, le=min(high, (1 << 63) - 1))]
        if datatype.name == "UINT64":
            element = Annotated[int, Meta(ge=0)]
        what = f"an integer from {low} to {high}"
        return _Kind(json_decoder(list[element]), (int,), what, "", low, high)
    if char == "b":
        accessed = ": attempt to access JSON non-boolean as boolean"
        return _Kind(json_decoder(list[bool]), (bool,), "true or false", accessed)
    if char == "f":
        return _Kind(json_decoder(list[float]), (float, int), "a number")
    accessed = ": attempt to access JSON non-string as string"
    return _Kind(json_decoder(list[str]), (str,), "a string", accessed)


_KINDS = {d.name: _kind(d) for d in DATATYPES.values() if d.json_ok}


class JsonTensor(Struct, frozen=True):
    """Checked elements, ready to be written into a slot of `nbytes` bytes."""

    elements: Sequence[Any]
    datatype: Datatype
    nbytes: int
    where: str

    def write(self, view: memoryview) -> None:
        """Write the elements into `view`, which has exactly `nbytes` bytes. Raise InvalidArgument
        for an integer that the datatype cannot hold."""
        if not self.elements:
            return
        if not self.datatype.itemsize:
            bytes_codec.write(self.elements, view)
            return
        array = np.frombuffer(view, self.datatype.numpy)
        try:
            if self.datatype.name == "FP32":
                with np.errstate(over="ignore"):  # numbers too large for FP32 become Infinity
                    array[:] = self.elements
            else:
                array[:] = np.array(self.elements, self.datatype.numpy)
        except OverflowError:
            raise InvalidArgument(
                f"{self.where}.data: an element does not fit {self.datatype.name}"
            ) from None


def decode(data: JsonData, datatype: Datatype, count: int, where: str) -> JsonTensor:
    """Return the elements of an input's "data", checked against the type and `count`. Raise
    InvalidArgument for wrong JSON, a wrong element (named by index), too few or too many
    elements."""
    kind = _KINDS[datatype.name]
    elements = _elements(data, kind, where)
    if len(elements) != count:
        problem = "too few" if len(elements) < count else "too many"
        raise InvalidArgument(
            "Unable to parse 'data': Shape does not match true shape of 'data' field:"
            f" {where}.data has {len(elements)} elements, which is {problem}: its shape has {count}"
        )
    if datatype.itemsize:
        return JsonTensor(elements, datatype, count * datatype.itemsize, where)
    encoded = bytes_codec.to_bytes(elements)
    return JsonTensor(encoded, datatype, bytes_codec.encoded_size(encoded), where)


def _elements(data: JsonData, kind: _Kind, where: str) -> list[Any]:
    if isinstance(data, list):
        return _checked(data, kind, where)
    try:
        return kind.flat(data)
    except UnreadableMessage:
        pass
    text = bytes(memoryview(data))
    if text[:1] == b"[" and str not in kind.types:
        strict_parser.check_nesting(text, bounds.MAX_JSON_NESTING, 0)
        try:
            return kind.flat(b"[%b]" % text.translate(None, b"[]"))
        except UnreadableMessage:
            pass  # empty lists, NaN, or a wrong element
    document = strict_parser.loads(text)
    if not isinstance(document, list):
        raise InvalidArgument(f"{where}.data must be an array, got {json.dumps(document)[:64]}")
    return _checked(document, kind, where)


def _checked(data: list[Any], kind: _Kind, where: str) -> list[Any]:
    """Flatten nested lists and check the type of every element."""
    elements = _flatten(data, bounds.MAX_JSON_NESTING)
    allowed = kind.types
    for index, element in enumerate(elements):
        # The exact type counts: a bool is an int in Python, but not in JSON.
        good = type(element) in allowed
        if good and kind.low is not None and kind.high is not None:
            good = kind.low <= element <= kind.high
        if not good:
            raise InvalidArgument(
                f"{where}.data[{index}] must be {kind.what}, got {json.dumps(element)[:64]}"
                f"{kind.in_triton}"
            )
    return elements


def _flatten(data: list[Any], limit: int) -> list[Any]:
    """Return all elements in order. Iterative; each element is visited once."""
    flat: list[Any] = []
    levels = [iter(data)]
    while levels:
        for item in levels[-1]:
            if type(item) is list:
                if len(levels) >= limit:
                    raise InvalidArgument(
                        f"JSON nesting depth exceeds maximum allowed limit ({limit})"
                    )
                levels.append(iter(item))
                break
            flat.append(item)
        else:
            levels.pop()
    return flat
