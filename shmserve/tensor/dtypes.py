"""Datatypes of the protocol: names, sizes and numpy types.

Source: Open Inference Protocol V2, "Tensor Data Types"; Triton adds BF16
(2 bytes, little-endian) and its ModelConfig names (``TYPE_FP32``, ``TYPE_STRING``).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import ml_dtypes
import numpy as np
from msgspec import Struct


class Datatype(Struct, frozen=True):
    """One datatype. `itemsize` is in bytes; 0 for BYTES, whose elements vary."""

    name: str
    config_name: str
    itemsize: int
    numpy: np.dtype[Any]
    json_ok: bool = True  # FP16 and BF16 travel in binary form only


Objects = Sequence[Any] | np.ndarray[Any, Any]


def _datatype(name: str, numpy: Any, config: str | None = None, json_ok: bool = True) -> Datatype:
    dtype = np.dtype(numpy)
    size = 0 if dtype == np.object_ else dtype.itemsize
    return Datatype(name, f"TYPE_{config or name}", size, dtype, json_ok)


_ALL: Final = (
    _datatype("BOOL", np.bool_),
    _datatype("UINT8", np.uint8),
    _datatype("UINT16", np.uint16),
    _datatype("UINT32", np.uint32),
    _datatype("UINT64", np.uint64),
    _datatype("INT8", np.int8),
    _datatype("INT16", np.int16),
    _datatype("INT32", np.int32),
    _datatype("INT64", np.int64),
    _datatype("FP16", np.float16, json_ok=False),
    _datatype("BF16", ml_dtypes.bfloat16, json_ok=False),
    _datatype("FP32", np.float32),
    _datatype("FP64", np.float64),
    _datatype("BYTES", np.object_, "STRING"),
)

DATATYPES: Final[dict[str, Datatype]] = {d.name: d for d in _ALL}
BY_CONFIG_NAME: Final[dict[str, Datatype]] = {d.config_name: d for d in _ALL}
_BY_NUMPY: Final[dict[np.dtype[Any], Datatype]] = {d.numpy: d for d in _ALL}


def from_numpy(dtype: np.dtype[Any]) -> Datatype | None:
    """The datatype a numpy array travels as; strings and bytes are BYTES; None if there is none."""
    datatype = _BY_NUMPY.get(dtype)
    if datatype is None and dtype.kind in "SUO":
        return DATATYPES["BYTES"]
    if datatype is None and not dtype.isnative:
        return None
    return datatype


def object_array(elements: Objects, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of Python objects, such as bytes or text, in a shape; numpy looks into none."""
    array = np.empty(prod(shape), np.object_)
    array[:] = elements
    return array.reshape(shape)
