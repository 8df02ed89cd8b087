"""Outputs that go into client memory: each output has a window of a region.

A model that asks for the memory of its output gets an array on the window. Any other output is
copied once. Nothing is ever written outside of the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.executor.backend import Output
from shmserve.executor.devices import Devices, is_on_device
from shmserve.executor.tensors.inputs import Array, from_bytes
from shmserve.protocol.control.data_messages import RegionRef, WireTensor
from shmserve.shm.client_region import ClientRegion
from shmserve.tensor import bytes_codec


class Window(ABC):
    """The window for one output: at most `at.nbytes` bytes of a region. `copied`: number of bytes
    that the processor has copied to the window. `moved`: number of bytes that the GPU has copied to
    the window."""

    def __init__(self, name: str, at: RegionRef) -> None:
        self.copied = 0
        self.moved = 0
        self._name = name
        self._at = at

    def size_of(self, output: Output) -> int | list[bytes]:
        """Check that an output fits. Return the size in bytes, or elements of a BYTES output."""
        if output.datatype == "BYTES":
            elements = output.elements()
            self.check_size(bytes_codec.encoded_size(elements))
            return elements
        nbytes = int(output.array.nbytes)
        self.check_size(nbytes)
        return nbytes

    def check_size(self, nbytes: int) -> None:
        """Check that `nbytes` bytes fit into the window. Raise InvalidArgument if the window is too
        small."""
        if nbytes > self._at.nbytes:
            raise InvalidArgument(
                f"shared memory size specified with the request for output '{self._name}'"
                f" ({self._at.nbytes} bytes) should be at least {nbytes} bytes to hold the results"
            )

    def put(self, output: Output, size: int | list[bytes]) -> WireTensor:
        """Write the output to the window; `size` is the result of `size_of`. A copy from or to a
        GPU is complete only after a wait for the device."""
        self.copied = self.moved = 0
        array = output.array
        if isinstance(size, list):
            array = from_bytes(memoryview(bytes_codec.encode(size)), np.dtype(np.uint8))
        if array.nbytes:
            if is_on_device(array):
                self._put_device(array)
            else:
                self._put_host(array)
        at = RegionRef(self._at.region, self._at.offset, array.nbytes)
        return WireTensor(output.name, output.datatype, output.array.shape, at)

    @abstractmethod
    def _put_device(self, array: Any) -> None: ...

    @abstractmethod
    def _put_host(self, array: Array) -> None: ...


class RegionOutput(Window):
    """A window of a system region that an output goes to."""

    def __init__(self, name: str, at: RegionRef, region: ClientRegion, devices: Devices) -> None:
        """Raises InvalidArgument if the window does not lie in the region."""
        super().__init__(name, at)
        self._region = region
        self._devices = devices
        self._view = memoryview(b"") if region.copy else region.view(at)
        self._address = region.address_of(at) if len(self._view) else 0
        self._offered: Array | None = None

    def offer(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> Array:
        """Return a writable array in the client's memory. If that memory must not be mapped or is
        not aligned, the array is in private memory."""
        self.check_size(nbytes)
        if self._region.copy or not nbytes or self._address % dtype.alignment:
            return np.empty(shape, dtype)
        self._offered = np.frombuffer(self._view[:nbytes], dtype).reshape(shape)
        return self._offered

    def offer_on_device(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> Any:
        """Return device memory, which `put` copies to the window; raises as `offer`."""
        self.check_size(nbytes)
        return self._devices.open().empty(shape, dtype)

    def _put_device(self, array: Any) -> None:
        device = self._devices.open()
        self.moved = array.nbytes
        if self._region.copy:
            host = np.empty(array.nbytes, np.uint8)
            device.take_out(array, host)
            device.synchronize()
            self._write(host.data)
        else:
            device.take_out(array, np.frombuffer(self._view[: array.nbytes], np.uint8))

    def _put_host(self, array: Array) -> None:
        if array is self._offered:
            return  # the model has written into the window
        if self._region.copy:
            # Only a private array is read, which no client can truncate.
            self._write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        elif not (
            array.flags.c_contiguous and array.__array_interface__["data"][0] == self._address
        ):
            target = np.frombuffer(self._view[: array.nbytes], array.dtype).reshape(array.shape)
            np.copyto(target, array)
            self.copied += array.nbytes

    def _write(self, data: memoryview) -> None:
        self._region.write(self._at, data)
        self.copied += len(data)
