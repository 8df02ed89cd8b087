"""JSON writer: GRPS messages to JSON, as protocol buffers map messages to JSON.

Names of the schema, enums as names, defaults left out, 64-bit integers as text, bytes as base64,
NaN and Infinity as text. Numbers are converted and printed in bulk.

FP32 numbers are printed as the shortest decimals that read back as the same number. JSON libraries
print doubles. The double nearest to a short decimal prints as exactly that decimal. So each FP32
number is rounded to the double with 6 significant digits, or with more (up to 9) until the double
converts back to the same FP32.
"""

import base64
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from shmserve.errors import InvalidArgument
from shmserve.grps.protocol.grps_message import (
    GenericMap,
    GenericTensor,
    GrpsDataType,
    GrpsMessage,
    GrpsStatus,
    StatusFlag,
)
from shmserve.grps.protocol.json_reader import FIELDS
from shmserve.tensor.dtypes import object_array

Array = np.ndarray[Any, Any]
_encode = msgspec.json.Encoder().encode
_DTYPES = {kind.value: kind.name for kind in GrpsDataType}
_FLAGS = {flag.value: flag.name for flag in StatusFlag}

# Powers of ten that a double holds exactly. A quotient of two exact doubles is rounded once, so
# the result is the double nearest to the decimal text.
_EXACT = 22
_POWERS = np.array([10.0**exponent for exponent in range(_EXACT + 1)])
_FEWEST = 6
_WHOLE = 1e6  # integers below this limit are short already


class _JsonStatus(Struct, omit_defaults=True):
    code: int = 0
    msg: str = ""
    status: str | int = StatusFlag.UNKNOWN.name


_JsonTensor: Any = msgspec.defstruct(
    "_JsonTensor",
    [
        ("name", str, ""),
        ("dtype", str | int, GrpsDataType.DT_INVALID.name),
        ("shape", tuple[int, ...], ()),
        *((name, Any, UNSET) for name in FIELDS.values()),
    ],
    omit_defaults=True,
)


class _JsonTensors(Struct, omit_defaults=True):
    tensors: list[Any] = []


class _JsonMessage(Struct, omit_defaults=True):
    status: _JsonStatus | UnsetType = UNSET
    model: str = ""
    bin_data: str | UnsetType = UNSET
    str_data: str | UnsetType = UNSET
    gtensors: _JsonTensors | UnsetType = UNSET
    ndarray: Any = UNSET
    gmap: Any = UNSET


def encode(message: GrpsMessage) -> bytes:
    """Return the JSON text of a message."""
    payload: dict[str, Any] = {}
    if message.str_data is not None:
        payload = {"str_data": message.str_data}
    elif message.gtensors is not None:
        payload = {"gtensors": _JsonTensors([_tensor(tensor) for tensor in message.gtensors])}
    elif message.bin_data is not None:
        payload = {"bin_data": base64.b64encode(message.bin_data).decode()}
    elif message.gmap is not None:
        payload = {"gmap": _map(message.gmap)}
    elif message.ndarray:
        payload = {"ndarray": {}}
    return _encode(_JsonMessage(_status(message.status), message.model, **payload))


def encode_ndarray(message: GrpsMessage) -> bytes:
    """Return the JSON text of an answer, with the first tensor as a nested list. Raise
    InvalidArgument if the answer has no tensor, or the first tensor is not FP32."""
    tensor = message.gtensors[0] if message.gtensors else None
    if tensor is None or tensor.dtype != GrpsDataType.DT_FLOAT32:
        raise InvalidArgument("No float32 tensors in output. Cannot convert to ndarray.")
    values = tensor.array
    if np.isfinite(values).all():
        nested = shortest(values.reshape(-1)).reshape(values.shape).tolist()
    else:
        nested = object_array(_floats(values.reshape(-1)), values.shape).tolist()
    return _encode(_JsonMessage(_status(message.status), ndarray=nested))


def _status(status: GrpsStatus | None) -> _JsonStatus | UnsetType:
    if status is None:
        return UNSET
    return _JsonStatus(status.code, status.msg, _FLAGS.get(status.status, status.status))


