"""Arrays to tensors of the protocol and back.

Types that numpy lacks, such as BF16, are those of the package ml_dtypes, which a client has if it
needs them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shmserve.client.memory import device_arrays
from shmserve.errors import ShmserveError
from shmserve.tensor import bytes_codec
from shmserve.tensor.datatype_table import ROWS

Array = np.ndarray[Any, Any]

BYTES = "BYTES"
_ROWS = {row.name: row for row in ROWS if row.itemsize}
_BY_DTYPE = {row.numpy_name: row.name for row in _ROWS.values()}
NO_JSON = frozenset(row.name for row in ROWS if not row.json_ok)


class ClientTensor:
    """An array on its way: `payload` has the bytes of BYTES elements, else `array` has, which
    is numpy's, or CuPy's on the GPU `device`."""

    __slots__ = ("array", "datatype", "device", "name", "nbytes", "payload", "shape")

    def __init__(self, name: str, value: Any, datatype: str | None = None) -> None:
        """`datatype`: of what has none of its own, such as a list; None: as numpy has it.

        Raises:
            ValueError: it is no tensor, or of numbers that the datatype cannot hold.
            ImportError: it is on a GPU, and CuPy is not installed.
        """
        array, device = (value, None) if type(value) is np.ndarray else _array(name, value)
        if datatype is not None and not hasattr(value, "dtype"):
            array = _as(datatype, array, value, name)
        self.name = name
        self.datatype = datatype_of(array.dtype, name)
        self.shape: tuple[int, ...] = array.shape
        self.payload: bytes | None = None
        if self.datatype == BYTES:
            self.payload = _encoded(array, name)
        self.array = array
        self.device = device
        self.nbytes: int = array.nbytes if self.payload is None else len(self.payload)

    @property
    def signature(self) -> tuple[str, str, tuple[int, ...]]:
        return self.name, self.datatype, self.shape

    def write(self, target: Any) -> None:
        """Copy the bytes to memory of exactly their size, of the host or, if they lie there
        (then `device_arrays.synchronize` tells when it is done), of their GPU."""
        if self.payload is not None:
            target[:] = np.frombuffer(self.payload, np.uint8)
        elif self.device is None:
            np.copyto(target.view(self.array.dtype).reshape(self.shape), self.array)
        elif isinstance(target, np.ndarray):
            device_arrays.to_host(self.array, target)
        else:
            device_arrays.copy(self.array, target)

    def data(self) -> memoryview:
        """The bytes, for a body."""
        if self.payload is not None:
            return memoryview(self.payload)
        array = self.array if self.device is None else device_arrays.to_host(self.array)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _array(name: str, value: Any) -> tuple[Any, int | None]:
    """As an array, and the GPU it is on."""
    if not device_arrays.is_on_gpu(value):
        try:
            return np.asarray(value), None
        except ValueError as ex:  # rows of several lengths
            raise ValueError(f"input '{name}': {ex}") from None
    try:
        array = device_arrays.as_cupy(value)
    except ValueError as ex:
        raise ValueError(f"input '{name}': {ex}") from None
    return array, int(array.device.id)


def _as(datatype: str, array: Array, value: Any, name: str) -> Array:
    """Numbers of a list in the model's datatype; what is of another kind is left to the server."""
    if array.dtype.kind not in "iuf" or datatype not in _ROWS:
        return array
    dtype = dtype_of(datatype)
    if dtype.name != _ROWS[datatype].numpy_name:
        raise ValueError(
            f"input '{name}': the model wants {datatype}, for which ml_dtypes is missing"
        )
    if dtype.kind in "iu":
        return _integers(datatype, dtype, value, name)
    if dtype.kind == "b":
        return array
    with np.errstate(over="ignore"):
        fit = array.astype(dtype)
    if not np.array_equal(np.isinf(fit.astype(np.float64)), np.isinf(array)):
        raise ValueError(f"input '{name}': numbers beyond {datatype}, which the model wants")
    return fit


def _integers(datatype: str, dtype: np.dtype[Any], value: Any, name: str) -> Array:
    exact: Any = np.asarray(value, np.object_)  # beyond 2**63 numpy would make floats of them
    if any(isinstance(number, float) for number in exact.flat):
        raise ValueError(f"input '{name}': fractions are no {datatype}, which the model wants")
    limits = np.iinfo(dtype)
    if any(not limits.min <= number <= limits.max for number in exact.flat):
        raise ValueError(f"input '{name}': numbers beyond {datatype}, which the model wants")
    fit: Array = exact.astype(dtype)
    return fit


def datatype_of(dtype: np.dtype[Any], name: str) -> str:
    """The protocol's name of a dtype.

    Raises:
        ValueError: it has none.
    """
    datatype = _BY_DTYPE.get(dtype.name)
    if datatype is not None and dtype.isnative:
        return datatype
    if dtype.kind in "SUO":
        return BYTES
    raise ValueError(f"input '{name}': arrays of {dtype} have no place in the protocol")


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the dtype of fixed-size elements. Without ml_dtypes, BF16 is its bits as uint16."""
    row = _ROWS[datatype]
    if not row.extension:
        return np.dtype(row.numpy_name)
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(f"uint{8 * row.itemsize}")
    extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, row.numpy_name))
    return extension


def nbytes_of(datatype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor; None where they depend on its elements or an open dimension."""
    if datatype not in _ROWS or (shape and min(shape) < 0):
        return None
    return math.prod(shape) * _ROWS[datatype].itemsize


def from_bytes(data: Any, datatype: str, shape: tuple[int, ...], name: str, model: str) -> Any:
    """The array, of either kind, that bytes hold: a view of them, except for BYTES elements.

    Raises:
        ValueError: they do not fit the shape.
    """
    if datatype != BYTES:
        return data.view(dtype_of(datatype)).reshape(shape)
    try:
        elements = bytes_codec.decode(data.data, math.prod(shape), name, model, "output")
    except ShmserveError as ex:
        raise ValueError(ex.message) from None
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)


def _encoded(array: Array, name: str) -> bytes:
    elements = array.ravel().tolist()
    if not all(isinstance(element, bytes | str) for element in elements):
        raise ValueError(f"input '{name}': the elements must be bytes or strings")
    try:
        return bytes_codec.encode(elements)
    except ShmserveError as ex:
        raise ValueError(f"input '{name}': {ex.message}") from None
