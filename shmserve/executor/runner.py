"""Running one request: from its message to the answer, whatever the model does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from shmserve.errors import Code, DeviceMemoryExhausted, Internal, ProtocolViolation, ShmserveError
from shmserve.executor.backend import Backend, Response
from shmserve.executor.holdings import Holdings
from shmserve.executor.inputs import InputReader
from shmserve.executor.loop.connections import FrontendProcess
from shmserve.executor.outputs import Placement
from shmserve.executor.tensors.inputs import ExecutorRequest, Watch
from shmserve.executor.tensors.mapped_regions import ClientRegions
from shmserve.protocol.control.data_messages import Answer, Copied, Execute, Parameter, Timing
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.client_region import Shrunk
from shmserve.tensor.spec import ModelSpec

if TYPE_CHECKING:
    from shmserve.executor.tensors.inputs import Inputs

log = logging.getLogger(__name__)


class _Result(Struct, frozen=True):
    """What came of a request; an error as code and text, so that no traceback keeps views."""

    inferred_ns: int
    parameters: dict[str, Parameter] = {}
    error_code: str = ""
    error: str = ""


class Runner:
    """Runs requests on the backend; every error becomes an answer.

    `watch` tells the model whether the request that runs has been cancelled meanwhile,
    `following` which request comes next.
    """

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        memory: ArenaMemory,
        regions: ClientRegions,
        watch: Watch,
        following: Callable[[], tuple[FrontendProcess, Execute] | None],
    ) -> None:
        self._backend = backend
        self._regions = regions
        self._reads_on_device = backend.reads_on_device
        self._devices = regions.devices
        self._following = following
        self._next: tuple[Execute, Inputs] | None = None  # what was brought in ahead
        self._room_for_next = True  # on the device
        self._memory = memory
        self._watch = watch
        self._reader = InputReader(spec.name, regions)
        self._holdings = Holdings(memory)
        self._all_outputs = tuple(output.name for output in spec.outputs)

    def run(
        self, frontend: FrontendProcess, message: Execute, started_ns: int
    ) -> tuple[Answer, list[int]]:
        """The answer, and the segments of ours that it names.

        Raises:
            ProtocolViolation: a descriptor outside of what the frontend offered.
        """
        holdings = self._holdings
        holdings.settle()
        try:
            inputs = self._inputs(frontend, message)
            places = self._reader.places(message) if message.places else None
        except ShmserveError as ex:
            self._devices.settle()  # what has been brought so far may be on its way
            if isinstance(ex, ProtocolViolation):
                raise
            return Answer(message.request, error_code=ex.code, error=ex.message), []
        requested = message.outputs or self._all_outputs
        request = ExecutorRequest(
            message, inputs, requested, self._memory, places, self._watch, self._devices
        )
        placement = Placement(request, self._memory)
        infer_ns = time.monotonic_ns()
        result = self._infer(request, placement)
        if request.offers:
            holdings.drop_offers(request)
        retained = holdings.retained(request, frontend, message)
        segments: list[int] = []
        if result.error_code:
            holdings.undo(placement)
        else:
            frontend.held.update(holdings.lease(placement))
            segments = [slot.segment for slot in placement.slots]
        timing = Timing(
            max(0, started_ns - message.sent_ns),
            infer_ns - started_ns,
            result.inferred_ns - infer_ns,
            time.monotonic_ns() - result.inferred_ns,
        )
        copied_in, moved_in = request.take_counts()
        answer = Answer(
            message.request,
            tuple(placement.tensors),
            result.error_code,
            result.error,
            result.parameters,
            timing,
            Copied(out=placement.copied_out, device=moved_in + placement.moved, inputs=copied_in),
            retained=retained,
        )
        return answer, segments

    def _inputs(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        """Its inputs; those for a model on a GPU are on their way there, and so are those of
        the request that comes next, which arrive while this one computes."""
        if not self._reads_on_device:
            return self._reader.read(frontend, message)
        if self._next is not None and self._next[0] is not message:
            self.let_go()
        ahead, self._next = self._next, None
        inputs = self._brought(frontend, message) if ahead is None else ahead[1]
        following = self._following()
        if following is not None and self._room_for_next:
            self._bring_next(*following)
        return inputs

    def _bring_next(self, frontend: FrontendProcess, message: Execute) -> None:
        lacking = False
        try:
            self._next = message, self._brought(frontend, message)
        except ShmserveError as ex:  # it is told when its turn has come
            self._devices.settle()
            lacking = isinstance(ex, DeviceMemoryExhausted)
        if lacking:  # only now are those inputs gone that there was room for
            self._devices.free_unused()

    def _failed(self, error: ShmserveError) -> _Result:
        if isinstance(error, DeviceMemoryExhausted):
            self._without_next()
            self._devices.free_unused()  # CuPy keeps it for itself, the model may need it elsewhere
        return _Result(time.monotonic_ns(), {}, error.code, error.message)

    def _without_next(self) -> None:
        """The model lacked memory: what was brought in ahead may have been what it lacked."""
        if self._next is not None:
            log.warning(
                "the GPU ran out of memory while the inputs of the next request were on it"
                " already; from now on they wait for their turn"
            )
            self._room_for_next = False
            self.let_go()

    def let_go(self) -> None:
        """The request that was to come next does not: give back what was brought for it."""
        if self._next is not None:
            self._devices.settle()
            self._next = None

    def _brought(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        inputs = self._reader.read(frontend, message)
        for tensor in inputs.values():
            tensor.bring()
        return inputs

    def _infer(self, request: ExecutorRequest, placement: Placement) -> _Result:
        try:
            response = self._execute(request)
            inferred_ns = time.monotonic_ns()
            if response.error is None:
                placement.place(response)
                result = _Result(inferred_ns, response.parameters)
            else:  # not raised: this frame would keep it, it the frame, and that the inputs
                result = self._failed(response.error)
        except Shrunk as ex:
            self._regions.shrunk(ex)
            result = self._failed(ex)
        except ShmserveError as ex:
            result = self._failed(ex)
        except Exception as ex:  # an array that cannot be handled is its model's mistake
            result = self._failed(what_failed(ex))
        # Nothing leaves before the GPU is done with it: outputs are there, inputs were read.
        failed = self._devices.settle()
        if failed is not None and not result.error_code:
            result = self._failed(failed)
        return result

    def _execute(self, request: ExecutorRequest) -> Response:
        try:
            responses = self._backend.execute([request])
        except ShmserveError:
            raise
        except (Exception, SystemExit) as ex:
            raise what_failed(ex) from ex
        if len(responses) != 1:
            raise Internal(f"the model gave {len(responses)} responses to 1 request")
        return responses[0]


def what_failed(ex: BaseException) -> ShmserveError:
    """What to tell of an exception that a backend let through and that is none of ours."""
    if isinstance(ex, MemoryError):
        return Internal("the model ran out of memory")
    if isinstance(ex, SystemExit):  # sys.exit in a model is no reason to lose the executor
        return Internal("the model tried to exit")
    log.error("the backend failed", exc_info=ex)
    return Internal("the model failed; the server's log tells why")


def late(request: int) -> Answer:
    """The answer to a request whose deadline passed in the queue."""
    return Answer(
        request,
        error_code=Code.DEADLINE_EXCEEDED,
        error="the request's deadline passed before it could run",
    )
