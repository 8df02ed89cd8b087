"""Batch runner: runs several requests at once, from their messages to their answers.

A request fails alone if the cause is known to be that request: unreadable client memory, an error
response for this request, an output too large for its window. An exception from the backend fails
the whole batch. If the requests of a failed batch share a tensor, a single request may be the
cause: an output that only this request wants, or values that the model refuses with
InvalidArgument. Each request then runs again, alone.

Triton's dialect gets the requests unchanged. Backends that want one tensor get one request with
inputs gathered by `executor.tensors.batch`. Gathering costs one copy, counted as `batch` in each
receipt, and no copy on a GPU. With `batch_input` or `batch_output`, `executor.wrappers.ragged`
stands between.

A model may reschedule a request of an iterative sequence (`Request.reschedule`). The request then
goes back to the head of its sequence, keeps its slot, and keeps its inputs open. Only the last
answer names the inputs of which the model keeps views. A rescheduled request ends when the model
no longer reschedules it, when it fails, when its frontend cancels it or disconnects, or, if it has
one answer, at its deadline. New requests may join the next batch of a rescheduled request. The
status page does not list iterative sequences, because no later request has to find them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import Code, DeviceMemoryExhausted, Internal, ShmserveError
from shmserve.executor.backend import Backend, BatchForm, Response
from shmserve.executor.loop import runner
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.executor.tensors.batch import BatchedOutputs, GatheredBatch
from shmserve.executor.tensors.request import ExecutorRequest, Outputs
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Copied, Timing


class BatchMember(runner.RunOutcome, eq=False):
    """Request as a member of a batch.

    Attributes:
        answer: message for the frontend; the timing covers all runs of the request.
        run: duration of the last run alone.
        request: request as the backend sees it; None until the inputs are there.
        outputs: outputs as placed for the answer; None before the model has answered.
        gathered: bytes that were copied into the batch.
        is_unreadable: True if the inputs could not be read, so the request was not in the batch.
    """

    answer: Answer = Answer(0)
    run: Timing = Timing()
    request: ExecutorRequest | None = None
    outputs: Outputs | None = None
    gathered: int = 0
    is_unreadable: bool = False

    def begin(self, request: ExecutorRequest, batch: GatheredBatch | None) -> None:
        """Add the request to the run, and copy the inputs into a gathered batch."""
        self.request = request
        if batch is not None:
            self.gathered = batch.add(self.connection.frontend, self.message)

    def fail_with_all(self, error: ShmserveError) -> None:
        """End the request with the error of the batch, unless it has failed already."""
        self.rescheduled = False
        if not self.has_failed:
            self.fail(error)

    def respond(
        self, request: ExecutorRequest, response: Response, gathered: GatheredBatch | None
    ) -> None:
        """Place the model's response, unless the model has rescheduled the request."""
        self.rescheduled = request.rescheduled and response.error is None
        if self.rescheduled:
            return
        offers = None if gathered is None else gathered.offers
        outputs: Outputs = (
            Outputs(request) if offers is None else BatchedOutputs(request, offers=offers)
        )
        self.outputs = outputs
        error = runner.error_of_placing(request, outputs, response)
        if error is not None:
            self.fail(error)
        else:
            number, tensors = self.message.request, tuple(outputs.tensors)
            self.answer = Answer(number, tensors, parameters=response.parameters)

    def finish(self) -> None:
        """Withdraw unused offers. Lease the outputs, or undo them if the request has failed."""
        request, outputs = self.request, self.outputs
        if request is None:
            return
        if request.offers:
            request.drop_offers()
        if outputs is not None and self.has_failed:
            outputs.undo()
        elif outputs is not None:
            self.leases = outputs.lease()
            self.segments = [slot.segment for slot in outputs.slots]

    def count(self, run: Timing, share: tuple[int, int] | None) -> None:
        """Complete the answer: duration, copied bytes, and inputs of which the model keeps views.
        `run`: duration of the run. `share`: bytes copied and moved for the request's rows of a
        gathered batch."""
        request, outputs = self.request, self.outputs
        if request is None:
            return
        self.run = run
        copied, moved = (0, 0) if self.rescheduled else request.take_counts()
        written, moved_out = (outputs.copied, outputs.moved) if outputs else (0, 0)
        if share is not None:
            copied, moved = share
        self.answer = replace(
            self.answer,
            timing=run,
            copied=Copied(self.gathered, written, moved + moved_out, copied),
            retained=() if self.rescheduled else request.retained(self.connection.frontend),
        )

    def add_earlier(self, spent: Timing) -> None:
        """Add the duration of earlier runs to the duration of the last run."""
        before, last = spent, self.run
        runs = before.input + before.infer + before.output
        timing = Timing(
            max(0, last.queue - runs),  # `last.queue` begins when the request was sent
            before.input + last.input,
            before.infer + last.infer,
            before.output + last.output,
        )
        self.answer = replace(self.answer, timing=timing)


