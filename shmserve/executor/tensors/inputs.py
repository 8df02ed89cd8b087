"""A request as a backend sees it, over the frontend's read-only memory and our own slots.

Views carry the danger that a model keeps them after its answer. So each array handed
out is based on one `numpy.frombuffer` array of ours: if that one is still referenced
when the answer is made, the slot behind it stays leased until it is collected (I3).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shmserve.core.memory.slots import Slot
from shmserve.errors import Internal
from shmserve.executor.backend import Responses
from shmserve.executor.devices import Devices
from shmserve.executor.tensors.region_outputs import Place
from shmserve.protocol.control.data_messages import Execute, Parameter, WireTensor
from shmserve.shm.arena import ArenaMemory
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES, element_count

if TYPE_CHECKING:
    from shmserve.executor.tensors.cuda_region import CudaInput, CudaPlace

    AnyInput: TypeAlias = "Input | CudaInput"
    Inputs = dict[str, AnyInput]
    Places = dict[str, Place | CudaPlace]

Array = np.ndarray[Any, Any]
Watch = Callable[[], bool]  # whether the request has been cancelled


_NOTHING = memoryview(b"")


def from_bytes(view: memoryview, dtype: np.dtype[Any]) -> Array:
    """A one-dimensional array on `view`; numpy refuses empty buffers."""
    return np.frombuffer(view, dtype) if len(view) else np.empty(0, dtype)


class Input:
    """One input tensor in host memory; implements `backend.InputTensor`.

    `copied`: bytes the processor copied for it; `moved`: bytes that went to a GPU.
    """

    __slots__ = (
        "_arriving",
        "_base",
        "_devices",
        "_model",
        "_near",
        "_over",
        "buffer",
        "copied",
        "datatype",
        "moved",
        "name",
        "shape",
        "slot",
    )

    device = "cpu"

    def __init__(
        self, tensor: WireTensor, view: memoryview, model: str, devices: Devices, slot: bool = True
    ) -> None:
        self.slot = slot  # its bytes are in a slot of the frontend, not in client memory
        self.name = tensor.name
        self.datatype = tensor.datatype
        self.shape = tensor.shape
        self.buffer = view
        self.copied = 0
        self.moved = 0
        self._model = model
        self._devices = devices
        self._near: Any = None  # the copy on the device
        self._arriving: Any = None  # an event: that copy is there
        self._base: Array | None = None
        self._over = False

    def numpy(self) -> Array:
        """A read-only array on the shared bytes; BYTES elements are copied out first."""
        if self._over:
            raise Internal(f"input '{self.name}' was asked for after its request had ended")
        if self.datatype == "BYTES":
            elements = bytes_codec.decode(
                bytes(self.buffer), element_count(self.shape), self.name, self._model
            )
            array = np.empty(len(elements), dtype=np.object_)
            array[:] = elements
            return array.reshape(self.shape)
        if self._base is None:
            self._base = from_bytes(self.buffer, DATATYPES[self.datatype].numpy)
        return self._base.reshape(self.shape)

    def private(self) -> Array:
        """A writable copy; BYTES elements are copied out anyway."""
        if self.datatype == "BYTES":
            return self.numpy()
        self.copied += len(self.buffer)
        flat = from_bytes(self.buffer, DATATYPES[self.datatype].numpy)
        return flat.reshape(self.shape).copy()

    def bring(self) -> None:
        """Begin to bring it to the instance's device, if it has a form there."""
        if self._near is None and DATATYPES[self.datatype].itemsize:
            source = from_bytes(self.buffer, DATATYPES[self.datatype].numpy).reshape(self.shape)
            self._near, self._arriving = self._devices.open().bring(source)
            self.moved += source.nbytes

    def on_device(self) -> Any:
        """A CuPy array of a copy on the instance's device, made once."""
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
        """The same: the copy is the request's own."""
        return self.on_device()

    def take_counts(self) -> tuple[int, int]:
        """Bytes that were copied by the processor and by DMA since this was last asked."""
        counts = self.copied, self.moved
        self.copied = self.moved = 0
        return counts

    @property
    def base(self) -> Array | None:
        """The array all views of this input are based on, if one was made."""
        return self._base

    def close(self) -> None:
        """The request has ended: its bytes may be used for something else from now on."""
        self._over = True
        self._base = self._near = self._arriving = None
        self.buffer = _NOTHING

    def still_held(self) -> bool:
        """Whether anybody else holds a view of it."""
        return self._base is not None and sys.getrefcount(self._base) > _UNSHARED

    def when_let_go(
        self, append: Callable[[tuple[int, int]], None], lease: tuple[int, int]
    ) -> None:
        """Append the lease once the last view is gone. Our own reference goes now."""
        if self._base is not None:
            weakref.finalize(self._base, append, lease)
            self._base = None