def _tensor(tensor: GenericTensor) -> Any:
    flat = {
        FIELDS[GrpsDataType(kind)]: _flat(kind, values)
        for kind, values in tensor.flat.items()
        if len(values)
    }
    dtype = _DTYPES.get(tensor.dtype, tensor.dtype)
    return _JsonTensor(tensor.name, dtype, tuple(tensor.shape), **flat)


def _flat(kind: int, values: Array | list[str]) -> Any:
    if isinstance(values, list):
        return values
    if values.dtype.kind == "f":
        return _floats(values)
    if kind == GrpsDataType.DT_INT64:
        return msgspec.Raw(b'["%b"]' % _encode(values.tolist())[1:-1].replace(b",", b'","'))
    return values.tolist()


def _floats(values: Array) -> list[Any]:
    if values.dtype.itemsize < 8:
        printed: list[Any] = shortest(values.astype(np.float32, copy=False)).tolist()
    else:
        printed = values.tolist()
    for index in np.flatnonzero(~np.isfinite(values)).tolist():
        value = printed[index]
        printed[index] = "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return printed


def _map(maps: GenericMap) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in maps.__struct_fields__:
        entries = getattr(maps, name)
        if not entries:
            continue
        values: Any = entries.values()
        if name == "s_i64":
            values = map(str, values)
        elif name in ("s_f", "s_d"):
            values = _floats(np.array(list(values), np.float32 if name == "s_f" else np.float64))
        fields[name] = dict(zip(entries, values, strict=True))  # bytes are written as base64
    return fields


def shortest(values: Array) -> Array:
    """Return doubles that print as the shortest decimals for these FP32 values."""
    with np.errstate(all="ignore"):  # NaN and Infinity stay unchanged
        doubles = values.astype(np.float64)
        plain = (doubles == np.rint(doubles)) & (np.abs(doubles) < _WHOLE)
        todo = np.flatnonzero(~plain & np.isfinite(doubles))
        if todo.size:
            doubles[todo] = _shorten(doubles[todo], values[todo])
    return doubles


def _shorten(doubles: Array, values: Array) -> Array:
    """Do the work of `shortest` for finite numbers other than small integers."""
    places = _FEWEST - 1 - np.floor(np.log10(np.abs(doubles))).astype(np.int64)
    if places.min() >= -_EXACT and places.max() <= _EXACT - 3:
        return _search(doubles, values, places)
    shortest = np.empty_like(doubles)
    near = (places >= -_EXACT) & (places <= _EXACT - 3)
    shortest[near] = _search(doubles[near], values[near], places[near])
    shortest[~near] = _one_by_one(values[~near])
    return shortest


def _search(doubles: Array, values: Array, places: Array) -> Array:
    # Most computed numbers need 8 digits, most typed numbers need 6.
    shortest = _rounded(doubles, places + 2)
    good = shortest.astype(np.float32) == values
    at = np.flatnonzero(good)
    for more in (1, 0):
        tried = _rounded(doubles[at], places[at] + more)
        same = tried.astype(np.float32) == values[at]
        at = at[same]
        shortest[at] = tried[same]
    at = np.flatnonzero(~good)
    if at.size:
        shortest[at] = _rounded(doubles[at], places[at] + 3)
        remaining = at[shortest[at].astype(np.float32) != values[at]]
        shortest[remaining] = _one_by_one(values[remaining])
    return shortest


def _rounded(doubles: Array, places: Array) -> Array:
    """Return the numbers rounded to `places` decimals. Negative places round before the point."""
    if places.size == 0 or places.min() >= 0:
        power = _POWERS[places]
        rounded: Array = np.rint(doubles * power) / power
        return rounded
    up, down = _POWERS[np.maximum(places, 0)], _POWERS[np.maximum(-places, 0)]
    above, below = np.rint(doubles * up) / up, np.rint(doubles / down) * down
    either: Array = np.where(places >= 0, above, below)
    return either


def _one_by_one(values: Array) -> Array:
    """Shorten the numbers by numpy's printing: as short, but ten times slower."""
    printed: Array = values.astype("U16").astype(np.float64)
    return printed
