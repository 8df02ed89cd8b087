"""Running one request: from its message to the answer, whatever the model does."""

from __future__ import annotations

import logging
import time
import weakref

from msgspec import Struct

from shmserve.core.slots import SlotState
from shmserve.errors import Code, Internal, ShmserveError, StaleDescriptor
from shmserve.executor.backend import Backend, Response
from shmserve.executor.connections import FrontendProcess
from shmserve.executor.outputs import Placement
from shmserve.executor.request import ExecutorRequest, Input, Offer
from shmserve.protocol.messages import Answer, Execute, Parameter, Timing
from shmserve.shm.arena import ArenaMemory
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

    def __init__(self, backend: Backend, spec: ModelSpec, memory: ArenaMemory) -> None:
        self._backend = backend
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
        inputs = {
            tensor.name: Input(tensor, frontend.segments.view(tensor.at), self._model)
            for tensor in message.inputs
        }
        requested = message.outputs or self._all_outputs
        request = ExecutorRequest(message, inputs, requested, self._memory)
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
            placement.copied,
            retained=retained,
        )
        return answer, segments

    def _infer(self, request: ExecutorRequest, placement: Placement) -> _Result:
        try:
            response = self._execute(request)
            inferred_ns = time.monotonic_ns()
            if response.error is not None:
                raise response.error
            placement.place(response)
            return _Result(inferred_ns, response.parameters)
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
        for index, tensor in enumerate(request.inputs.values()):
            if tensor.still_held():
                kept.append(index)
                at = message.inputs[index].at
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
