"""The GRPS message and its parts.

`message_wire` and `json_reader` create messages, `message_wire` and `json_writer` encode them.
Nothing large is copied: `bin_data` and floating-point tensors may be views of the bytes that a
message was read from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.errors import InvalidArgument
from shmserve.tensor.dtypes import object_array

Array = np.ndarray[Any, Any]
Bytes = bytes | bytearray | memoryview
KINDS = ("bin_data", "str_data", "gtensors", "ndarray", "gmap")


class GrpsDataType(IntEnum):
    """Element types of a tensor."""

    DT_INVALID = 0
    DT_UINT8 = 1
    DT_INT8 = 2
    DT_INT16 = 3
    DT_INT32 = 4
    DT_INT64 = 5
    DT_FLOAT16 = 6
    DT_FLOAT32 = 7
    DT_FLOAT64 = 8
    DT_STRING = 9


class StatusFlag(IntEnum):
    """Success or failure of a request."""

    UNKNOWN = 0
    SUCCESS = 1
    FAILURE = 2


class GrpsStatus(Struct, frozen=True):
    """The status of an answer."""

    code: int = 0
    msg: str = ""
    status: int = StatusFlag.UNKNOWN


NUMPY: dict[int, np.dtype[Any]] = {
    kind: np.dtype(kind.name.removeprefix("DT_").lower())
    for kind in GrpsDataType
    if kind not in (GrpsDataType.DT_INVALID, GrpsDataType.DT_STRING)
}
_OF_NUMPY = {kind: number for number, kind in NUMPY.items()}


class GenericTensor(Struct, frozen=True, eq=False):
    """A tensor of a message.

    Attributes:
        flat: elements as set in the wire form, by element type. The format allows fields of other
            types than `dtype`, and any number of elements. `array` takes the elements of `dtype`
            and checks their number.
    """

    name: str = ""
    dtype: int = GrpsDataType.DT_INVALID
    shape: tuple[int, ...] = ()
    flat: Mapping[int, Array | list[str]] = {}

    @classmethod
    def of(cls, name: str, values: Any) -> GenericTensor:
        """Return a tensor with the values of a numpy array, or of anything that numpy converts.
        Text becomes DT_STRING.

        Raises:
            InvalidArgument: the format has no such element type.
        """
        array = np.asarray(values)
        if array.dtype.kind in "OSU":
            texts = [t.decode() if isinstance(t, bytes) else str(t) for t in array.ravel().tolist()]
            return cls(name, GrpsDataType.DT_STRING, array.shape, {GrpsDataType.DT_STRING: texts})
        kind = _OF_NUMPY.get(array.dtype)
        if kind is None:
            raise InvalidArgument(f"tensor '{name}': {array.dtype} is no GRPS data type")
        flat = array.astype(np.float32) if kind == GrpsDataType.DT_FLOAT16 else array
        return cls(name, kind, array.shape, {kind: flat.reshape(-1)})

    @property
    def array(self) -> Array:
        """Return the elements in the tensor's shape, DT_STRING as an object array of `str`.

        Raises:
            InvalidArgument: the number of elements does not fit the shape, a value does not fit
                the element type, or the element type is unknown.
        """
        values = self.flat.get(self.dtype, [])
        if len(values) != prod(self.shape):
            raise InvalidArgument(
                f"tensor '{self.name}' has shape {list(self.shape)} and {len(values)} values"
            )
        if self.dtype == GrpsDataType.DT_STRING:
            return object_array(values, self.shape)
        kind = NUMPY.get(self.dtype)
        if kind is None:
            raise InvalidArgument(f"tensor '{self.name}' has data type {self.dtype}")
        array = np.asarray(values)
        if kind.kind in "iu" and array.dtype != kind and array.size:
            limits = np.iinfo(kind)
            if array.min() < limits.min or array.max() > limits.max:
                raise InvalidArgument(
                    f"tensor '{self.name}' has a value that does not fit "
                    f"{GrpsDataType(self.dtype).name}"
                )
        return array.astype(kind, copy=False).reshape(self.shape)


class GenericMap(Struct, frozen=True):
    """The maps of a message, by the types of their values."""

    s_s: Mapping[str, str] = {}
    s_b: Mapping[str, Bytes] = {}
    s_i32: Mapping[str, int] = {}
    s_i64: Mapping[str, int] = {}
    s_f: Mapping[str, float] = {}
    s_d: Mapping[str, float] = {}


class GrpsMessage(Struct, frozen=True, eq=False):
    """A message. At most one of the fields in `KINDS` is set; `which` names it."""

    status: GrpsStatus | None = None
    model: str = ""
    bin_data: Bytes | None = None
    str_data: str | None = None
    gtensors: Sequence[GenericTensor] | None = None
    ndarray: bool = False
    gmap: GenericMap | None = None

    @property
    def which(self) -> str:
        """Return the name of the field that is set, or ""."""
        return next((kind for kind in KINDS if getattr(self, kind) not in (None, False)), "")

    def tensor(self, name: str = "") -> GenericTensor:
        """Return the tensor of this name, or the first tensor if no name is given.

        Raises:
            InvalidArgument: there is no such tensor.
        """
        for tensor in self.gtensors or ():
            if not name or tensor.name == name:
                return tensor
        raise InvalidArgument(f"the message has no tensor '{name}'")


def failure(text: str, code: int = 500) -> GrpsMessage:
    """Return an answer with the text and code of an error."""
    return GrpsMessage(status=GrpsStatus(code, text, StatusFlag.FAILURE))


def success() -> GrpsStatus:
    """Return the status of a successful answer."""
    return GrpsStatus(200, "OK", StatusFlag.SUCCESS)
