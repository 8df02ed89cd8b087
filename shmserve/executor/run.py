"""Running one request: from its message to the answer, whatever the model does."""

from __future__ import annotations

import logging
import time
import weakref

from msgspec import Struct

from shmserve.core.slots import SlotState
from shmserve.errors import Code, Internal, ProtocolViolation, ShmserveError, StaleDescriptor
from shmserve.executor.backend import Backend, Response
from shmserve.executor.connections import FrontendProcess
from shmserve.executor.outputs import Placement
from shmserve.executor.places import Place
from shmserve.executor.regions import ClientRegions
from shmserve.executor.request import ExecutorRequest, Input, Offer
from shmserve.protocol.data_messages import (
    Answer,
    Copied,
    Descriptor,
    Execute,
    Parameter,
    RegionRef,
    Timing,
    WireTensor,
)
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.client_region import Shrunk
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES, element_count
from shmserve.tensor.spec import ModelSpec

log = logging.getLogger(__name__)


class _Result(Struct, frozen=True):
    """What came of a request; an error as code and text, so that no traceback keeps views."""

    inferred_ns: int
    parameters: dict[str, Parameter] = {}
    error_code: str = ""
    error: str = ""


class Runner:
    """Runs requests on the backend; every error becomes an answer."""

    def __init__(
        self, backend: Backend, spec: ModelSpec, memory: ArenaMemory, regions: ClientRegions
    ) -> None:
        self._backend = backend
        self._regions = regions
        self._memory = memory
        self._model = spec.name
        self._all_outputs = tuple(output.name for output in spec.outputs)
        self._let_go: list[tuple[int, int]] = []  # appended to by finalizers

    def run(
        self, frontend: FrontendProcess, message: Execute, started_ns: int
    ) -> tuple[Answer, list[int]]:
        """The answer, and the segments of ours that it names.

        Raises:
            ProtocolViolation: a descriptor outside of what the frontend offered.
        """
        self._settle()
        self._copied_in = 0
        try:
            inputs = {tensor.name: self._input(frontend, tensor) for tensor in message.inputs}
            places = self._places(message) if message.places else None
        except ShmserveError as ex:
            if isinstance(ex, ProtocolViolation):
                raise
            return Answer(message.request, error_code=ex.code, error=ex.message), []
        requested = message.outputs or self._all_outputs
        request = ExecutorRequest(message, inputs, requested, self._memory, places)
        placement = Placement(request, self._memory)
        infer_ns = time.monotonic_ns()
        result = self._infer(request, placement)
        for offer in request.offers.values():  # asked for and not used
            self._give_up(offer)
        retained = self._retained(request, frontend, message)
        segments: list[int] = []
        if result.error_code:
            self._undo(placement)
        else:
            segments = self._lease(placement, frontend)
        timing = Timing(
            max(0, started_ns - message.sent_ns),
            infer_ns - started_ns,
            result.inferred_ns - infer_ns,
            time.monotonic_ns() - result.inferred_ns,
        )
        answer = Answer(
            message.request,
            tuple(placement.tensors),
            result.error_code,
            result.error,
            result.parameters,
            timing,
            Copied(
                out=placement.copied_out,
                inputs=self._copied_in + sum(tensor.copied for tensor in inputs.values()),
            ),
            retained=retained,
        )
        return answer, segments

    # ------------------------------------------------------- client memory

    def _input(self, frontend: FrontendProcess, tensor: WireTensor) -> Input:
        at = tensor.at
        if isinstance(at, Descriptor):
            return Input(tensor, frontend.segments.view(at), self._model)
        kind = DATATYPES[tensor.datatype]
        region = self._regions.use(at.region)
        try:
            view = region.read(at) if region.copy else region.view(at).toreadonly()
        except Shrunk as ex:
            self._regions.shrunk(ex)
            raise
        if region.copy:
            self._copied_in += at.nbytes
        elif not kind.itemsize or (region.region.offset + at.offset) % kind.numpy.alignment:
            # What is parsed must not change meanwhile; what is not aligned is not for everyone.
            view = memoryview(bytes(view))
            self._copied_in += at.nbytes
        if not kind.itemsize:
            bytes_codec.check(view, element_count(tensor.shape), tensor.name, self._model)
        return Input(tensor, view, self._model, slot=False)

    def _places(self, message: Execute) -> dict[str, Place]:
        return {
            place.name: Place(place.name, place.at, self._regions.use(place.at.region))
            for place in message.places
        }

    def _infer(self, request: ExecutorRequest, placement: Placement) -> _Result:
        try:
            response = self._execute(request)
            inferred_ns = time.monotonic_ns()
            if response.error is not None:
                raise response.error
            placement.place(response)
            return _Result(inferred_ns, response.parameters)
        except Shrunk as ex:
            self._regions.shrunk(ex)
            return _Result(time.monotonic_ns(), {}, ex.code, ex.message)
        except ShmserveError as ex:
            return _Result(time.monotonic_ns(), {}, ex.code, ex.message)

    def _execute(self, request: ExecutorRequest) -> Response:
        try:
            responses = self._backend.execute([request])
        except ShmserveError:
            raise
        except MemoryError as ex:
            raise Internal("the model ran out of memory") from ex
        except SystemExit as ex:  # sys.exit in a model is no reason to lose the executor
            raise Internal("the model tried to exit") from ex
        except Exception as ex:
            log.exception("the backend failed")
            raise Internal("the model failed; the server's log tells why") from ex
        if len(responses) != 1:
            raise Internal(f"the model gave {len(responses)} responses to 1 request")
        return responses[0]

    # ------------------------------------------------- slots and kept views

    def _lease(self, placement: Placement, frontend: FrontendProcess) -> list[int]:
        for slot in placement.slots:
            self._memory.lease(slot)
            frontend.held.add((slot.number, slot.generation))
        for offer in placement.offers:
            if offer.still_held():
                self._hold(offer)
        return [slot.segment for slot in placement.slots]

    def _undo(self, placement: Placement) -> None:
        offered = {offer.slot.number for offer in placement.offers}
        for slot in placement.slots:
            if slot.number not in offered:
                self._memory.reclaim(slot)
        for offer in placement.offers:
            self._give_up(offer)
        placement.tensors.clear()

    def _give_up(self, offer: Offer) -> None:
        if offer.still_held():
            self._hold(offer)
        else:
            self._memory.reclaim(offer.slot)

    def _hold(self, offer: Offer) -> None:
        """The model kept the array of its output: it could write there, so a lease of our
        own keeps the slot from being used again until the array is gone."""
        slot = offer.slot
        if slot.state is SlotState.RESERVED:
            self._memory.seal(slot)
        self._memory.lease(slot)
        weakref.finalize(offer.base, self._let_go.append, (slot.number, slot.generation))

    def _retained(
        self, request: ExecutorRequest, frontend: FrontendProcess, message: Execute
    ) -> tuple[int, ...]:
        """Indices of inputs that the model kept views of; `freed` tells when they are gone."""
        kept: list[int] = []
        index = -1  # among those in slots
        for tensor, wire in zip(request.inputs.values(), message.inputs, strict=True):
            at = wire.at
            if isinstance(at, RegionRef):
                continue  # a view keeps the mapping, and that is all there is to keep
            index += 1
            if tensor.still_held():
                kept.append(index)
                lease = (at.slot, at.generation)
                tensor.when_let_go(frontend.freed.append, lease)
        return tuple(kept)

    def _settle(self) -> None:
        while self._let_go:
            try:
                self._memory.release(*self._let_go.pop())
            except StaleDescriptor as ex:
                log.error("a held slot was released twice: %s", ex)


def late(request: int) -> Answer:
    """The answer to a request whose deadline passed in the queue."""
    return Answer(
        request,
        error_code=Code.DEADLINE_EXCEEDED,
        error="the request's deadline passed before it could run",
    )
