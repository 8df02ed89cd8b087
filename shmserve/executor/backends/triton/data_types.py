"""Data types in the Triton dialect: numbers, config names, numpy types."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from shmserve._generated import model_config_pb2 as pb
from shmserve.errors import InvalidArgument
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import BY_CONFIG_NAME, from_numpy, object_array

# Numbers of the data types in the schema, by name, e.g. DataType.TYPE_FP32
_NUMBERS = {name: number for name, number in pb.DataType.items() if name in BY_CONFIG_NAME}
DataType = IntEnum("DataType", _NUMBERS)  # type: ignore[misc]  # mypy wants them written out

# Name of a data type -> numpy type
TRITON_STRING_TO_NUMPY: dict[str, Any] = {n: kind.numpy.type for n, kind in BY_CONFIG_NAME.items()}


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Return the numpy type of a name, e.g. "TYPE_FP32". Strings are objects.

    Raises:
        KeyError: no data type has this name.
    """
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Return the numpy type of a data type's number, or None for an unknown number."""
    names = DataType.__members__.items()
    return next((TRITON_STRING_TO_NUMPY[name] for name, n in names if n == data_type), None)


def numpy_to_triton_type(data_type: Any) -> DataType | None:
    """Return the data type of a numpy type, or None if no data type corresponds."""
    kind = from_numpy(np.dtype(data_type))
    return None if kind is None else DataType.__members__.get(kind.config_name)


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> Any:
    """Return the elements of an array of strings as framed bytes: () for an empty array, None for
    an array without strings."""
    if not input_tensor.size:
        return ()
    kind = from_numpy(input_tensor.dtype)
    if kind is None or kind.name != "BYTES":
        return None
    return bytes_codec.encode(texts(input_tensor.ravel()))


def deserialize_bytes_tensor(encoded_tensor: Any) -> np.ndarray[Any, Any]:
    """Return the elements of framed bytes as a flat array of `bytes` objects.

    Raises:
        TritonModelException: the last element is incomplete.
    """
    data = memoryview(encoded_tensor).cast("B")
    elements: list[bytes] = []
    position = 0
    while position < len(data):
        start = position + bytes_codec.LENGTH_BYTES
        end = start + int.from_bytes(data[position:start], "little")
        if end > len(data) or start > len(data):
            raise TritonModelException("the encoded tensor ends within an element")
        elements.append(bytes(data[start:end]))
        position = end
    return object_array(elements, (len(elements),))


def texts(array: np.ndarray[Any, Any]) -> list[bytes | str]:
    """Return the elements of a flat array as bytes or text. Other objects become text by `str`, as
    in Triton."""
    return [e if isinstance(e, bytes | str) else str(e) for e in array.tolist()]


def as_strings(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an array of strings with elements that are all bytes or text.

    Raises:
        TritonModelException: a text cannot be encoded.
    """
    if array.dtype.kind == "O" and not all(isinstance(e, bytes | str) for e in array.flat):
        array = object_array(texts(array.ravel()), array.shape)
    try:
        bytes_codec.to_bytes(e for e in array.flat if isinstance(e, str))
    except InvalidArgument as ex:
        raise TritonModelException(ex.message) from None
    return array
