"""Conversion between arrays and tensors of the protocol.

Types that numpy lacks, such as BF16, come from the optional package ml_dtypes.
"""

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
_BY_NAME = {row.numpy_name: row.name for row in _ROWS.values()}
_DTYPES = {row.name: np.dtype(row.numpy_name) for row in _ROWS.values() if not row.extension}
_BY_DTYPE: dict[np.dtype[Any], str] = {}  # datatypes found so far
NO_JSON = frozenset(row.name for row in ROWS if not row.json_ok)


class ClientTensor:
    """Input tensor. `payload` has the encoded bytes of BYTES elements. For other datatypes `array`
    has the elements: a numpy array, or a CuPy array on the GPU `device`."""

    __slots__ = ("array", "datatype", "device", "name", "nbytes", "payload", "shape")

    def __init__(self, name: str, value: Any, datatype: str | None = None) -> None:
        """Make a tensor of an array, a list or a number.

        Args:
            datatype: datatype for values without a dtype, such as lists; None: the datatype of
                numpy's array.

        Raises:
            ValueError: `value` is no tensor, or has numbers that `datatype` cannot hold.
            ImportError: `value` is on a GPU and CuPy is not installed.
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
        """Copy the bytes to `target`, memory of exactly `nbytes` bytes on the host or, for a GPU
        array, on the same GPU. A copy within a GPU is complete after
        `device_arrays.synchronize`."""
        if self.payload is not None:
            target[:] = np.frombuffer(self.payload, np.uint8)
        elif self.device is None:
            np.copyto(target.view(self.array.dtype).reshape(self.shape), self.array)
        elif isinstance(target, np.ndarray):
            device_arrays.to_host(self.array, target)
        else:
            device_arrays.copy(self.array, target)

    def tobytes(self) -> bytes:
        """Return a copy of the bytes, for a lane's message."""
        if self.payload is not None:
            return self.payload
        data: bytes = self.array.tobytes() if self.device is None else bytes(self.data())
        return data

    def data(self) -> memoryview:
        """Return the bytes for a request body."""
        if self.payload is not None:
            return memoryview(self.payload)
        array = self.array if self.device is None else device_arrays.to_host(self.array)
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _array(name: str, value: Any) -> tuple[Any, int | None]:
    """Return a value as an array, and the ordinal of its GPU (None: host)."""
    if not device_arrays.is_on_gpu(value):
        try:
            return np.asarray(value), None
        except ValueError as ex:  # rows of different lengths
            raise ValueError(f"input '{name}': {ex}") from None
    try:
        array = device_arrays.as_cupy(value)
    except ValueError as ex:
        raise ValueError(f"input '{name}': {ex}") from None
    return array, int(array.device.id)


def _as(datatype: str, array: Array, value: Any, name: str) -> Array:
    """Convert numbers of a list to the model's datatype. The server judges other elements."""
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
    # object elements, because numpy makes floats of integers beyond 2**63
    exact: Any = np.asarray(value, np.object_)
    if any(isinstance(number, float) for number in exact.flat):
        raise ValueError(f"input '{name}': fractions do not fit {datatype}, which the model wants")
    limits = np.iinfo(dtype)
    if any(not limits.min <= number <= limits.max for number in exact.flat):
        raise ValueError(f"input '{name}': numbers beyond {datatype}, which the model wants")
    fit: Array = exact.astype(dtype)
    return fit


def datatype_of(dtype: np.dtype[Any], name: str) -> str:
    """Return the protocol's name of a dtype. Raise ValueError for other dtypes."""
    datatype = _BY_DTYPE.get(dtype)
    if datatype is not None:
        return datatype
    datatype = _BY_NAME.get(dtype.name)
    if datatype is not None and dtype.isnative:
        _BY_DTYPE[dtype] = datatype
        return datatype
    if dtype.kind in "SUO":
        return BYTES
    raise ValueError(f"input '{name}': arrays of {dtype} have no place in the protocol")


def dtype_of(datatype: str) -> np.dtype[Any]:
    """Return the dtype of fixed-size elements. Without ml_dtypes, BF16 is uint16 bits."""
    dtype = _DTYPES.get(datatype)
    if dtype is not None:
        return dtype
    row = _ROWS[datatype]
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(f"uint{8 * row.itemsize}")
    extension: np.dtype[Any] = np.dtype(getattr(ml_dtypes, row.numpy_name))
    return extension


def nbytes_of(datatype: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a tensor; None if elements or an open dimension decide the size."""
    if datatype not in _ROWS or (shape and min(shape) < 0):
        return None
    return math.prod(shape) * _ROWS[datatype].itemsize


def from_bytes(data: Any, datatype: str, shape: tuple[int, ...], name: str, model: str) -> Any:
    """Return an array of bytes on the host or a GPU: a view of `data`, except for BYTES elements,
    which are decoded. Raise ValueError if the bytes do not fit the shape."""
    if shape and min(shape) < 0:  # which `reshape` would take for "as many as there are"
        raise ValueError(f"the shape {list(shape)} of '{name}' has negative dimensions")
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
