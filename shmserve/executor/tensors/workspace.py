"""Workspace: memory that the requests of one executor share.

Opens the memory that a request names: slots of frontends and windows of client memory. Keeps the
slots whose arrays a model still holds.
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
        """Return True if the model keeps a view of the slot."""
        return sys.getrefcount(self.base) > UNSHARED


class Workspace:
    """Arena, client regions and kept slots of one model's executor. For any thread, except `settle`
    and `trim`, which are for the thread that uses the channels. `outputs`: names of all outputs of
    the model."""

    def __init__(self, spec: ModelSpec, memory: ArenaMemory, regions: ClientRegions) -> None:
        self.spec = spec
        self.memory = memory
        self.regions = regions
        self.devices = regions.devices
        self.outputs = tuple(output.name for output in spec.outputs)
        self._let_go: list[tuple[int, int]] = []  # leases to release, filled by finalizers

    # ---------------------------------------------------------------- client memory

    def read(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        """Return the inputs of a request, by name. Raise ProtocolViolation if a descriptor leads
        outside of the frontend's segments. Raise ShmserveError if client memory cannot be used."""
        return {tensor.name: self.open(frontend, tensor) for tensor in message.inputs}

    def open(self, frontend: FrontendProcess, tensor: WireTensor) -> Input | CudaInput:
        """Return an input; raises as `read`."""
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
            # A private copy: parsed bytes must not change meanwhile, and not all code takes
            # unaligned arrays.
            view = memoryview(bytes(view))
            copied = at.nbytes
        if not kind.itemsize:
            bytes_codec.check(view, prod(tensor.shape), tensor.name, self.spec.name)
        return Input(tensor, view, self.spec.name, self.devices, copied=copied)

    def copy_input(self, frontend: FrontendProcess, tensor: WireTensor, target: memoryview) -> None:
        """Copy an input to its place in a batch; raises as `read`. Memory that a client could
        truncate is read by a system call, which reports truncation, whereas a mapped read would
        end in SIGBUS."""
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
        view = region.to_host(at)  # BYTES is parsed on the host
        bytes_codec.check(view, prod(tensor.shape), tensor.name, self.spec.name)
        return Input(tensor, view, self.spec.name, self.devices, moved=at.nbytes)

    def places(self, message: Execute) -> Places:
        """Return the windows for the outputs that go into client memory, by name."""
        return {place.name: self._place(place) for place in message.places}

    def _place(self, place: OutputPlace) -> RegionOutput | CudaPlace:
        region = self.regions.use(place.at.region)
        if isinstance(region, CudaRegion):
            return CudaPlace(place.name, place.at, region)
        return RegionOutput(place.name, place.at, region, self.devices)

    # -------------------------------------------------------------------- own slots

    def give_up(self, offer: Offer) -> None:
        """Take back an offered slot that the model did not use."""
        if offer.is_held():
            self.hold(offer)
        else:
            self.memory.reclaim(offer.slot)

    def hold(self, offer: Offer) -> None:
        """Keep a slot until its array is gone. The model kept the array and could write to the
        slot, so the executor takes a lease of its own."""
        slot = offer.slot
        if slot.state is SlotState.RESERVED:
            self.memory.seal_and_lease(slot)
        else:
            self.memory.lease(slot)
        weakref.finalize(offer.base, self._let_go.append, (slot.number, slot.generation))

    # -------------------------------------------------------------- between requests

    def settle(self) -> None:
        """Release slots that models have let go of, and end the process if the device is lost.

        Without the device the process is useless. At its end, waiting frontends see EOF, so their
        requests run elsewhere or fail at once, and the supervisor starts another executor.
        """
        while self._let_go:
            try:
                self.memory.release(*self._let_go.pop())
            except StaleDescriptor as ex:
                log.error("a held slot was released twice: %s", ex)
        if self.regions.closing:
            self.regions.tell_closed()
        device = self.devices.opened
        if device is not None and device.lost:
            log.critical("ending, because the device is lost: %s", device.lost)
            os.kill(os.getpid(), signal.SIGKILL)

    def trim(self, idle_s: float) -> None:
        """Release memory that has been idle for `idle_s` seconds."""
        self.memory.trim(idle_s)
        self.devices.trim(idle_s)
