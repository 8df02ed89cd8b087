"""From descriptors to inputs: slots of frontends and windows of client memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shmserve.executor.loop.connections import FrontendProcess
from shmserve.executor.tensors.cuda_region import CudaInput, CudaPlace, CudaRegion
from shmserve.executor.tensors.inputs import Input
from shmserve.executor.tensors.mapped_regions import ClientRegions
from shmserve.executor.tensors.region_outputs import Place
from shmserve.protocol.control.data_messages import (
    Descriptor,
    Execute,
    OutputPlace,
    RegionRef,
    WireTensor,
)
from shmserve.shm.client_region import Shrunk
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES, element_count

if TYPE_CHECKING:
    from shmserve.executor.tensors.inputs import AnyInput, Inputs


class InputReader:
    """Opens what requests of one model name."""

    def __init__(self, model: str, regions: ClientRegions) -> None:
        self._model = model
        self._regions = regions
        self._devices = regions.devices

    def read(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        """The inputs by name.

        Raises:
            ProtocolViolation: a descriptor outside of what the frontend offered.
            ShmserveError: client memory that cannot be used.
        """
        inputs: Inputs = {}
        for tensor in message.inputs:
            if isinstance(tensor.at, Descriptor):
                view = frontend.segments.view(tensor.at)
                inputs[tensor.name] = Input(tensor, view, self._model, self._devices)
            else:
                inputs[tensor.name] = self._from_region(tensor, tensor.at)
        return inputs

    def _from_region(self, tensor: WireTensor, at: RegionRef) -> AnyInput:
        kind = DATATYPES[tensor.datatype]
        region = self._regions.use(at.region)
        if isinstance(region, CudaRegion):
            return self._from_device(tensor, at, region)
        copied = 0
        try:
            view = region.read(at) if region.copy else region.view(at).toreadonly()
        except Shrunk as ex:
            self._regions.shrunk(ex)
            raise
        if region.copy:
            copied = at.nbytes
        elif not kind.itemsize or (region.region.offset + at.offset) % kind.numpy.alignment:
            # What is parsed must not change meanwhile; what is not aligned is not for everyone.
            view = memoryview(bytes(view))
            copied = at.nbytes
        if not kind.itemsize:
            bytes_codec.check(view, element_count(tensor.shape), tensor.name, self._model)
        found = Input(tensor, view, self._model, self._devices, slot=False)
        found.copied = copied
        return found

    def _from_device(self, tensor: WireTensor, at: RegionRef, region: CudaRegion) -> AnyInput:
        if DATATYPES[tensor.datatype].itemsize:
            return CudaInput(tensor, region, self._model, self._devices)
        view = region.to_host(at)  # what is parsed is parsed there
        bytes_codec.check(view, element_count(tensor.shape), tensor.name, self._model)
        found = Input(tensor, view, self._model, self._devices, slot=False)
        found.moved = at.nbytes
        return found

    def places(self, message: Execute) -> dict[str, Place | CudaPlace]:
        """Where the client wants outputs.

        Raises:
            ShmserveError: client memory that cannot be used.
        """
        return {place.name: self._place(place) for place in message.places}

    def _place(self, place: OutputPlace) -> Place | CudaPlace:
        region = self._regions.use(place.at.region)
        if isinstance(region, CudaRegion):
            return CudaPlace(place.name, place.at, region)
        return Place(place.name, place.at, region, self._devices)
