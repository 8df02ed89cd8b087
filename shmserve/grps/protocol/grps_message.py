"""The GRPS message: what it holds, and its protobuf wire form.

`parse` copies nothing that is large: `bin_data` and floating-point tensors are views of
the bytes it was given. `encode` gives the parts of the wire form, so that a message can
be written straight to where it belongs with one copy.
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
    """How it went."""

    UNKNOWN = 0
    SUCCESS = 1
    FAILURE = 2


class GrpsStatus(Struct, frozen=True):
    """What an answer says about itself."""

    code: int = 0
    msg: str = ""
    status: int = StatusFlag.UNKNOWN


NUMPY: dict[int, np.dtype[Any]] = {
    GrpsDataType.DT_UINT8: np.dtype(np.uint8),
    GrpsDataType.DT_INT8: np.dtype(np.int8),
    GrpsDataType.DT_INT16: np.dtype(np.int16),
    GrpsDataType.DT_INT32: np.dtype(np.int32),
    GrpsDataType.DT_INT64: np.dtype(np.int64),
    GrpsDataType.DT_FLOAT16: np.dtype(np.float16),
    GrpsDataType.DT_FLOAT32: np.dtype(np.float32),
    GrpsDataType.DT_FLOAT64: np.dtype(np.float64),
}
_OF_NUMPY = {kind: number for number, kind in NUMPY.items()}


class GenericTensor(Struct, frozen=True, eq=False):
    """One tensor of a message.

    `flat` has the fields that were set, by element type, as the wire has them: the
    message format allows a field other than that of `dtype`, and any number of elements.
    `array` is what is meant.
    """

    name: str = ""
    dtype: int = GrpsDataType.DT_INVALID
    shape: tuple[int, ...] = ()
    flat: Mapping[int, Array | list[str]] = {}

    @classmethod
    def of(cls, name: str, values: Any) -> GenericTensor:
        """A tensor of a numpy array (or what makes one); text as DT_STRING.

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
        """The elements in the tensor's shape; DT_STRING as an object array of `str`.

        Raises:
            InvalidArgument: the number of elements is not that of the shape, a value does
                not fit the element type, or there is no such type.
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
    """A message. Of the fields in `KINDS` at most one is set; `which` tells."""

    status: GrpsStatus | None = None
    model: str = ""
    bin_data: Bytes | None = None
    str_data: str | None = None
    gtensors: Sequence[GenericTensor] | None = None
    ndarray: bool = False
    gmap: GenericMap | None = None

    @property
    def which(self) -> str:
        """The name of the field that is set, or ""."""
        return next((kind for kind in KINDS if getattr(self, kind) not in (None, False)), "")

    def tensor(self, name: str = "") -> GenericTensor:
        """The tensor of that name; without a name the first one.

        Raises:
            InvalidArgument: there is none.
        """
        for tensor in self.gtensors or ():
            if not name or tensor.name == name:
                return tensor
        raise InvalidArgument(f"the message has no tensor '{name}'")


def failure(text: str, code: int = 500) -> GrpsMessage:
    """The answer that says what went wrong."""
    return GrpsMessage(status=GrpsStatus(code, text, StatusFlag.FAILURE))


def success() -> GrpsStatus:
    """The status of an answer that is one."""
    return GrpsStatus(200, "OK", StatusFlag.SUCCESS)
