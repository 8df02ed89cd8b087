"""Request runner: runs one request at a time, from message to answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from msgspec import Struct

from shmserve.errors import DeviceMemoryExhausted, Internal, ShmserveError
from shmserve.executor.backend import Backend
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.loop.runner import IsCancelled, Key, Requested, RunOutcome, as_error
from shmserve.executor.peers.frontend_connections import FrontendConnection, FrontendProcess
from shmserve.executor.tensors.request import ExecutorRequest, Outputs
from shmserve.executor.tensors.workspace import Inputs, Workspace
from shmserve.protocol.control.data_messages import Answer, Copied, Execute, Parameter, Timing
from shmserve.shm.client_region import Shrunk

log = logging.getLogger(__name__)


class _Result(Struct, frozen=True):
    """Result of a backend call. Errors are kept as code and text, because a traceback keeps
    views."""

    inferred_ns: int
    parameters: dict[str, Parameter] = {}
    error_code: str = ""
    error: str = ""


class RequestRunner:
    """Implements `Runner`: one request after the other.

    `peek`: returns the next request if it is waiting already, else None.

    `ahead`: message and inputs of the next request, if the inputs are on the GPU already.
    """

    def __init__(
        self,
        backend: Backend,
        workspace: Workspace,
        statistics: RunStatistics,
        is_cancelled: IsCancelled,
        peek: Callable[[], Requested | None],
    ) -> None:
        self._backend = backend
        self._reads_on_device = backend.reads_on_device
        self._workspace = workspace
        self._devices = workspace.devices
        self._statistics = statistics
        self._is_cancelled = is_cancelled
        self._peek = peek
        self._running: Key
        self.ahead: tuple[Execute, Inputs] | None = None
        self._room_for_next = True  # in GPU memory, for the next inputs

    def run(self, batch: Sequence[Requested], now_ns: int) -> Sequence[RunOutcome]:
        """Run the one request of a batch."""
        ((connection, message),) = batch
        self._running = connection, message.request
        inline_bytes = connection.frontend.inline_bytes
        try:
            if self._reads_on_device:
                inputs = self._inputs_on_device(connection.frontend, message)
            else:
                inputs = self._workspace.read(connection.frontend, message)
            request = ExecutorRequest(
                self._workspace, message, inputs, self._is_unwanted, None, inline_bytes
            )
        except Exception as ex:  # also OSError, when client memory is opened
            self._devices.settle()  # copies to the GPU may be under way
            outcome = RunOutcome(connection, message)
            outcome.fail(as_error(ex))
            return (outcome,)
        outputs = Outputs(request)
        infer_ns = time.monotonic_ns()
        result = self._infer(request, outputs)
        if request.offers:
            request.drop_offers()
        # the bytes of a lane's small inputs live as long as their arrays
        retained = () if inline_bytes else request.retained(connection.frontend)
        if result.error_code:
            outputs.undo()
        elif outputs.slots:
            held = connection.frontend.held
            for lease in outputs.lease():  # `hold`, inlined: there is mostly one lease
                held[lease] = held.get(lease, 0) + 1
        timing = Timing(
            max(0, now_ns - message.sent_ns),
            infer_ns - now_ns,
            result.inferred_ns - infer_ns,
            time.monotonic_ns() - result.inferred_ns,
        )
        copied_in, moved_in = request.take_counts()
        answer = Answer(
            message.request,
            tuple(outputs.tensors),
            result.error_code,
            result.error,
            result.parameters,
            timing,
            Copied(out=outputs.copied, device=moved_in + outputs.moved, inputs=copied_in),
            retained=retained,
        )
        segments = [slot.segment for slot in outputs.slots] if outputs.slots else ()
        outcome = RunOutcome(connection, message, answer, segments)
        if not result.error_code:
            if inline_bytes:
                self._statistics.postpone(infer_ns)
                outcome.uncounted = True
            else:
                self._statistics.ran(message, timing)
        return (outcome,)

    def withdraw(self, connection: FrontendConnection, answer: Answer) -> Answer | None:
        """Return the answer unchanged: a waiting request has not run."""
        return answer

    def rest(self) -> None:
        """Release inputs on the GPU, because their request does not run next."""
        if self.ahead is not None:
            self._devices.settle()
            self.ahead = None

    def _is_unwanted(self) -> bool:
        return self._is_cancelled(*self._running)

    def _infer(self, request: ExecutorRequest, outputs: Outputs) -> _Result:
        """Have the model run, and place the outputs."""
        try:
            responses = self._backend.execute([request])
            inferred_ns = time.monotonic_ns()
            if len(responses) != 1:
                raise Internal(f"the model gave {len(responses)} responses to 1 request")
            error = responses[0].error
            if error is None:
                outputs.place(responses[0])
                result = _Result(inferred_ns, responses[0].parameters)
            else:  # not raised: the traceback would keep this frame, and so the inputs
                result = self._failed(error)
        except Shrunk as ex:
            self._workspace.regions.shrunk(ex)
            result = self._failed(ex)
        except BaseException as ex:  # also an array that cannot be handled
            result = self._failed(as_error(ex))
        if self._devices.opened is not None:
            # An answer may leave only when the GPU has written outputs and read inputs.
            failed = self._devices.settle()
            if failed is not None and not result.error_code:
                result = self._failed(failed)
        return result

    def _failed(self, error: ShmserveError) -> _Result:
        if isinstance(error, DeviceMemoryExhausted):
            self._without_next()
            self._devices.free_unused()  # CuPy's pool keeps memory that the model may need
        return _Result(time.monotonic_ns(), {}, error.code, error.message)

    # ------------------------------------------------------------- models on a GPU

    def _inputs_on_device(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        """Return the inputs of a request, on their way to the GPU. Also bring the inputs of the
        next request, to arrive while the first request computes."""
        if self.ahead is not None and self.ahead[0] is not message:
            self.rest()
        ahead, self.ahead = self.ahead, None
        inputs = self._brought(frontend, message) if ahead is None else ahead[1]
        following = self._peek()
        if following is not None and self._room_for_next:
            self._bring_next(following[0].frontend, following[1])
        return inputs

    def _bring_next(self, frontend: FrontendProcess, message: Execute) -> None:
        lacking = False
        try:
            self.ahead = message, self._brought(frontend, message)
        except ShmserveError as ex:  # reported when the request runs
            self._devices.settle()
            lacking = isinstance(ex, DeviceMemoryExhausted)
        if lacking:  # outside of `except`, as the exception keeps the inputs that were brought
            self._devices.free_unused()

    def _without_next(self) -> None:
        """Stop bringing inputs ahead: they may have taken memory needed by the model."""
        if self.ahead is not None:
            log.warning(
                "the GPU ran out of memory while the inputs of the next request were on it"
                " already; from now on they wait for their turn"
            )
            self._room_for_next = False
            self.rest()

    def _brought(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        inputs = self._workspace.read(frontend, message)
        for tensor in inputs.values():
            tensor.bring()
        return inputs
