"""Tensor places: where the tensors of an ONNX session lie, on the host or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.cuda import runtime
from shmserve.executor.backend import InputTensor, Request
from shmserve.executor.backends.array_views import array_at, device_array_at

_SOMEWHERE = 256


class OnHost:
    """Host memory. `kind` and `number`: name of the device in a binding."""

    kind, number = "cpu", 0

    def input(self, tensor: InputTensor) -> Any:
        """Return a row-major array of an input."""
        return tensor.numpy()

    def offer(self, request: Request, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        """Return a row-major array for an output."""
        return request.offer(name, datatype, shape)

    def address(self, array: Any) -> int:
        address: int = array.__array_interface__["data"][0]
        return address

    def view(self, value: Any, dtype: np.dtype[Any]) -> Any:
        """Return ONNX Runtime's own memory as an array that keeps the memory alive."""
        return array_at(value.data_ptr(), tuple(value.shape()), dtype, value)

    def begin(self) -> None:
        """Do nothing before a run: inputs on the host are complete."""


class OnDevice:
    """GPU memory; methods as in `OnHost`.

    ONNX Runtime computes on a stream of its own, without synchronisation with other streams. At
    the end of a run it waits for its stream.
    """

    kind = "cuda"

    def __init__(self, number: int) -> None:
        self.number = number

    def input(self, tensor: InputTensor) -> Any:
        return tensor.on_device()

    def offer(self, request: Request, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        return request.offer_on_device(name, datatype, shape)

    def address(self, array: Any) -> int:
        # CuPy has no address for an empty array, and ONNX Runtime requires one.
        return int(array.data.ptr) or _SOMEWHERE

    def view(self, value: Any, dtype: np.dtype[Any]) -> Any:
        shape = tuple(value.shape())
        return device_array_at(value.data_ptr(), shape, dtype, value, self.number)

    def begin(self) -> None:
        """Wait before a run until inputs are complete on the default stream. Copies for the next
        request go on meanwhile, on another stream."""
        cuda = runtime.cupy().cuda
        with cuda.Device(self.number):
            cuda.Stream.null.synchronize()
