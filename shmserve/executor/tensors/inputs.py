"""Inputs in host memory, as a backend sees them: views of a frontend's or a client's memory.

A model may keep a view after the answer. Therefore all arrays of an input are based on one
`numpy.frombuffer` array. If that array is still referenced when the answer is made, the slot stays
leased until the array is collected (I3).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from shmserve.errors import Internal
from shmserve.executor.backend import CPU
from shmserve.executor.devices import Devices
from shmserve.protocol.control.data_messages import Descriptor, WireTensor
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES

Array = np.ndarray[Any, Any]

_NOTHING = memoryview(b"")


def from_bytes(view: memoryview, dtype: np.dtype[Any]) -> Array:
    """Return a one-dimensional array on `view`, which may be empty. (numpy refuses empty
    buffers.)"""
    return np.frombuffer(view, dtype) if len(view) else np.empty(0, dtype)


class Input:
    """An input tensor in host memory; implements `backend.InputTensor`.

    Attributes:
        lease: (slot, generation) of the frontend's slot that contains the bytes; None: the bytes
            are in client memory.
        base: array that all views are based on, if a view was made.
        copied: number of bytes copied by the processor.
        moved: number of bytes copied to a GPU.
    """

    __slots__ = (
        "_arriving", "_devices", "_model", "_near", "_over", "base", "buffer", "copied",
        "datatype", "lease", "moved", "name", "shape",
    )  # fmt: skip

    device = CPU

    def __init__(
        self,
        tensor: WireTensor,
        view: memoryview,
        model: str,
        devices: Devices,
        copied: int = 0,
        moved: int = 0,
    ) -> None:
        at = tensor.at
        self.lease = (at.slot, at.generation) if type(at) is Descriptor else None
        self.name = tensor.name
        self.datatype = tensor.datatype
        self.shape = tensor.shape
        self.buffer = view
        self.base: Array | None = None
        self.copied = copied
        self.moved = moved
        self._model = model
        self._devices = devices
        self._near: Any = None  # copy on the device
        self._arriving: Any = None  # event: the copy on the device is complete
        self._over = False

    def numpy(self) -> Array:
        """Return a read-only array on the shared bytes. BYTES elements are copied out first."""
        if self._over:
            raise Internal(f"input '{self.name}' was asked for after its request had ended")
        if self.datatype == "BYTES":
            elements = bytes_codec.decode(
                bytes(self.buffer), prod(self.shape), self.name, self._model
            )
            array = np.empty(len(elements), dtype=np.object_)
            array[:] = elements
            return array.reshape(self.shape)
        if self.base is None:
            self.base = from_bytes(self.buffer, DATATYPES[self.datatype].numpy)
        return self.base.reshape(self.shape)

    def private(self) -> Array:
        """Return a writable copy. BYTES elements are copied out anyway."""
        if self.datatype == "BYTES":
            return self.numpy()
        self.copied += len(self.buffer)
        flat = from_bytes(self.buffer, DATATYPES[self.datatype].numpy)
        return flat.reshape(self.shape).copy()

    def bring(self) -> None:
        """Begin to copy the input to the instance's device, unless the input is of type BYTES."""
        if self._near is None and DATATYPES[self.datatype].itemsize:
            source = from_bytes(self.buffer, DATATYPES[self.datatype].numpy).reshape(self.shape)
            self._near, self._arriving = self._devices.open().bring(source)
            self.moved += source.nbytes

    def on_device(self) -> Any:
        """Return a CuPy array of a copy on the instance's device, made once."""
        if self._over:
            raise Internal(f"input '{self.name}' was asked for after its request had ended")
        if not DATATYPES[self.datatype].itemsize:
            raise Internal(f"input '{self.name}': BYTES tensors have no form on a device")
        self.bring()
        if self._arriving is not None:
            self._devices.open().await_copy(self._arriving)
            self._arriving = None
        return self._near

    def private_on_device(self) -> Any:
        """Return the array of `on_device`: the copy belongs to the request."""
        return self.on_device()

    def close(self) -> None:
        """Drop the views, as the request has ended: the bytes may be reused from now on."""
        self._over = True
        self.base = self._near = self._arriving = None
        self.buffer = _NOTHING

    def is_held(self) -> bool:
        """Return True if the model keeps a view of the input."""
        return self.base is not None and sys.getrefcount(self.base) > UNSHARED

    def when_let_go(
        self, append: Callable[[tuple[int, int]], None], lease: tuple[int, int]
    ) -> None:
        """Append the lease once the last view is gone. Drop this object's own reference now."""
        if self.base is not None:
            weakref.finalize(self.base, append, lease)
            self.base = None


class _Holder:
    __slots__ = ("base",)

    def __init__(self) -> None:
        self.base = np.empty(1)


# sys.getrefcount of an array that only an attribute refers to, which differs by Python version.
_probe = _Holder()
UNSHARED = sys.getrefcount(_probe.base)