class BatchRunner(Struct, eq=False):
    """Implements `Runner`. A rescheduled request stays open here until the next run or a
    withdrawal. `model_runs`: surrounds each run, during which another thread may look after the
    channels."""

    _backend: Backend
    _workspace: Workspace
    _statistics: RunStatistics
    _is_cancelled: runner.IsCancelled
    _model_runs: AbstractContextManager[None]
    _open: dict[runner.Key, BatchMember] = {}  # rescheduled requests
    _iterative: bool = False

    def __post_init__(self) -> None:
        self._iterative = self._workspace.spec.config.is_iterative

    def run(self, batch: Sequence[runner.Requested], now_ns: int) -> Sequence[BatchMember]:
        """Run requests together."""
        with self._model_runs:
            members = self._run(batch, now_ns)
            runs = [members]
            if self._should_part([m for m in members if not m.is_unreadable]):
                runs = [
                    [member if member.is_unreadable else self._run_alone(member)]
                    for member in members
                ]
        for run in runs:
            self._count_run(run)
        return [member for run in runs for member in run]

    def _count_run(self, members: list[BatchMember]) -> None:
        ran = [member for member in members if not member.has_failed]
        if not ran:
            return
        if not self._iterative:
            self._statistics.ran_batch([(m.message, m.answer.timing) for m in ran])
            return
        self._statistics.iterated(len(ran), ran[0].run)
        for member in ran:
            if not member.rescheduled:
                self._statistics.finished(member.answer.timing)

    def _should_part(self, members: list[BatchMember]) -> bool:
        """Return True if a gathered batch of these requests has failed, and the model refuses
        values, or the requests want different outputs."""
        if not all(member.has_failed for member in members):
            return False
        config, outputs = self._workspace.spec.config, self._workspace.outputs
        is_flat = bool(config.batch_input or config.batch_output)
        if self._backend.batching is not BatchForm.STACKED and not is_flat:
            return False
        codes = {member.answer.error_code for member in members}
        if codes == {Code.INVALID_ARGUMENT}:
            return len(members) > 1
        return len({frozenset(member.message.outputs or outputs) for member in members}) > 1

    def _run_alone(self, member: BatchMember) -> BatchMember:
        """Run a request of a failed batch again, unless the request has been cancelled."""
        connection, message = member.connection, member.message
        if self._is_cancelled(connection, message.request):
            return member
        return self._run([(connection, message)], time.monotonic_ns())[0]

    def withdraw(self, connection: FrontendConnection, answer: Answer) -> Answer | None:
        """Return the answer. If the request has run, the answer names the inputs that the model
        keeps."""
        opened = self._open.pop((connection, answer.request), None)
        if opened is None or opened.request is None:
            return answer
        retained = opened.request.retained(connection.frontend)
        return replace(answer, retained=retained)

    def rest(self) -> None:
        """Do nothing: no request is prepared ahead of its run."""

    def _run(self, batch: Sequence[runner.Requested], started_ns: int) -> list[BatchMember]:
        members = [BatchMember(c, message, answer=Answer(message.request)) for c, message in batch]
        gathered: GatheredBatch | None = None
        infer_ns = inferred_ns = started_ns
        try:
            if len(members) > 1 and self._backend.batching is BatchForm.STACKED:
                gathered = GatheredBatch(
                    self._workspace,
                    [member.message for member in members],
                    self._backend.reads_on_device,
                )
            for member in members:
                self._begin(member, gathered)
            infer_ns = time.monotonic_ns()
            ready = [member for member in members if not member.has_failed]
            if ready:
                inferred_ns = self._infer(ready, gathered)
        except BaseException as ex:
            inferred_ns = time.monotonic_ns()
            self._fail_all(members, ex)
        if self._workspace.devices.opened is not None:
            # An answer may leave only when the GPU has written outputs and read inputs.
            self._fail_all(members, self._workspace.devices.settle())
        for member in members:
            member.finish()
        self._count(members, gathered, (started_ns, infer_ns, inferred_ns))
        for member in members:
            self._keep_open(member)
        if gathered is not None:
            gathered.close()
        return members

    def _keep_open(self, member: BatchMember) -> None:
        """Keep a rescheduled request open. Add the time of earlier runs to the answer."""
        key = (member.connection, member.message.request)
        before = self._open.pop(key, None)
        if before is not None:
            member.add_earlier(before.answer.timing)
        if member.rescheduled:
            self._open[key] = member

    def _fail_all(self, members: list[BatchMember], ex: BaseException | None) -> None:
        if ex is None:
            return
        error = runner.as_error(ex)
        for member in members:
            member.fail_with_all(error)
        if isinstance(error, DeviceMemoryExhausted):
            self._workspace.devices.free_unused()

    def _begin(self, member: BatchMember, gathered: GatheredBatch | None) -> None:
        """Read the inputs of a request, or reopen a rescheduled request."""
        frontend, message = member.connection.frontend, member.message

        def watch() -> bool:
            return self._is_cancelled(member.connection, message.request)

        opened = self._open.get((member.connection, message.request))
        if opened is not None and opened.request is not None:
            opened.request.run_again(message.parameters)
            member.request = opened.request
            return
        try:
            alone = gathered is None
            inputs = self._workspace.read(frontend, message) if alone else {}
            # outputs of a gathered batch lie in slots already
            inline_bytes = frontend.inline_bytes if alone else 0
            request = ExecutorRequest(self._workspace, message, inputs, watch, None, inline_bytes)
            member.begin(request, gathered)
        except ShmserveError as ex:
            self._workspace.devices.settle()  # copies to the GPU may be under way
            member.fail(ex)
            member.is_unreadable = True

    def _infer(self, members: list[BatchMember], gathered: GatheredBatch | None) -> int:
        """Have the model run, and place the responses. Return when the model was done, in ns."""
        requests = [member.request for member in members if member.request is not None]
        if gathered is None:
            responses = self._backend.execute(requests)
        else:
            responses = self._backend.execute(
                [gathered.request(lambda: all(request.cancelled for request in requests))]
            )
        inferred_ns = time.monotonic_ns()
        if gathered is not None:
            responses = gathered.taken_apart(responses)
        if len(responses) != len(requests):
            raise Internal(f"the model gave {len(responses)} responses to {len(requests)} requests")
        for member, request, response in zip(members, requests, responses, strict=True):
            member.respond(request, response, gathered)
        return inferred_ns

    def _count(
        self,
        members: list[BatchMember],
        gathered: GatheredBatch | None,
        times_ns: tuple[int, int, int],
    ) -> None:
        """Complete the answers. Each request counts the full duration of the batch. Copies of a
        gathered batch are divided among requests by rows."""
        started_ns, infer_ns, inferred_ns = times_ns
        output_ns = max(0, time.monotonic_ns() - inferred_ns)
        total = sum(gathered.rows) if gathered is not None else 0
        copied, moved = gathered.take_counts() if gathered is not None else (0, 0)
        for member in members:
            queue_ns = max(0, started_ns - member.message.sent_ns)
            run = Timing(queue_ns, infer_ns - started_ns, inferred_ns - infer_ns, output_ns)
            rows = member.message.inputs[0].shape[0] if total else 0
            share = (copied * rows // total, moved * rows // total) if total else None
            member.count(run, share)
