"""Gathered inputs in GPU memory: the rows of each request are copied there from where they lie.

Nothing is gathered on the host. Each request takes one DMA, from a frontend's slot or a client's
region. All copies run in the order of the requests, on the stream that runs ahead of execution.
"""

from __future__ import annotations

from math import prod
from typing import Any

from shmserve.core.device_names import device_name
from shmserve.executor.devices import Devices
from shmserve.executor.tensors.cuda_region import CudaInput, DeviceInput
from shmserve.executor.tensors.inputs import Array, Input, from_bytes
from shmserve.protocol.control.data_messages import WireTensor
from shmserve.tensor.dtypes import DATATYPES


class DeviceRows(DeviceInput):
    """A numeric input of a batch; implements `backend.InputTensor`."""

    def __init__(self, like: WireTensor, rows: int, devices: Devices) -> None:
        """Reserve memory for `rows` rows of the same shape as the rows of `like`."""
        super().__init__(like)
        self.shape = (rows, *like.shape[1:])
        self._dtype = DATATYPES[like.datatype].numpy
        self._device = devices.open()
        self.device = device_name(self._device.ordinal)
        self._near = self._device.room(self.shape, self._dtype)
        self._sources: list[Input | CudaInput] = []  # kept until the device has read them
        self._arriving: Any = None
        self._host: Array | None = None  # copy, if the model asks for one

    def put(self, start: int, source: Input | CudaInput) -> None:
        """Begin to copy the rows of a request, which become the rows from `start` on."""
        target = self._near[start : start + source.shape[0]]
        self._sources.append(source)
        if isinstance(source, CudaInput):
            self._device.move(source.on_device(), target)
        else:
            self._device.bring_to(from_bytes(source.buffer, self._dtype), target)
        self.moved += prod(source.shape) * self._dtype.itemsize + source.moved
        self.copied += source.copied

    def arrive(self, rows: int) -> None:
        """Complete the input, which has `rows` rows."""
        self._near = self._near[:rows]
        self.shape = (rows, *self.shape[1:])
        self._arriving = self._device.arrival()

    def on_device(self) -> Any:
        """Return a CuPy array of all rows."""
        self._check_open()
        if self._arriving is not None:
            self._device.await_copy(self._arriving)
            self._arriving = None
        return self._near

    private_on_device = on_device  # the memory belongs to the batch

    @property
    def buffer(self) -> memoryview:
        """Return the bytes, copied to host memory."""
        return self.numpy().reshape(-1).view("u1").data

    def numpy(self) -> Array:
        """Return a read-only array of a copy in host memory."""
        if self._host is None:
            self._host = self.private()
            self._host.setflags(write=False)
        return self._host

    def private(self) -> Array:
        """Return a writable copy in host memory."""
        near = self.on_device()
        copy = self._device.to_host(near)
        self.moved += copy.nbytes
        return copy

    def is_held(self) -> bool:
        """Return False: an array that a model keeps has memory of its own."""
        return False

    def close(self) -> None:
        """Release the memory. The batch is over, and the device has finished reading."""
        self._over = True
        self._near = self._arriving = self._host = None
        for source in self._sources:
            source.close()
        self._sources.clear()
