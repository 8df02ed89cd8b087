"""Response stream: answers of a decoupled model to one request, on their way to the loop.

Any thread of the model may send: it places the answer and hands the answer to the loop's thread.
Only the loop's thread talks to frontends. A model that is ahead of its reader waits for credit, so
the memory of a stream is bounded by its credit times the size of an answer.

The protocol of credit:

- `Execute.credit` is the limit of unacknowledged answers (`stream_credit`). The connection stays
  taken until the final answer.
- Without credit a send waits, so a stream holds at most `stream_credit` answers in memory. A
  reader that takes nothing for `request_timeout_s` loses its stream.
- The frontend sends `Credit`, with the consumed slots, after half of the credit or 64 KiB of
  outputs.
- On `Cancel` or EOF `cancelled` becomes true at once, waiting sends are released, and later
  answers are dropped. Later answers are not refused, because models that never look at
  `is_cancelled()` must reach their own clean-up. Only sending after the final flag is an error.
  Connection and inputs wait with the orphaned requests for the final answer.
- If a model raises, or drops a stream without ending it, the stream ends with an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from msgspec import Struct

from shmserve.core.scheduling.stream_flow import Flow, Gate, StreamEvent, StreamState
from shmserve.errors import Code, ProtocolViolation, ShmserveError
from shmserve.executor.backend import Response
from shmserve.executor.loop.run_statistics import Spent
from shmserve.executor.loop.runner import error_of_placing
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.executor.tensors.request import ExecutorRequest, Outputs
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Copied, Execute, Parameter, Timing

log = logging.getLogger(__name__)

MAX_CREDIT = 1024
_CANCELLED = (Code.CANCELLED, "cancelled")


class Posted(Struct, frozen=True):
    """Message to the loop: an answer to send. `leases`: slots that the answer uses."""

    stream: Stream
    answer: Answer
    segments: list[int]
    leases: list[tuple[int, int]]


class StreamAbandoned(Struct, frozen=True):
    """Message to the loop: the model has dropped the stream without ending it."""

    stream: Stream


class Stream:
    """Open stream of one request; implements `backend.Responses`.

    Attributes:
        moved_ns: time of the last progress by model or frontend (CLOCK_MONOTONIC, in nanoseconds).
        progress_ns: `moved_ns`, less the time that earlier runs have spent since their last
            progress; the duration of the next answer counts from here.
        waiting: True while the model waits for the frontend.
    """

    def __init__(
        self,
        workspace: Workspace,
        post: Callable[[Posted | StreamAbandoned], None],
        connection: FrontendConnection,
        message: Execute,
    ) -> None:
        if not 0 < message.credit <= MAX_CREDIT:
            raise ProtocolViolation(f"a stream with credit for {message.credit} answers")
        self.connection = connection
        self.frontend = connection.frontend
        self.number = message.request
        self.message = message
        self.progress_ns = self.moved_ns = time.monotonic_ns()
        self.waiting = False
        self.spent = Spent()
        self._workspace = workspace
        self._post = post
        self._flow = Flow(message.credit)
        self._changed = threading.Condition()  # guards the flow
        self._turn = threading.Lock()  # held for each answer, which keeps the order
        self._muted: tuple[str, str] | None = None  # error of the final answer: code, text
        self._request: ExecutorRequest | None = None
        self._ran_ns = self._paused_ns = 0
        self._queue_ns = max(0, self.progress_ns - message.sent_ns)

    # ------------------------------------------------- the thread of the model

    def begin(self) -> ExecutorRequest:
        """Open the inputs before the first run. Return the request."""
        if self._request is not None:
            return self._request
        workspace, message = self._workspace, self.message
        inputs = workspace.read(self.frontend, message)
        inline_bytes = self.frontend.inline_bytes
        self._request = ExecutorRequest(
            workspace, message, inputs, self.is_cancelled, self, inline_bytes
        )
        return self._request

    @property
    def rescheduled(self) -> bool:
        """True if the model has rescheduled the request and can still answer."""
        request = self._request
        return request is not None and request.rescheduled and self._flow.live

    @property
    def has_failed(self) -> bool:
        """True once `fail` has ended the stream."""
        return self._flow.state is StreamState.FAILED

    def is_cancelled(self) -> bool:
        """Return True if further answers are unwanted."""
        return self._flow.state in (StreamState.MUTED, StreamState.FAILED)

    def send(self, response: Response | None, final: bool = False) -> None:
        """Send an answer. Without credit, wait until the frontend has consumed earlier answers."""
        with self._turn:
            called_ns = time.monotonic_ns()
            gate = self._pass(response is not None, final)
            if gate is Gate.GO:
                self._answer(response, final, called_ns)
            elif self._request is not None:
                self._request.drop_offers()
            self.progress_ns = self.moved_ns = time.monotonic_ns()

    def _pass(self, full: bool, final: bool) -> Gate:
        """Wait until an answer may be sent, at most for the time limit of the request."""
        limit_ns = self.message.deadline_ns and self.message.deadline_ns - self.message.sent_ns
        until_ns = time.monotonic_ns() + limit_ns
        with self._changed:
            while (gate := self._flow.send(full, final)) is Gate.WAIT:
                self.waiting = True
                left_s = (until_ns - time.monotonic_ns()) / 1e9 if limit_ns else None
                if left_s is not None and left_s <= 0:
                    self._give_up(limit_ns / 1e9)
                else:
                    self._changed.wait(left_s)
            self.waiting = False
        return gate

    def _give_up(self, seconds: float) -> None:
        text = f"the answers of the stream were not taken for {seconds:g} s"
        log.warning("request %d of %s: %s", self.number, self.frontend.name, text)
        if self._flow.apply(StreamEvent.MUTE):
            self._muted = (Code.DEADLINE_EXCEEDED, text)

    def _answer(self, response: Response | None, final: bool, called_ns: int) -> None:
        request = self._request
        assert request is not None
        granted_ns = time.monotonic_ns()
        outputs = Outputs(request)
        code, text = self._muted or ("", "")
        if not code and response is not None:
            error = error_of_placing(request, outputs, response)
            if error is not None:
                code, text = error.code, error.message
            del error  # a traceback would keep views of inputs
        # No answer may leave, and no slot be freed, before the GPU is done with the memory.
        failed = self._workspace.devices.settle()
        if failed is not None and not code:
            code, text = failed.code, failed.message
        if code:
            outputs.undo()
        parameters: dict[str, Parameter] = {}
        if not code and response is not None:
            parameters = response.parameters
        request.drop_offers()
        leases = outputs.lease()
        retained = self._end(request) if final else ()
        timing = Timing(
            self._queue_ns,
            0,
            max(0, called_ns - self.progress_ns),
            time.monotonic_ns() - granted_ns,
        )
        self._queue_ns = 0
        copied_in, moved_in = request.take_counts()
        copied = Copied(out=outputs.copied, device=moved_in + outputs.moved, inputs=copied_in)
        answer = Answer(
            self.number, tuple(outputs.tensors), code, text, parameters, timing, copied,
            final=final, retained=retained,
        )  # fmt: skip
        self._post(Posted(self, answer, [slot.segment for slot in outputs.slots], leases))

    def _end(self, request: ExecutorRequest) -> tuple[int, ...]:
        retained = request.retained(self.frontend)
        for tensor in request.inputs.values():
            tensor.close()
        return retained

    def fail(self, error: ShmserveError) -> None:
        """End the stream for the model, from any thread. Later answers are dropped."""
        with self._changed:
            if not self._flow.apply(StreamEvent.FAIL):
                return
            self._changed.notify_all()
        code, text = self._muted or (error.code, error.message)
        self._workspace.devices.settle()  # GPU work may still read inputs or write outputs
        retained: tuple[int, ...] = ()
        request = self._request
        if request is not None:
            if self._turn.acquire(blocking=False):  # else the sender drops the offers
                request.drop_offers()
                self._turn.release()
            retained = self._end(request)
        answer = Answer(self.number, error_code=code, error=text, retained=retained)
        self._post(Posted(self, answer, [], []))

    def abandoned(self) -> None:
        """Tell the loop that no sender is left. Takes no lock, as a finalizer may run at any
        point."""
        if self._flow.live:
            self._post(StreamAbandoned(self))

    # --------------------------------------------------- the thread of the loop

    def pause(self) -> None:
        """Begin the time in the queue after the model has rescheduled the request."""
        now_ns = time.monotonic_ns()
        self._ran_ns, self._paused_ns = now_ns - self.progress_ns, now_ns

    def resume(self, message: Execute) -> None:
        """End the time in the queue, and take the parameters of the next run from a message."""
        assert self._request is not None
        now_ns = time.monotonic_ns()
        self._queue_ns += now_ns - self._paused_ns
        self.progress_ns, self.moved_ns = now_ns - self._ran_ns, now_ns
        self._request.run_again(message.parameters)

    def mute(self) -> None:
        """Tell the model that the frontend has cancelled or gone, and release waiting senders."""
        with self._changed:
            if self._flow.apply(StreamEvent.MUTE):
                self._muted = _CANCELLED
            self._changed.notify_all()

    def grant(self, answers: int) -> None:
        """Give back credit for answers that the frontend has consumed."""
        with self._changed:
            self._flow.grant(answers)
            self.progress_ns = self.moved_ns = time.monotonic_ns()
            self._changed.notify_all()
