"""Running one request: from its message to the answer, whatever the model does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from msgspec import Struct

from shmserve.errors import Code, DeviceMemoryExhausted, Internal, ProtocolViolation, ShmserveError
from shmserve.executor.backend import Backend
from shmserve.executor.loop.connections import FrontendProcess
from shmserve.executor.tensors.request import ExecutorRequest, Outputs, Watch
from shmserve.executor.tensors.workspace import Inputs, Workspace
from shmserve.protocol.control.data_messages import Answer, Copied, Execute, Parameter, Timing
from shmserve.shm.client_region import Shrunk

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

    Attributes:
        ahead: inputs of the next request that are on the GPU already.
    """

    def __init__(
        self,
        backend: Backend,
        workspace: Workspace,
        watch: Watch,
        following: Callable[[], tuple[FrontendProcess, Execute] | None],
    ) -> None:
        self._backend = backend
        self._reads_on_device = backend.reads_on_device
        self._workspace = workspace
        self._devices = workspace.devices
        self._watch = watch
        self._following = following
        self.ahead: tuple[Execute, Inputs] | None = None
        self._room_for_next = True  # on the device

    def run(
        self, frontend: FrontendProcess, message: Execute, started_ns: int
    ) -> tuple[Answer, list[int]]:
        """The answer, and the segments of ours that it names.

        Raises:
            ProtocolViolation: a descriptor outside of what the frontend offered.
        """
        workspace = self._workspace
        try:
            if self._reads_on_device:
                inputs = self._inputs_on_device(frontend, message)
            else:
                inputs = workspace.read(frontend, message)
            request = ExecutorRequest(workspace, message, inputs, self._watch)
        except ShmserveError as ex:
            self._devices.settle()  # what has been brought so far may be on its way
            if isinstance(ex, ProtocolViolation):
                raise
            return Answer(message.request, error_code=ex.code, error=ex.message), []
        except Exception as ex:  # of the system, where memory of clients is opened
            self._devices.settle()
            error = what_failed(ex)
            return Answer(message.request, error_code=error.code, error=error.message), []
        outputs = Outputs(request)
        infer_ns = time.monotonic_ns()
        result = self._infer(request, outputs)
        if request.offers:
            request.drop_offers()
        retained = request.retained(frontend)
        if result.error_code:
            outputs.undo()
        else:
            held = frontend.held
            for lease in outputs.lease():  # as `hold`, of what is most often one
                held[lease] = held.get(lease, 0) + 1
        timing = Timing(
            max(0, started_ns - message.sent_ns),
            infer_ns - started_ns,
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
        return answer, [slot.segment for slot in outputs.slots]

    def _infer(self, request: ExecutorRequest, outputs: Outputs) -> _Result:
        """Have the model run, and place what it gives."""
        try:
            responses = self._backend.execute([request])
            inferred_ns = time.monotonic_ns()
            if len(responses) != 1:
                raise Internal(f"the model gave {len(responses)} responses to 1 request")
            error = responses[0].error
            if error is None:
                outputs.place(responses[0])
                result = _Result(inferred_ns, responses[0].parameters)
            else:  # not raised: this frame would keep it, it the frame, and that the inputs
                result = self._failed(error)
        except Shrunk as ex:
            self._workspace.regions.shrunk(ex)
            result = self._failed(ex)
        except ShmserveError as ex:
            result = self._failed(ex)
        except (Exception, SystemExit) as ex:  # also an array that cannot be handled
            result = self._failed(what_failed(ex))
        if self._devices.opened is not None:
            # Nothing leaves before the GPU is done with it: outputs are there, inputs were read.
            failed = self._devices.settle()
            if failed is not None and not result.error_code:
                result = self._failed(failed)
        return result

    def _failed(self, error: ShmserveError) -> _Result:
        if isinstance(error, DeviceMemoryExhausted):
            self._without_next()
            self._devices.free_unused()  # CuPy keeps it for itself, the model may need it elsewhere
        return _Result(time.monotonic_ns(), {}, error.code, error.message)

    # ------------------------------------------------------------- models on a GPU

    def _inputs_on_device(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        """Its inputs, on their way to the GPU; and so are those of the request that comes next,
        which arrive while this one computes."""
        if self.ahead is not None and self.ahead[0] is not message:
            self.let_go()
        ahead, self.ahead = self.ahead, None
        inputs = self._brought(frontend, message) if ahead is None else ahead[1]
        following = self._following()
        if following is not None and self._room_for_next:
            self._bring_next(*following)
        return inputs

    def _bring_next(self, frontend: FrontendProcess, message: Execute) -> None:
        lacking = False
        try:
            self.ahead = message, self._brought(frontend, message)
        except ShmserveError as ex:  # it is told when its turn has come
            self._devices.settle()
            lacking = isinstance(ex, DeviceMemoryExhausted)
        if lacking:  # only now are those inputs gone that there was room for
            self._devices.free_unused()

    def _without_next(self) -> None:
        """The model lacked memory: what was brought in ahead may have been what it lacked."""
        if self.ahead is not None:
            log.warning(
                "the GPU ran out of memory while the inputs of the next request were on it"
                " already; from now on they wait for their turn"
            )
            self._room_for_next = False
            self.let_go()

    def let_go(self) -> None:
        """The request that was to come next does not: give back what was brought for it."""
        if self.ahead is not None:
            self._devices.settle()
            self.ahead = None

    def _brought(self, frontend: FrontendProcess, message: Execute) -> Inputs:
        inputs = self._workspace.read(frontend, message)
        for tensor in inputs.values():
            tensor.bring()
        return inputs


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


def cancelled(request: int) -> Answer:
    """The answer to a request that was cancelled in the queue."""
    return Answer(request, error_code=Code.CANCELLED, error="cancelled")
