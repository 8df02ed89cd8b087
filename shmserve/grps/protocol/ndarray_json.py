"""The `ndarray` of a GRPS request: nested lists of numbers, read as an FP32 tensor."""

import math
import struct
from typing import Any

import msgspec
import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.grps.protocol.grps_message import GenericTensor, GrpsDataType

Array = np.ndarray[Any, Any]
_numbers = msgspec.json.Decoder(list[float]).decode
_MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class NotSimple(Exception):
    """The text is not in the form that the fast reader handles."""


_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


def from_text(text: bytes) -> GenericTensor:
    """Return the tensor of JSON text, if the text is plain numbers in a regular nest of lists.
    Raise NotSimple if the text has another form. `from_value` reads such text, or raises the
    error."""
    shape = _regular(text.translate(None, _NOT_STRUCTURE))
    try:
        numbers = _numbers(b"[%b]" % text.translate(None, b"[]"))
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
    except (*_MALFORMED, OverflowError, struct.error):
        raise NotSimple from None
    # brackets of an empty list look like brackets of a list with one number
    if math.prod(shape) != len(numbers):
        raise NotSimple
    return _fp32(np.frombuffer(packed, "<f4"), shape)


def _regular(skeleton: bytes) -> tuple[int, ...]:
    """Return the shape of a nest of lists, of which only brackets and commas are left. In a regular
    nest, the parts of a level are equal. So the text is rebuilt from the first part of each level,
    then compared."""
    depth = len(skeleton) - len(skeleton.lstrip(b"["))
    if not depth:
        return ()
    end = skeleton.find(b"]")
    part = skeleton[depth - 1 : end + 1]
    shape = [len(part) - 1]
    for start in range(depth - 1, 0, -1):
        last = skeleton.find(part + b"]", start)
        if last < 0:
            raise NotSimple
        times = (last - start) // (len(part) + 1) + 1
        shape.append(times)
        part = b"[%b]" % b",".join([part] * times)
        if len(part) > len(skeleton):
            raise NotSimple
    if part != skeleton:
        raise NotSimple
    return tuple(reversed(shape))


def from_value(value: Any) -> GenericTensor:
    """Return the tensor of nested lists. Raise InvalidArgument if the lists are not regular, or
    contain anything but numbers."""
    try:
        array = np.array(value)
    except ValueError:  # numpy's own text is about rules of numpy
        raise InvalidArgument(
            "ndarray must be numbers in lists of equal lengths on each level"
        ) from None
    if array.dtype.kind not in "biuf":
        raise InvalidArgument("ndarray must hold numbers only, none of them beyond 64 bits")
    if not array.size and array.ndim < 2:
        raise InvalidArgument("ndarray is empty")
    with np.errstate(over="ignore"):  # values too large for FP32 become Infinity
        return _fp32(array.astype(np.float32).reshape(-1), array.shape)


def _fp32(values: Array, shape: tuple[int, ...]) -> GenericTensor:
    flat = {int(GrpsDataType.DT_FLOAT32): values} if values.size else {}
    return GenericTensor("", GrpsDataType.DT_FLOAT32, shape, flat)
