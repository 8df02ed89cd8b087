"""Inputs in the executor's own memory, which no client has sent."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.executor.backend import CPU
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES


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
