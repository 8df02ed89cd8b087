"""Inputs in the executor's own memory, which no client has sent."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from shmserve.errors import ConfigError, InvalidArgument
from shmserve.executor.backend import CPU
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES, object_array


class MemoryInput:
    """An input on an array; implements `backend.InputTensor`. `xp` is the array module of the
    model's device."""

    device = CPU

    def __init__(self, name: str, datatype: str, array: np.ndarray[Any, Any], xp: Any) -> None:
        self.on_device = self.private_on_device = lambda: xp.asarray(array)
        self.name = name
        self.datatype = datatype
        self.shape = array.shape
        self._array = array
        if DATATYPES[datatype].itemsize:
            array.setflags(write=False)
            self.buffer = array.reshape(-1).view(np.uint8).data
        else:
            self.buffer = memoryview(bytes_codec.encode(array.ravel().tolist()))

    def numpy(self) -> np.ndarray[Any, Any]:
        # An object array is copied, as for clients: a model could write into the elements
        # otherwise.
        return self._array if DATATYPES[self.datatype].itemsize else self._array.copy()

    def private(self) -> np.ndarray[Any, Any]:
        return self._array.copy()


def zeros(datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return an array of zeros, or of empty strings."""
    if datatype == "BYTES":
        return object_array([b""] * prod(shape), shape)
    return np.zeros(shape, DATATYPES[datatype].numpy)


def from_data(
    data: bytes, name: str, datatype: str, shape: tuple[int, ...], model: str, where: str
) -> np.ndarray[Any, Any]:
    """Return the tensor in a file of the model's folder, in the binary format of the protocol.
    Raise ConfigError, with a text that begins with `where`, if `data` is no such tensor."""
    kind = DATATYPES[datatype]
    if kind.itemsize:
        nbytes = prod(shape) * kind.itemsize
        if len(data) != nbytes:
            raise ConfigError(f"{where} has {len(data)} bytes, expected {nbytes}")
        return np.frombuffer(bytearray(data), kind.numpy).reshape(shape)
    try:
        return object_array(bytes_codec.decode(data, prod(shape), name, model), shape)
    except InvalidArgument as ex:
        raise ConfigError(f"{where}: {ex.message}") from None
