"""Requests as a backend sees them, and the placing of their outputs.

An output is in a slot that was offered to the model, goes into client memory, or is copied to a
slot only if needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.core.memory.slots import Slot
from shmserve.errors import Internal
from shmserve.executor.backend import Output, Response, Responses
from shmserve.executor.devices import is_on_device
from shmserve.executor.peers.frontend_connections import FrontendProcess
from shmserve.executor.peers.lane import InlineOutput
from shmserve.executor.tensors.cuda_region import CudaInput
from shmserve.executor.tensors.device_rows import DeviceRows
from shmserve.executor.tensors.inputs import Array, Input, from_bytes
from shmserve.executor.tensors.workspace import Offer, Places, Workspace
from shmserve.protocol.control.data_messages import (
    Descriptor,
    Execute,
    Parameter,
    RegionRef,
    WireTensor,
)
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES

Watch = Callable[[], bool]  # returns True if the request has been cancelled

_NOWHERE: Places = {}
_IN_ANSWER = RegionRef(0, 0, 0)
_LOOK_AT = 4096  # bytes; for smaller arrays, a copy is cheaper than finding out where they lie


class ExecutorRequest:
    """A request that the executor runs; implements `backend.Request`."""

    __slots__ = (
        "_counted", "_watch", "callers", "deadline_ns", "id", "inline_bytes", "inputs", "offers",
        "parameters", "places", "requested", "rescheduled", "responses", "sequence", "traceparent",
        "workspace",
    )  # fmt: skip

    def __init__(
        self,
        workspace: Workspace,
        message: Execute,
        inputs: Mapping[str, Input | CudaInput | DeviceRows],
        watch: Watch,
        responses: Responses | None = None,
        inline_bytes: int = 0,
    ) -> None:
        """Raises ShmserveError if client memory cannot be used. `inline_bytes`: outputs of fewer
        bytes are sent in the answer itself."""
        self.id = message.id
        self.parameters: dict[str, Parameter] = message.parameters
        self.deadline_ns = message.deadline_ns
        self.callers = message.callers
        self.traceparent = message.traceparent
        self.sequence = message.sequence
        self.inputs = inputs
        self.requested = message.outputs or workspace.outputs
        self.responses = responses
        self.rescheduled = False
        self.places = workspace.places(message) if message.places else _NOWHERE
        self.offers: dict[str, Offer] = {}
        self.workspace = workspace
        self.inline_bytes = inline_bytes
        self._watch = watch
        self._counted = (0, 0)

    @property
    def cancelled(self) -> bool:
        """Return True once no client waits for the answer."""
        return self._watch()

    def reschedule(self, again: bool) -> None:
        """Record whether the model wants to run the request again."""
        self.rescheduled = again

    def run_again(self, parameters: dict[str, Parameter]) -> None:
        """Begin another run, with the parameters of that run."""
        self.parameters = parameters
        self.rescheduled = False

    def offer(self, name: str, datatype: str, shape: tuple[int, ...]) -> Array:
        """Return a writable array in the output slot of `name`, or in private memory for an output
        in the answer itself. A second call replaces the offer. In a stream, the array
        is never in the client's memory, where an earlier answer may still be read."""
        kind = DATATYPES[datatype]
        if not kind.itemsize:
            raise Internal(f"output '{name}': BYTES tensors have no size before they are written")
        nbytes = prod(shape) * kind.itemsize
        if name in self.places and self.responses is None:
            return self.places[name].offer(shape, kind.numpy, nbytes)
        if nbytes < self.inline_bytes:
            return np.empty(shape, kind.numpy)
        memory = self.workspace.memory
        earlier = self.offers.pop(name, None)
        if earlier is not None:
            self.workspace.give_up(earlier)
        slot = memory.reserve(nbytes)
        base = from_bytes(slot.view, kind.numpy)
        self.offers[name] = Offer(slot, base)
        return base.reshape(shape)

    def offer_on_device(self, name: str, datatype: str, shape: tuple[int, ...]) -> Any:
        """Return a CuPy array for the output `name`: in the client's CUDA region if the instance's
        device can write there, else in device memory that is copied out once."""
        kind = DATATYPES[datatype]
        if not kind.itemsize:
            raise Internal(f"output '{name}': BYTES tensors have no form on a device")
        if name in self.places and self.responses is None:
            nbytes = prod(shape) * kind.itemsize
            return self.places[name].offer_on_device(shape, kind.numpy, nbytes)
        return self.workspace.devices.open().empty(shape, kind.numpy)

    def take_counts(self) -> tuple[int, int]:
        """Return how many bytes of all inputs were copied by the processor, and how many by DMA,
        since the last call."""
        copied = moved = 0
        for tensor in self.inputs.values():
            copied += tensor.copied
            moved += tensor.moved
        counted_copied, counted_moved = self._counted
        self._counted = copied, moved
        return copied - counted_copied, moved - counted_moved

    def drop_offers(self) -> None:
        """Take back the offered slots that the model did not use."""
        while self.offers:
            self.workspace.give_up(self.offers.popitem()[1])

    def retained(self, frontend: FrontendProcess) -> tuple[int, ...]:
        """Return the indices of the inputs that the model has kept views of, counted among the
        inputs in slots. `frontend.freed` gets their leases once the views are gone."""
        kept: list[int] = []
        index = 0
        for tensor in self.inputs.values():
            if tensor.lease is None:
                continue  # the view keeps the mapping open, which is enough
            if tensor.is_held():
                kept.append(index)
                tensor.when_let_go(frontend.freed.append, tensor.lease)
            index += 1
        return tuple(kept)


