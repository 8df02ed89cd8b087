"""One request through the data plane.

Life: `reserve` and `add_input` per tensor, `execute` or `stream` once, `close` after the
last byte of the answer was sent. `close` gives every slot back on every path; a call that
was abandoned leaves that to the `Abandoned` keeper, because the executor may still read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from shmserve.core.memory.slots import SlotState
from shmserve.core.registry import ModelEntry
from shmserve.dispatch.account import Account
from shmserve.dispatch.cancellation import Cancellation
from shmserve.dispatch.exchange import Exchange
from shmserve.dispatch.executor_pool import RELEASE_AT_ONCE, Peer
from shmserve.dispatch.forwarded_outputs import AnySlot, Passed
from shmserve.dispatch.outcome import Outcome, OutputTensor, Reservation
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import Cancelled, Code, ProtocolViolation, StaleDescriptor, from_code
from shmserve.protocol.control.data_messages import (
    Answer,
    Descriptor,
    Execute,
    OutputPlace,
    Parameter,
    RegionRef,
    WireTensor,
)

if TYPE_CHECKING:
    from shmserve.dispatch.dispatcher import Dispatcher

_EMPTY = memoryview(b"")


class Call:
    """One request. A context manager; not for use by two threads, but for `cancel`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        entry: ModelEntry,
        timeout_s: float,
        cancellable: bool = False,
    ) -> None:
        self.receipt = Receipt()
        self.account = Account(dispatcher.counting, dispatcher.tracer, entry, self.receipt)
        self.entry = entry
        self._dispatcher = dispatcher
        self._memory = dispatcher.memory
        self._deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        self._timeout_s = timeout_s
        self._slots: list[AnySlot] = []  # of the inputs that lie in slots, in their order
        self._answered: tuple[WireTensor, ...] = ()
        self._inputs: list[WireTensor] = []
        self._retained: tuple[int, ...] = ()
        self._held: list[tuple[int, int]] = []  # output slots
        self._held_bytes = 0
        self._peer: Peer | None = None
        self._exchange: Exchange | None = None
        self._cancellation = Cancellation() if cancellable else None

    def cancel(self) -> None:
        """Make whoever waits in it raise `Cancelled` at once. From any thread, at any time,
        but only for a call that was made `cancellable`."""
        assert self._cancellation is not None, "the call was not made cancellable"
        self._cancellation.cancel()

    def reserve(self, nbytes: int) -> Reservation:
        """Room for a tensor of `nbytes` bytes in this process's arena.

        Raises:
            ArenaExhausted: the pool is used up.
        """
        slot = self._memory.reserve(nbytes)
        self._slots.append(slot)
        return Reservation(slot, self._memory.view(slot))

    def add_input(
        self, name: str, datatype: str, shape: tuple[int, ...], reservation: Reservation
    ) -> None:
        """The reservation is written: seal it as an input. Inputs keep this order."""
        self._memory.seal(reservation.slot)
        at = self._memory.descriptor(reservation.slot)
        self._inputs.append(WireTensor(name, datatype, shape, at))

    def add_region_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: RegionRef
    ) -> None:
        """An input that lies in client memory. Inputs keep this order."""
        self._inputs.append(WireTensor(name, datatype, shape, at))

    def add_passed_input(
        self, name: str, datatype: str, shape: tuple[int, ...], passed: Passed
    ) -> None:
        """An input that another executor has written. Inputs keep this order."""
        self._slots.append(passed)
        self._inputs.append(WireTensor(name, datatype, shape, self._memory.descriptor(passed)))

    def pass_on(self, name: str) -> Passed:
        """Have an output of the latest answer as an input of another call, where it is.

        It stays there until that call is done, whenever this one is closed.
        """
        tensor = next(tensor for tensor in self._answered if tensor.name == name)
        at, peer = tensor.at, self._peer
        assert peer is not None
        assert isinstance(at, Descriptor)
        if tensor.alias >= 0:
            self._output(tensor)  # that it lies within the input it names
            return self._memory.pass_slot(self._slots[tensor.alias], at.offset, at.nbytes)
        lease, nbytes = (at.slot, at.generation), at.nbytes
        passed = self._memory.pass_on(
            peer.segments.mapping(at), at, lambda: peer.release([lease], nbytes)
        )
        self._held.remove(lease)
        self._held_bytes -= nbytes
        return passed

    def execute(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        on_wait: Callable[[], bool] | None = None,
        places: tuple[OutputPlace, ...] = (),
    ) -> Outcome:
        """Run it and wait for the answer.

        `on_wait` is called about once a second meanwhile; when it returns False nobody
        wants the answer any more.

        Raises:
            ModelFailure: the model's own error.
            Unavailable, QueueFull: no executor could run it.
            DeadlineExceeded, Cancelled: it was abandoned.
        """
        exchange = self._begin(request_id, outputs, parameters, on_wait, places, 0)
        try:
            answer = self._accept(exchange.first())
            if answer.error_code:
                self.account.refused(answer.error_code)
                raise from_code(Code(answer.error_code), answer.error)
            outputs_there = tuple([self._output(tensor) for tensor in answer.outputs])
        except BaseException as ex:
            self.account.failed(ex)
            raise
        self.account.succeeded = True
        return Outcome(outputs_there, answer.parameters)

    def answered(self) -> None:
        """The answer is about to be sent, and its receipt complete: statistics have it now."""
        self.account.answered()

    def failed(self, error: BaseException) -> None:
        """Something else than `execute` keeps the request from being answered."""
        self.account.failed(error)

    def stream(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        on_wait: Callable[[], bool] | None = None,
        places: tuple[OutputPlace, ...] = (),
    ) -> Iterator[Outcome]:
        """Run it and yield every answer; `frontends.oip.seam.Call.stream` has the contract."""
        answers = self._answers(request_id, outputs, parameters, on_wait, places)
        try:
            for answer in answers:
                if answer.final and answer.error_code:
                    self.account.refused(answer.error_code)
                elif answer.final:
                    self.account.succeeded = True
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

    def _answers(
        self,
        request_id: str,
        outputs: tuple[str, ...],
        parameters: dict[str, Parameter] | None,
        on_wait: Callable[[], bool] | None,
        places: tuple[OutputPlace, ...],
    ) -> Generator[Answer]:
        settings = self._dispatcher.settings
        credit = settings.stream_credit if self.entry.spec.decoupled else 0
        ends_ns = time.monotonic_ns() + int(settings.stream_timeout_s * 1e9)
        exchange = self._begin(request_id, outputs, parameters, on_wait, places, credit)
        answer = self._accept(exchange.first())
        owed = 0  # answers consumed and not acknowledged
        try:
            while True:
                yield answer
                if answer.final:
                    return
                owed += 1
                if 2 * owed >= credit or self._held_bytes >= RELEASE_AT_ONCE:
                    exchange.acknowledge(owed, self._take_held())
                    owed = 0
                exchange.deadline_ns = time.monotonic_ns() + int(self._timeout_s * 1e9)
                if settings.stream_timeout_s and ends_ns < exchange.deadline_ns:
                    exchange.deadline_ns = ends_ns
                    exchange.overdue = "the stream took longer than stream_timeout_s"
                answer = self._accept(exchange.next())
        finally:
            exchange.leave()

    def _begin(
        self,
        request_id: str,
        outputs: tuple[str, ...],
        parameters: dict[str, Parameter] | None,
        on_wait: Callable[[], bool] | None,
        places: tuple[OutputPlace, ...],
        credit: int,
    ) -> Exchange:
        message = Execute(
            self._dispatcher.numbers.next(),
            request_id,
            tuple(self._inputs),
            outputs,
            parameters or {},
            self.account.sent(request_id),
            self._deadline_ns,
            places=places,
            credit=credit,
        )
        for slot in self._slots:
            self._memory.lease(slot)
        self._exchange = Exchange(
            self._dispatcher, self.entry, message, self._timeout_s, on_wait, self._cancellation
        )
        return self._exchange

    def _accept(self, answer: Answer) -> Answer:
        assert self._exchange is not None
        assert self._exchange.peer is not None
        self._peer = self._exchange.peer
        self._retained = answer.retained
        self._answered = answer.outputs
        for tensor in answer.outputs:
            if tensor.alias < 0 and isinstance(tensor.at, Descriptor):
                self._held.append((tensor.at.slot, tensor.at.generation))
                self._held_bytes += tensor.at.nbytes
        receipt, timing, copied = self.receipt, answer.timing, answer.copied
        self.account.timing = timing
        receipt.executor = self._peer.instance.name
        receipt.queue_ns += timing.queue
        receipt.compute_ns += timing.input + timing.infer + timing.output
        receipt.copied_batch += copied.batch
        receipt.copied_out += copied.out
        receipt.copied_device += copied.device
        receipt.copied_in += copied.inputs
        return answer

    def _outcome(self, answer: Answer) -> Outcome:
        error = from_code(Code(answer.error_code), answer.error) if answer.error_code else None
        outputs = tuple([self._output(tensor) for tensor in answer.outputs])
        return Outcome(outputs, answer.parameters, answer.final, error)

    def _output(self, tensor: WireTensor) -> OutputTensor:
        at = tensor.at
        if isinstance(at, RegionRef):
            return OutputTensor(tensor.name, tensor.datatype, tensor.shape, _EMPTY)
        if tensor.alias < 0:
            assert self._peer is not None
            view = self._peer.segments.view(at)
        else:  # bytes of our own input, named relative to its start
            if tensor.alias >= len(self._slots) or at.offset < 0 or at.nbytes < 0:
                raise ProtocolViolation("an output aliases an input that is not there")
            own = self._memory.view(self._slots[tensor.alias]).toreadonly()
            view = own[at.offset : at.offset + at.nbytes]
            if len(view) != at.nbytes:
                raise ProtocolViolation("an output reaches outside of the input it aliases")
        return OutputTensor(tensor.name, tensor.datatype, tensor.shape, view)

    def _take_held(self) -> tuple[tuple[int, int], ...]:
        held, self._held, self._held_bytes = tuple(self._held), [], 0
        return held

    def close(self) -> None:
        """Give every slot back. Idempotent; views of outputs are void afterwards."""
        slots, self._slots = self._slots, []
        exchange = self._exchange
        if exchange is not None:
            exchange.leave()
            if exchange.abandoned:
                slots = []
        if self._cancellation is not None:
            self._cancellation.close()
        kept: list[tuple[int, int]] = []
        for index, slot in enumerate(slots):
            if slot.state is not SlotState.LEASED:
                self._memory.reclaim(slot)
            elif index in self._retained:
                kept.append((slot.number, slot.generation))
            else:
                try:
                    self._memory.release(slot.number, slot.generation)
                except StaleDescriptor:
                    continue
        if self._peer is not None:
            if kept:
                self._peer.retain(kept)
            if self._held:
                nbytes = self._held_bytes
                self._peer.release(list(self._take_held()), nbytes)
            self._peer = None
        self.account.close()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.account.failed(error)
        self.close()
