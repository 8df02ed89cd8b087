"""Where the tensors of an ONNX session lie: on the host or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.cuda import runtime
from shmserve.executor.backend import InputTensor, Request
from shmserve.executor.backends.array_views import array_at, device_array_at

_SOMEWHERE = 256


class OnHost:
    """Host memory. `kind` and `number` are what a binding calls the device."""

    kind, number = "cpu", 0

    def input(self, tensor: InputTensor) -> Any:
        """A row-major array of an input."""
        return tensor.numpy()

    def offer(self, request: Request, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        """A row-major array for an output."""
        return request.offer(name, datatype, shape)

    def address(self, array: Any) -> int:
        address: int = array.__array_interface__["data"][0]
        return address

    def view(self, value: Any, dtype: np.dtype[Any]) -> Any:
        """ONNX Runtime's own memory as an array that keeps it."""
        return array_at(value.data_ptr(), tuple(value.shape()), dtype, value)

    def begin(self) -> None:
        """The session is about to run: inputs are there."""


class OnDevice:
    """A GPU's memory; as `OnHost`.

    ONNX Runtime computes on a stream of its own, which no other waits for and which waits for
    none, and ends a run by waiting for that one.
    """

    kind = "cuda"

    def __init__(self, number: int) -> None:
        self.number = number

    def input(self, tensor: InputTensor) -> Any:
        return tensor.on_device()

    def offer(self, request: Request, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        return request.offer_on_device(name, datatype, shape)

    def address(self, array: Any) -> int:
        # Of no elements CuPy has no address, and ONNX Runtime insists on one.
        return int(array.data.ptr) or _SOMEWHERE

    def view(self, value: Any, dtype: np.dtype[Any]) -> Any:
        shape = tuple(value.shape())
        return device_array_at(value.data_ptr(), shape, dtype, value, self.number)

    def begin(self) -> None:
        """Inputs are complete on the default stream. The copies for the next request, on
        another stream, go on."""
        cuda = runtime.cupy().cuda
        with cuda.Device(self.number):
            cuda.Stream.null.synchronize()
