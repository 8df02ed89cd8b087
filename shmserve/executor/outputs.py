"""Where the bytes of a response go: into the descriptor of a slot, copied only if needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.core.memory.slots import Slot
from shmserve.errors import Internal
from shmserve.executor.backend import Output, Response
from shmserve.executor.devices import is_on_device
from shmserve.executor.tensors.inputs import ExecutorRequest, Offer
from shmserve.protocol.control.data_messages import Descriptor, WireTensor
from shmserve.shm.arena import ArenaMemory
from shmserve.tensor import bytes_codec

Array = np.ndarray[Any, Any]

_LOOK_AT = 4096  # bytes; finding out where smaller arrays lie costs more than copying them


class Placement:
    """The outputs of one response, placed.

    `tensors` go into the answer, `slots` (sealed, not leased yet) hold those that are
    not aliases of inputs, `offers` are those slots a model may have kept an array of.
    On an error `Holdings.undo` gives everything back.
    """

    def __init__(self, request: ExecutorRequest, memory: ArenaMemory) -> None:
        self.tensors: list[WireTensor] = []
        self.slots: list[Slot] = []
        self.offers: list[Offer] = []
        self.copied_out = 0
        self.moved = 0  # bytes that come from a GPU: there once that has been waited for
        self._request = request
        self._memory = memory

    def place(self, response: Response) -> None:
        """Place the requested outputs in the requested order; others are dropped.

        Raises:
            ArenaExhausted: the pool has no room.
            Internal: an output lies on another GPU than the instance's.
        """
        by_name = {output.name: output for output in response.outputs}
        self.copied_out += response.copied
        places = self._request.places
        unfinished = False
        for output in response.outputs:
            if is_on_device(output.array) and output.name in self._request.requested:
                self._check_device(output)
                unfinished = True
        if unfinished:  # the copies wait for the default stream only, and a model may use others
            self._request.devices.open().synchronize()
        # Sizes first: where one output does not fit, no client's memory is written at all.
        sizes = {name: places[name].size_of(by_name[name]) for name in places if name in by_name}
        for name in self._request.requested:
            if name not in by_name:
                continue
            if name in sizes:
                self.tensors.append(places[name].put(by_name[name], sizes[name]))
                self.copied_out += places[name].copied
                self.moved += places[name].moved
            else:
                self.tensors.append(self._place(by_name[name]))

    def _check_device(self, output: Output) -> None:
        """What is waited for before the answer is one device: the instance's. One on the CPU,
        whose model computes on a GPU by itself, has that of the first such output."""
        found = output.array.device.id
        ordinal = self._request.devices.open(found).ordinal
        if found != ordinal:
            raise Internal(
                f"output '{output.name}' lies on CUDA device {found}, "
                f"but the outputs of this instance must lie on device {ordinal}"
            )

    def _place(self, output: Output) -> WireTensor:
        array = output.array
        if output.datatype == "BYTES":
            return self._encode(output)
        if is_on_device(array):
            return self._from_device(output)
        found = self._in_offer(output) or self._in_input(output)
        if found is not None:
            return found
        slot = self._memory.reserve(array.nbytes)
        self.slots.append(slot)
        if array.nbytes:
            target = np.frombuffer(self._memory.view(slot), array.dtype).reshape(array.shape)
            np.copyto(target, array)
            self.copied_out += array.nbytes
        return self._sealed(output, slot, self._memory.descriptor(slot))

    def _from_device(self, output: Output) -> WireTensor:
        array = output.array
        slot = self._memory.reserve(array.nbytes)
        self.slots.append(slot)
        if array.nbytes:
            target = np.frombuffer(self._memory.view(slot), np.uint8)
            self._request.devices.open().take_out(array, target)
            self.moved += array.nbytes
        return self._sealed(output, slot, self._memory.descriptor(slot))

    def _encode(self, output: Output) -> WireTensor:
        elements = bytes_codec.to_bytes(output.array.ravel().tolist())
        slot = self._memory.reserve(bytes_codec.encoded_size(elements))
        self.slots.append(slot)
        bytes_codec.write(elements, self._memory.view(slot))
        self.copied_out += slot.nbytes
        return self._sealed(output, slot, self._memory.descriptor(slot))

    def _in_offer(self, output: Output) -> WireTensor | None:
        offer = self._request.offers.get(output.name)
        if offer is None:
            return None
        offset = _offset_within(output.array, offer.base)
        if offset is None:
            return None
        del self._request.offers[output.name]
        slot = offer.slot
        self.slots.append(slot)
        self.offers.append(offer)
        whole = self._memory.descriptor(slot)
        at = Descriptor(
            whole.segment, whole.slot, whole.generation, whole.offset + offset, output.array.nbytes
        )
        return self._sealed(output, slot, at)

    def _in_input(self, output: Output) -> WireTensor | None:
        """A model that returns (a part of) its input needs no copy: the frontend has it."""
        in_slots = [tensor for tensor in self._request.inputs.values() if tensor.slot]
        for index, tensor in enumerate(in_slots):
            base = tensor.base
            if base is not None:
                offset = _offset_within(output.array, base)
                if offset is not None:
                    at = Descriptor(0, 0, 0, offset, output.array.nbytes)
                    shape = output.array.shape
                    return WireTensor(output.name, output.datatype, shape, at, alias=index)
        return None

    def _sealed(self, output: Output, slot: Slot, at: Descriptor) -> WireTensor:
        self._memory.seal(slot)
        return WireTensor(output.name, output.datatype, output.array.shape, at)

    def clear(self) -> None:
        """Forget everything: others have taken care of the slots."""
        self.tensors.clear()
        self.slots.clear()
        self.offers.clear()


def _offset_within(array: Array, base: Array) -> int | None:
    """Offset in bytes of a contiguous array inside of `base`'s memory, None if it is not."""
    if not array.flags.c_contiguous:
        return None
    if array.base is base and array.nbytes == base.nbytes:
        return 0
    if array.nbytes < _LOOK_AT:
        return None
    offset = int(array.ctypes.data) - int(base.ctypes.data)
    return offset if 0 <= offset <= base.nbytes - array.nbytes else None
