"""What the requests of one executor share: its arena, the clients' regions, slots that stay.

Opens the memory that a request names: slots of frontends and windows of client memory. Keeps
slots whose arrays a model has not let go of.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import weakref
from math import prod

from msgspec import Struct

from shmserve.core.memory.slots import Slot, SlotState
from shmserve.errors import StaleDescriptor
from shmserve.executor.peers.frontend_connections import FrontendProcess
from shmserve.executor.tensors.cuda_region import CudaInput, CudaPlace, CudaRegion
from shmserve.executor.tensors.inputs import UNSHARED, Array, Input
from shmserve.executor.tensors.mapped_regions import ClientRegions
from shmserve.executor.tensors.region_outputs import RegionOutput
from shmserve.protocol.control.data_messages import (
    Descriptor,
    Execute,
    OutputPlace,
    RegionRef,
    WireTensor,
)
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.client_region import Shrunk
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec

log = logging.getLogger(__name__)

Inputs = dict[str, Input | CudaInput]
Places = dict[str, RegionOutput | CudaPlace]


class Offer(Struct):
    """An output slot that the model may write to directly; its arrays are based on `base`."""

    slot: Slot
    base: Array

    def is_held(self) -> bool:
        """Whether anybody else holds a view of it."""
        return sys.getrefcount(self.base) > UNSHARED


class Workspace:
    """Of one model. Any thread, but for `settle` and `trim`: the one that has the channels.

    Attributes:
        outputs: names of all outputs.
    """

    def __init__(self, spec: ModelSpec, memory: ArenaMemory, regions: ClientRegions) -> None:
        self.spec = spec
        self.memory = memory
        self.regions = regions
        self.devices = regions.devices
        self.outputs = tuple(output.name for output in spec.outputs)
        self._let_go: list[tuple[int, int]] = []  # appended to by finalizers

    # ---------------------------------------------------------------- client memory

    def read(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        """A request's inputs by name.

        Raises:
            ProtocolViolation: a descriptor outside of what the frontend offered.
            ShmserveError: client memory that cannot be used.
        """
        return {tensor.name: self.open(frontend, tensor) for tensor in message.inputs}

    def open(self, frontend: FrontendProcess, tensor: WireTensor) -> Input | CudaInput:
        """One input; raises as `read`."""
        at = tensor.at
        if type(at) is Descriptor:
            view = frontend.segments.view(at)
            return Input(tensor, view, self.spec.name, self.devices)
        return self._from_region(tensor, at)

    def _from_region(self, tensor: WireTensor, at: RegionRef) -> Input | CudaInput:
        kind = DATATYPES[tensor.datatype]
        region = self.regions.use(at.region)
        if isinstance(region, CudaRegion):
            return self._from_device(tensor, at, region)
        copied = 0
        try:
            view = region.read(at) if region.copy else region.view(at).toreadonly()
        except Shrunk as ex:
            self.regions.shrunk(ex)
            raise
        if region.copy:
            copied = at.nbytes
        elif not kind.itemsize or (region.region.offset + at.offset) % kind.numpy.alignment:
            # What is parsed must not change meanwhile; what is not aligned is not for everyone.
            view = memoryview(bytes(view))
            copied = at.nbytes
        if not kind.itemsize:
            bytes_codec.check(view, prod(tensor.shape), tensor.name, self.spec.name)
        return Input(tensor, view, self.spec.name, self.devices, copied=copied)

    def copy_input(self, frontend: FrontendProcess, tensor: WireTensor, target: memoryview) -> None:
        """Copy an input to where it is gathered with others; raises as `read`. Memory that its
        client may truncate meanwhile is read by the kernel, which then says so."""
        at = tensor.at
        if isinstance(at, Descriptor):
            target[:] = frontend.segments.view(at)
            return
        region = self.regions.use(at.region)
        if isinstance(region, CudaRegion):
            target[:] = region.to_host(at)
        else:
            try:
                region.read_into(at, target)
            except Shrunk as ex:
                self.regions.shrunk(ex)
                raise
        if not DATATYPES[tensor.datatype].itemsize:
            bytes_codec.check(target, prod(tensor.shape), tensor.name, self.spec.name)

    def _from_device(
        self, tensor: WireTensor, at: RegionRef, region: CudaRegion
    ) -> Input | CudaInput:
        if DATATYPES[tensor.datatype].itemsize:
            return CudaInput(tensor, region, self.spec.name, self.devices)
        view = region.to_host(at)  # what is parsed is parsed there
        bytes_codec.check(view, prod(tensor.shape), tensor.name, self.spec.name)
        return Input(tensor, view, self.spec.name, self.devices, moved=at.nbytes)

    def places(self, message: Execute) -> Places:
        """Where the client wants outputs.

        Raises:
            ShmserveError: client memory that cannot be used.
        """
        return {place.name: self._place(place) for place in message.places}

    def _place(self, place: OutputPlace) -> RegionOutput | CudaPlace:
        region = self.regions.use(place.at.region)
        if isinstance(region, CudaRegion):
            return CudaPlace(place.name, place.at, region)
        return RegionOutput(place.name, place.at, region, self.devices)

    # -------------------------------------------------------------------- own slots

    def give_up(self, offer: Offer) -> None:
        """Take back what the model was offered and has not given."""
        if offer.is_held():
            self.hold(offer)
        else:
            self.memory.reclaim(offer.slot)

    def hold(self, offer: Offer) -> None:
        """The model kept the array of its output: it could write there, so a lease of our
        own keeps the slot from being used again until the array is gone."""
        slot = offer.slot
        if slot.state is SlotState.RESERVED:
            self.memory.seal_and_lease(slot)
        else:
            self.memory.lease(slot)
        weakref.finalize(offer.base, self._let_go.append, (slot.number, slot.generation))

    # -------------------------------------------------------------- between requests

    def settle(self) -> None:
        """Give back what models have let go of since. Without its device the process is of no
        use, and ends: what waits gets EOF, so that it runs elsewhere or is told at once, and the
        supervisor starts another."""
        while self._let_go:
            try:
                self.memory.release(*self._let_go.pop())
            except StaleDescriptor as ex:
                log.error("a held slot was released twice: %s", ex)
        if self.regions.closing:
            self.regions.tell_closed()
        device = self.devices.opened
        if device is not None and device.lost:
            log.critical("ending, the device is lost: %s", device.lost)
            os.kill(os.getpid(), signal.SIGKILL)

    def trim(self, idle_s: float) -> None:
        """Give back memory that has been of no use for so long."""
        self.memory.trim(idle_s)
        self.devices.trim(idle_s)