class Offer:
    """An output slot that the model may write to directly."""

    __slots__ = ("base", "slot")

    def __init__(self, slot: Slot, base: Array) -> None:
        self.slot = slot
        self.base = base

    def still_held(self) -> bool:
        """Whether anybody else holds a view of it."""
        return sys.getrefcount(self.base) > _UNSHARED


# What sys.getrefcount says of an array that only an attribute holds (it differs by version).
_probe = Offer(Slot(0), np.empty(1))
_UNSHARED = sys.getrefcount(_probe.base)


class ExecutorRequest:
    """One request; implements `backend.Request`."""

    __slots__ = (
        "_memory",
        "_watch",
        "deadline_ns",
        "devices",
        "id",
        "inputs",
        "offers",
        "parameters",
        "places",
        "requested",
        "responses",
    )

    def __init__(
        self,
        wire: Execute,
        inputs: Inputs,
        requested: tuple[str, ...],
        memory: ArenaMemory,
        places: Places | None,
        watch: Watch,
        devices: Devices,
        responses: Responses | None = None,
    ) -> None:
        self.places: Places = places or {}
        self.id = wire.id
        self.parameters: dict[str, Parameter] = wire.parameters
        self.deadline_ns = wire.deadline_ns
        self.inputs = inputs
        self.requested = requested
        self.responses = responses
        self.offers: dict[str, Offer] = {}
        self._memory = memory
        self._watch = watch
        self.devices = devices

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._watch()

    def offer(self, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
        """A writable array in the output slot of `name`; asking again replaces the offer."""
        kind = DATATYPES[datatype]
        if not kind.itemsize:
            raise Internal(f"output '{name}': BYTES tensors have no size before they are written")
        if name in self.places:
            return self.places[name].offer(shape, kind.numpy, element_count(shape) * kind.itemsize)
        earlier = self.offers.pop(name, None)
        if earlier is not None:
            self._memory.reclaim(earlier.slot)
        slot = self._memory.reserve(element_count(shape) * kind.itemsize)
        base = from_bytes(self._memory.view(slot), kind.numpy)
        self.offers[name] = Offer(slot, base)
        return base.reshape(shape)

    def offer_on_device(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        """A CuPy array for the output `name`: in the client's CUDA region itself where the
        instance's device can write there, else device memory that is copied out once."""
        kind = DATATYPES[datatype]
        if not kind.itemsize:
            raise Internal(f"output '{name}': BYTES tensors have no form on a device")
        if name in self.places:
            nbytes = element_count(shape) * kind.itemsize
            return self.places[name].offer_on_device(shape, kind.numpy, nbytes)
        return self.devices.open().empty(shape, kind.numpy)

    def take_counts(self) -> tuple[int, int]:
        """Of all inputs, as `Input.take_counts`."""
        copied = moved = 0
        for tensor in self.inputs.values():
            by_processor, by_dma = tensor.take_counts()
            copied += by_processor
            moved += by_dma
        return copied, moved
