"""Call: one request through the data plane.

A call uses `reserve` and `add_input` for each tensor, then `execute` or `stream` once, and `close`
after the last byte of the answer was sent. `close` gives every slot back on every path. The slots
of an abandoned call go to the orphaned requests, because the executor may still read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator

from shmserve.core.memory.slots import Slot, SlotState
from shmserve.core.registry import ModelEntry
from shmserve.core.scheduling.sequence_names import named_sequence
from shmserve.dispatch.calls.attempt import Attempt, Cancellation
from shmserve.dispatch.calls.data_plane import DataPlane
from shmserve.dispatch.calls.request_counting import Account, CallScope
from shmserve.dispatch.outcome import Outcome, OutputTensor, RunOptions, StreamLimits, error_of
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.dispatch.receipt import Receipt
from shmserve.dispatch.traced_request import BACKEND_OUTPUT
from shmserve.errors import Cancelled, ProtocolViolation, StaleDescriptor
from shmserve.protocol.control.data_messages import (
    Answer,
    Descriptor,
    Execute,
    RegionRef,
    WireTensor,
    leases,
)

_EMPTY = memoryview(b"")
_ACKNOWLEDGE_BYTES = 64 * 1024  # output bytes of a stream after which slots are given back
_NO_ANSWER = Answer(0)
_LEASED = SlotState.LEASED


class Call(CallScope):
    """A request, as a context manager. Not for use by two threads, except `cancel`."""

    __slots__ = (
        "_answer", "_attempt", "_cancellation", "_deadline_ns", "_held", "_held_bytes", "_inputs",
        "_memory", "_options", "_plane", "_pool", "_slots", "_timeout_s", "account", "entry",
        "receipt",
    )  # fmt: skip

    def __init__(
        self, plane: DataPlane, entry: ModelEntry, options: RunOptions, cancellable: bool = False
    ) -> None:
        self.receipt = Receipt()
        self.account = Account(plane.counting, plane.tracer, entry, self.receipt)
        self.entry = entry
        self._plane = plane
        self._memory = plane.memory
        self._options = options
        self._timeout_s = options.timeout_s or plane.settings.request_timeout_s
        self._deadline_ns = time.monotonic_ns() + int(self._timeout_s * 1e9)
        self._slots: list[Slot] = []  # of inputs in slots, in order
        self._inputs: list[WireTensor] = []
        self._answer = _NO_ANSWER  # latest answer
        self._held: list[tuple[int, int]] = []  # output slots
        self._held_bytes = 0
        self._pool: ExecutorPool | None = None  # executor pool that answered
        self._attempt: Attempt | None = None
        self._cancellation = Cancellation() if cancellable else None

    def cancel(self) -> None:
        """Make `execute` or `stream` raise `Cancelled`, as `InferenceCall.cancel`."""
        assert self._cancellation is not None, "the call was not made cancellable"
        self._cancellation.cancel()

    def reserve(self, nbytes: int) -> Slot:
        """Reserve a slot for a tensor in this process's arena. Write the tensor to the slot's
        `view`."""
        slot = self._memory.reserve(nbytes)
        self._slots.append(slot)
        return slot

    def adopt(self, slot: Slot) -> Slot:
        """Take over a slot reserved before the call existed, as if by `reserve`."""
        self._slots.append(slot)
        return slot

    def add_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: Slot | RegionRef
    ) -> None:
        """Add an input: a written slot, which is sealed, or client memory. Inputs keep the order of
        calls."""
        place = at if isinstance(at, RegionRef) else self._memory.seal_and_lease(at)
        self._inputs.append(WireTensor(name, datatype, shape, place))

    def execute(self) -> Outcome:
        """Run the request and wait for the answer.

        Raises:
            ModelFailure: the model's own error.
            Unavailable, QueueFull: no executor could run the request.
            DeadlineExceeded, Cancelled: the request was abandoned.
        """
        try:
            answer = self._begin(0).first()
            self._accept(answer)
            if answer.error_code:
                if not answer.refused:
                    self.account.refused(answer.error_code, answer.error)
                raise error_of(answer)
            outputs = tuple(map(self._output, answer.outputs))
        except BaseException as ex:
            self.account.failed(ex)
            raise
        self.receipt.complete = True  # not by a method, as in `_accept`
        if self.account.trace is not None:
            self.account.trace.add_tensors(BACKEND_OUTPUT, outputs)
        return Outcome(outputs, answer.parameters)

    def stream(self) -> Iterator[Outcome]:
        """Run the request and yield every answer. `InferenceCall.stream` has the contract."""
        answers = self._answers()
        try:
            for answer in answers:
                if answer.refused:
                    self.account.failed(error_of(answer))
                elif answer.final and answer.error_code:
                    self.account.refused(answer.error_code, answer.error)
                elif answer.final:
                    self.receipt.finish()
                    self.account.answered()
                yield self._outcome(answer)
        except GeneratorExit:
            self.account.failed(Cancelled("nobody wants further answers"))
            raise
        except BaseException as ex:
            self.account.failed(ex)
            raise
        finally:
            answers.close()

    def _answers(self) -> Generator[Answer]:
        settings = self._plane.settings
        credit = settings.stream_credit if self.entry.spec.decoupled else 0
        limits = self._options.stream or StreamLimits(self._timeout_s, time.monotonic_ns())
        ends_ns = limits.began_ns + int(settings.stream_timeout_s * 1e9)
        overdue = f"model '{self.entry.spec.name}' gave no answer within {limits.answer_s:g} s"
        attempt = self._begin(credit)
        answer = attempt.first()
        owed = 0  # answers consumed but not acknowledged
        cancellation = self._cancellation
        try:
            while True:
                self._accept(answer)
                yield answer
                if answer.final:
                    return
                owed += 1
                # Without credit, the model of a cancelled call sends no further answers.
                if cancellation is None or not cancellation.requested:
                    # Outputs forwarded to other executors have come back to the pool.
                    back = self._pool.take_releases(_ACKNOWLEDGE_BYTES) if self._pool else []
                    if 2 * owed >= credit or self._held_bytes >= _ACKNOWLEDGE_BYTES or back:
                        attempt.acknowledge(owed, (*self._held, *back))
                        self._held, self._held_bytes, owed = [], 0, 0
                due_ns, late = time.monotonic_ns() + int(limits.answer_s * 1e9), overdue
                if settings.stream_timeout_s and ends_ns < due_ns:
                    due_ns, late = ends_ns, "the stream took longer than stream_timeout_s"
                answer = attempt.next(due_ns, late)
        finally:
            attempt.leave()

    def _begin(self, credit: int) -> Attempt:
        options, plane, account = self._options, self._plane, self.account
        traced = self.entry.trace is not None or options.trace is not None
        account.sent_ns = time.monotonic_ns()  # set directly, to save a method call per request
        if traced:
            account.begin(options, self._inputs_in_slots(), account.sent_ns)
        parameters = options.parameters
        message = Execute(
            plane.next_number(),
            options.request_id,
            tuple(self._inputs),
            options.outputs,
            parameters,
            account.sent_ns,
            self._deadline_ns,
            places=options.places,
            credit=credit,
            callers=options.callers,
            caller_number=options.caller_number,
            traceparent=account.traceparent if traced else "",
            sequence=named_sequence(parameters, options.sequence_owner) if parameters else None,
        )
        self._attempt = Attempt(
            *(plane.executors, self.entry, message, self._timeout_s, options, self._cancellation),
            self._deadline_ns,
        )
        return self._attempt

    def _inputs_in_slots(self) -> Iterator[OutputTensor]:
        views = (slot.view for slot in self._slots)
        for tensor in self._inputs:
            if type(tensor.at) is Descriptor:
                yield OutputTensor(tensor.name, tensor.datatype, tensor.shape, next(views))

    def _accept(self, answer: Answer) -> None:
        """Take in an answer: hold its outputs, and add its costs to the receipt."""
        assert self._attempt is not None
        assert self._attempt.pool is not None
        self._answer = answer
        self._pool = self._attempt.pool
        for tensor in answer.outputs:
            at = tensor.at
            if tensor.alias < 0 and type(at) is Descriptor:
                self._held.append((at.slot, at.generation))
                self._held_bytes += at.nbytes
        # Fields are set directly, to save a method call per request.
        receipt, timing, copied = self.receipt, answer.timing, answer.copied
        receipt.executor, receipt.timing = self._pool.instance.name, timing
        receipt.queue_ns += timing.queue
        receipt.input_ns += timing.input
        receipt.output_ns += timing.output
        receipt.compute_ns += timing.input + timing.infer + timing.output
        receipt.copied_batch += copied.batch
        receipt.copied_out += copied.out
        receipt.copied_device += copied.device
        receipt.copied_in += copied.inputs

    def _outcome(self, answer: Answer) -> Outcome:
        error = error_of(answer) if answer.error_code else None
        outputs = tuple(map(self._output, answer.outputs))
        if self.account.trace is not None:
            self.account.trace.add_tensors(BACKEND_OUTPUT, outputs)
        return Outcome(outputs, answer.parameters, answer.final, error)

    def _output(self, tensor: WireTensor) -> OutputTensor:
        at = tensor.at
        if type(at) is RegionRef:
            return OutputTensor(tensor.name, tensor.datatype, tensor.shape, _EMPTY)
        if tensor.alias < 0:
            assert self._pool is not None
            view = self._pool.segments.view(at)
        else:  # bytes of our own input, at an offset from its start
            if tensor.alias >= len(self._slots) or at.offset < 0 or at.nbytes < 0:
                raise ProtocolViolation("an output aliases an input that is not there")
            own = self._slots[tensor.alias].view.toreadonly()
            view = own[at.offset : at.offset + at.nbytes]
            if len(view) != at.nbytes:
                raise ProtocolViolation("an output reaches outside of the input it aliases")
        return OutputTensor(tensor.name, tensor.datatype, tensor.shape, view, tensor.alias >= 0)

    def lend(self) -> Callable[[], None]:
        """Keep the outputs of the latest answer readable after the call goes on or is closed. Call
        the returned function once, from any thread, to give the outputs back."""
        memory, pool, outputs = self._memory, self._pool, self._answer.outputs
        lent = leases(outputs)
        nbytes = sum(t.at.nbytes for t in outputs if t.alias < 0)
        for lease in lent:
            self._held.remove(lease)
        self._held_bytes -= nbytes
        own = [self._slots[tensor.alias] for tensor in outputs if tensor.alias >= 0]
        for slot in own:
            memory.lease(slot)
        numbers = [(slot.number, slot.generation) for slot in own]

        def give_back() -> None:
            if pool is not None and lent:
                pool.release(lent, nbytes)
            for number, generation in numbers:
                memory.release(number, generation)

        return give_back

    def close(self) -> None:
        """Give every slot back. Idempotent. Views of outputs are void afterwards."""
        slots, self._slots = self._slots, []
        attempt, retained = self._attempt, self._answer.retained
        if attempt is not None:
            if attempt.unfinished is not None:
                attempt.leave()
            if attempt.abandoned:
                slots = []
        if self._cancellation is not None:
            self._cancellation.close()
        kept: list[tuple[int, int]] = []
        for index, slot in enumerate(slots):
            if slot.state is not _LEASED:
                self._memory.reclaim(slot)
            elif index in retained:
                kept.append((slot.number, slot.generation))
            else:
                try:
                    self._memory.release(slot.number, slot.generation)
                except StaleDescriptor:
                    continue
        pool, self._pool = self._pool, None
        if pool is not None:
            if kept:
                pool.retain(kept)
            if self._held:
                pool.release(self._held, self._held_bytes)
                self._held, self._held_bytes = [], 0
        self.account.close()