class Outputs(Struct, eq=False):
    """The outputs of one response. After placing, they are either leased to a frontend or undone.

    Attributes:
        tensors: tensors for the answer.
        slots: this executor's slots with the outputs, except outputs that are aliases of inputs.
        copied: number of bytes copied by the processor.
        moved: number of bytes copied from a GPU; complete only after a wait for the device.
    """

    _request: ExecutorRequest
    tensors: list[WireTensor] = []
    slots: list[Slot] = []
    copied: int = 0
    moved: int = 0
    _offers: list[Offer] = []  # slots of which a model may have kept an array

    def place(self, response: Response) -> None:
        """Place the requested outputs in the requested order; drop other outputs. Raise
        ArenaExhausted if the pool has no room. Raise Internal if an output lies on another GPU than
        the instance's."""
        request = self._request
        self.copied += response.copied
        by_name: dict[str, Output] = {}
        on_host = True
        for output in response.outputs:
            by_name[output.name] = output
            if type(output.array) is not np.ndarray:
                on_host = False
        if not on_host:
            self.await_device(response)
        places = request.places
        # Check sizes first: if one output does not fit, no client memory is written at all.
        sizes: dict[str, int | list[bytes]] = {}
        for name in places:
            if name in by_name:
                sizes[name] = places[name].size_of(by_name[name])
        for name in request.requested:
            if name not in by_name:
                continue
            output = by_name[name]
            is_array = type(output.array) is np.ndarray
            if name in sizes:
                self.tensors.append(places[name].put(output, sizes[name]))
                self.copied += places[name].copied
                self.moved += places[name].moved
            elif output.datatype == "BYTES":
                self._encode(output)
            elif not is_array and is_on_device(output.array):
                self._take_out(output)
            elif is_array and output.array.nbytes < request.inline_bytes:
                self._inline(output, output.array.tobytes())
            elif not (name in request.offers and self._is_in_offer(output)):
                self._copy(output)

    def await_device(self, response: Response) -> None:
        """Wait for the device, if outputs come from a GPU: copies wait for the default stream
        only, but a model may use other streams.

        Only the instance's device is waited for. An instance on the CPU, whose model uses a GPU by
        itself, takes the device of the first such output.
        """
        devices = self._request.workspace.devices
        unfinished = False
        for output in response.outputs:
            if output.name not in self._request.requested or not is_on_device(output.array):
                continue
            number = output.array.device.id
            ordinal = devices.open(number).ordinal
            if number != ordinal:
                raise Internal(
                    f"output '{output.name}' lies on CUDA device {number}, "
                    f"but the outputs of this instance must lie on device {ordinal}"
                )
            unfinished = True
        if unfinished:
            devices.open().synchronize()

    def _inline(self, output: Output, data: bytes) -> None:
        """Have the answer contain the bytes of an output. The lane counts them as copied."""
        name, datatype, shape = output.name, output.datatype, output.array.shape
        self.tensors.append(InlineOutput(name, datatype, shape, _IN_ANSWER, data=data))

    def _add(self, output: Output, slot: Slot, offset: int, nbytes: int) -> None:
        at = Descriptor(slot.segment, slot.number, slot.generation, slot.offset + offset, nbytes)
        self.tensors.append(WireTensor(output.name, output.datatype, output.array.shape, at))

    def _reserve(self, nbytes: int) -> Slot:
        slot = self._request.workspace.memory.reserve(nbytes)
        self.slots.append(slot)
        return slot

    def _copy(self, output: Output) -> None:
        """Copy an array of the model to a slot. An array that is an input, or part of an input, is
        named as an alias instead, as the frontend has the bytes."""
        array = output.array
        in_slots = [i for i in self._request.inputs.values() if i.lease is not None]
        for index, tensor in enumerate(in_slots):
            offset = None if tensor.base is None else offset_within(array, tensor.base)
            if offset is not None:
                at = Descriptor(0, 0, 0, offset, array.nbytes)
                alias = WireTensor(output.name, output.datatype, array.shape, at, alias=index)
                self.tensors.append(alias)
                return
        slot = self._reserve(array.nbytes)
        if array.nbytes:
            np.copyto(np.frombuffer(slot.view, array.dtype).reshape(array.shape), array)
            self.copied += array.nbytes
        self._add(output, slot, 0, array.nbytes)

    def _take_out(self, output: Output) -> None:
        array = output.array
        slot = self._reserve(array.nbytes)
        if array.nbytes:
            target = np.frombuffer(slot.view, np.uint8)
            self._request.workspace.devices.open().take_out(array, target)
            self.moved += array.nbytes
        self._add(output, slot, 0, array.nbytes)

    def _encode(self, output: Output) -> None:
        elements = output.elements()
        if bytes_codec.encoded_size(elements) < self._request.inline_bytes:
            self._inline(output, bytes_codec.encode(elements))
            return
        slot = self._reserve(bytes_codec.encoded_size(elements))
        bytes_codec.write(elements, slot.view)
        self.copied += slot.nbytes
        self._add(output, slot, 0, slot.nbytes)

    def _is_in_offer(self, output: Output) -> bool:
        """Return True if the output is in the slot that the model was offered, and so is placed
        already."""
        offer = self._request.offers[output.name]
        offset = offset_within(output.array, offer.base)
        if offset is None:
            return False
        del self._request.offers[output.name]
        self.slots.append(offer.slot)
        self._offers.append(offer)
        self._add(output, offer.slot, offset, output.array.nbytes)
        return True

    def lease(self) -> list[tuple[int, int]]:
        """Seal the slots and lease them to a frontend. Return (slot, generation) of each."""
        leases: list[tuple[int, int]] = []
        for slot in self.slots:
            self._request.workspace.memory.seal_and_lease(slot)
            leases.append((slot.number, slot.generation))
        for offer in self._offers:
            if offer.is_held():
                self._request.workspace.hold(offer)
        return leases

    def undo(self) -> None:
        """Take back the slots of a failed response."""
        offered = {offer.slot.number for offer in self._offers}
        for slot in self.slots:
            if slot.number not in offered:
                self._request.workspace.memory.reclaim(slot)
        for offer in self._offers:
            self._request.workspace.give_up(offer)
        self.tensors.clear()
        self.slots.clear()
        self._offers.clear()


def offset_within(array: Array, base: Array) -> int | None:
    """Return the offset, in bytes, of a contiguous array inside of the memory of `base`, or None
    if the array is not inside."""
    if not array.flags.c_contiguous:
        return None
    if array.base is base and array.nbytes == base.nbytes:
        return 0
    if array.nbytes < _LOOK_AT:
        return None
    offset = int(array.ctypes.data) - int(base.ctypes.data)
    return offset if 0 <= offset <= base.nbytes - array.nbytes else None
