"""The `ndarray` of a GRPS request: nested lists of numbers that stand for one FP32 tensor."""

from __future__ import annotations

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
    """The fast way does not know what to make of it, or would overlook something."""


_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[],"))


def from_text(text: bytes) -> GenericTensor:
    """The tensor of JSON text that is plain numbers in a regular nest of lists.

    Raises:
        NotSimple: it is not; `from_value` says what is wrong, if anything is.
    """
    shape = _regular(text.translate(None, _NOT_STRUCTURE))
    try:
        numbers = _numbers(b"[%b]" % text.translate(None, b"[]"))
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
    except (*_MALFORMED, OverflowError, struct.error):
        raise NotSimple from None
    if math.prod(shape) != len(numbers):  # an empty list looks like one of one number
        raise NotSimple
    return _fp32(np.frombuffer(packed, "<f4"), shape)


def _regular(skeleton: bytes) -> tuple[int, ...]:
    """The shape of a nest of lists of which only brackets and commas are left.

    A regular one is made of equal parts on each level, so it can be built again from the
    first part of each and compared.
    """
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
    """The tensor of nested lists.

    Raises:
        InvalidArgument: they are not regular, or hold something else than numbers.
    """
    try:
        array = np.array(value)
    except ValueError:  # numpy's words are about its own rules
        raise InvalidArgument(
            "ndarray must be numbers in lists of equal lengths on each level"
        ) from None
    if array.dtype.kind not in "biuf":
        raise InvalidArgument("ndarray must hold numbers only, none of them beyond 64 bits")
    if not array.size and array.ndim < 2:
        raise InvalidArgument("ndarray is empty")
    with np.errstate(over="ignore"):  # too big for FP32 becomes Infinity
        return _fp32(array.astype(np.float32).reshape(-1), array.shape)


def _fp32(values: Array, shape: tuple[int, ...]) -> GenericTensor:
    flat = {int(GrpsDataType.DT_FLOAT32): values} if values.size else {}
    return GenericTensor("", GrpsDataType.DT_FLOAT32, shape, flat)
