"""From descriptors to inputs: slots of frontends and windows of client memory."""

from __future__ import annotations

from shmserve.executor.connections import FrontendProcess
from shmserve.executor.places import Place
from shmserve.executor.regions import ClientRegions
from shmserve.executor.request import Input
from shmserve.protocol.data_messages import Descriptor, Execute, WireTensor
from shmserve.shm.client_region import Shrunk
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES, element_count


class InputReader:
    """Opens what requests of one model name."""

    def __init__(self, model: str, regions: ClientRegions) -> None:
        self._model = model
        self._regions = regions

    def read(self, frontend: FrontendProcess, message: Execute) -> tuple[dict[str, Input], int]:
        """The inputs by name, and how many bytes were copied for them.

        Raises:
            ProtocolViolation: a descriptor outside of what the frontend offered.
            ShmserveError: client memory that cannot be used.
        """
        inputs: dict[str, Input] = {}
        copied = 0
        for tensor in message.inputs:
            if isinstance(tensor.at, Descriptor):
                view = frontend.segments.view(tensor.at)
                inputs[tensor.name] = Input(tensor, view, self._model)
            else:
                inputs[tensor.name], nbytes = self._from_region(tensor)
                copied += nbytes
        return inputs, copied

    def _from_region(self, tensor: WireTensor) -> tuple[Input, int]:
        at = tensor.at
        assert not isinstance(at, Descriptor)
        kind = DATATYPES[tensor.datatype]
        region = self._regions.use(at.region)
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
        return Input(tensor, view, self._model, slot=False), copied

    def places(self, message: Execute) -> dict[str, Place]:
        """Where the client wants outputs.

        Raises:
            ShmserveError: client memory that cannot be used.
        """
        return {
            place.name: Place(place.name, place.at, self._regions.use(place.at.region))
            for place in message.places
        }
