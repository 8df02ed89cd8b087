"""Client regions in GPU memory that this executor has open, and tensors in them."""

from __future__ import annotations

import weakref
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.core.registry import Region
from shmserve.errors import Internal, InvalidArgument
from shmserve.executor.devices import Devices
from shmserve.executor.tensors.inputs import Input
from shmserve.executor.tensors.region_outputs import Window
from shmserve.protocol.control.data_messages import RegionRef, WireTensor
from shmserve.tensor.dtypes import DATATYPES

if TYPE_CHECKING:
    from shmserve.cuda.device import Device
    from shmserve.cuda.ipc import Imported

Array = np.ndarray[Any, Any]
_BYTE = np.dtype(np.uint8)
# bytes that a kernel may read at once; a misaligned read makes the device unusable
_ALIGNMENT = 16


class CudaRegion:
    """An open region in GPU memory, which is closed with the last array on it."""

    def __init__(self, region: Region, device: Device, imported: Imported) -> None:
        self.region = region
        self.device = device
        self.ordinal = imported.ordinal
        self.memory: weakref.ref[object] = weakref.ref(imported)  # dead: the memory is closed
        self._imported = imported

    def check(self) -> None:
        """Do nothing: unlike a file, device memory cannot shrink under a region."""

    def is_usable(self, at: RegionRef) -> bool:
        """Return True if kernels of the instance's device may work on a window in place."""
        aligned = (self._imported.address + at.offset) % _ALIGNMENT == 0
        return aligned and self.ordinal == self.device.ordinal

    def to_host(self, at: RegionRef) -> memoryview:
        """Return the bytes of a window, copied to host memory; raises as `array`."""
        return self.device.to_host(self.array(at, (at.nbytes,), _BYTE)).data.toreadonly()

    def array(self, at: RegionRef, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a CuPy array that begins at the start of a window. Raise InvalidArgument if the
        array would reach outside of the region."""
        nbytes = prod(shape) * dtype.itemsize
        size = self.region.byte_size
        if not 0 <= nbytes <= at.nbytes or at.offset < 0 or at.offset + nbytes > size:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{self.region.name}'"
            )
        address = self._imported.address + at.offset
        return self.device.array_at(address, shape, dtype, self._imported, self.ordinal)


class DeviceInput:
    """An input in GPU memory. `copied` and `moved` are as in `Input`."""

    lease = None
    base = None

    def __init__(self, tensor: WireTensor) -> None:
        self.name = tensor.name
        self.datatype = tensor.datatype
        self.shape = tensor.shape
        self.copied = 0
        self.moved = 0
        self._near: Any = None
        self._over = False

    def _check_open(self) -> None:
        if self._over:
            raise Internal(f"input '{self.name}' was asked for after its request had ended")


class CudaInput(DeviceInput):
    """A numeric input in a CUDA region; implements `backend.InputTensor`."""

    def __init__(
        self, tensor: WireTensor, region: CudaRegion, model: str, devices: Devices
    ) -> None:
        assert isinstance(tensor.at, RegionRef)
        super().__init__(tensor)
        self.device = f"cuda:{region.ordinal}"
        self._devices = devices
        self._tensor = tensor
        self._at = tensor.at
        self._region = region
        self._model = model
        self._host: Input | None = None  # copy, if the model asks for one

    @property
    def buffer(self) -> memoryview:
        """Return the bytes, copied to host memory."""
        return self._on_host().buffer

    def numpy(self) -> Array:
        """Return a read-only array of a copy in host memory."""
        return self._on_host().numpy()

    def private(self) -> Array:
        """Return a writable copy in host memory."""
        copy = self._on_host().private()
        self.copied += copy.nbytes
        return copy

    def on_device(self) -> Any:
        """Return a CuPy array on the region, or on a copy if the instance's device cannot use the
        region."""
        self._check_open()
        if self._near is None:
            dtype = DATATYPES[self.datatype].numpy
            in_place = self._region.array(self._at, self.shape, dtype)
            usable = self._region.is_usable(self._at)
            self._near = in_place if usable else self._copy_of(in_place)
        return self._near

    def private_on_device(self) -> Any:
        """Return a CuPy array of a copy on the instance's device."""
        self._check_open()
        dtype = DATATYPES[self.datatype].numpy
        return self._copy_of(self._region.array(self._at, self.shape, dtype))

    def _copy_of(self, array: Any) -> Any:
        copy = self._region.device.copied(array)
        self.moved += copy.nbytes
        return copy

    def bring(self) -> None:
        """Do nothing: the bytes are on a device already."""

    def close(self) -> None:
        """Drop the arrays, as the request has ended."""
        self._over = True
        self._host = self._near = None

    def _on_host(self) -> Input:
        self._check_open()
        if self._host is None:
            view = self._region.to_host(self._at)
            self.moved += len(view)
            self._host = Input(self._tensor, view, self._model, self._devices)
        return self._host


class CudaPlace(Window):
    """A window of a CUDA region that an output goes to."""

    def __init__(self, name: str, at: RegionRef, region: CudaRegion) -> None:
        super().__init__(name, at)
        self._region = region

    def offer(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> Array:
        """Return a writable array in host memory, which `put` copies to the window."""
        self.check_size(nbytes)
        return np.empty(shape, dtype)

    def offer_on_device(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> Any:
        """Return a CuPy array on the window itself, or device memory that `put` copies from;
        raises as `offer`."""
        self.check_size(nbytes)
        if self._region.is_usable(self._at):
            return self._region.array(self._at, shape, dtype)
        return self._region.device.empty(shape, dtype)

    def _put_device(self, array: Any) -> None:
        target = self._region.array(self._at, (array.nbytes,), _BYTE)
        if not (array.flags.c_contiguous and array.data.ptr == target.data.ptr):
            self._region.device.move(array, target)
            self.moved = array.nbytes

    def _put_host(self, array: Array) -> None:
        target = self._region.array(self._at, (array.nbytes,), _BYTE)
        self._region.device.put_in(np.ascontiguousarray(array), target)
        # The driver may still read the array, which is freed after the return.
        self._region.device.synchronize()
        self.moved = array.nbytes
