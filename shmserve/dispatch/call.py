"""One request through the data plane.

Life: `reserve` and `add_input` per tensor, `execute` once, `close` after the last byte
of the answer was sent. `close` gives every slot back on every path; a call that was
abandoned leaves that to the `Abandoned` keeper, because the executor may still read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from shmserve.core.registry import ModelEntry
from shmserve.core.slots import Slot, SlotState
from shmserve.dispatch.account import Account
from shmserve.dispatch.peer import Lane, Peer, wire_execute
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    ExecutorLost,
    ModelFailure,
    PeerDied,
    ProtocolViolation,
    QueueFull,
    ShmserveError,
    StaleDescriptor,
    TooLarge,
    Unavailable,
    from_code,
)
from shmserve.protocol import messages
from shmserve.protocol.data_messages import (
    Answer,
    Cancel,
    Descriptor,
    Execute,
    OutputPlace,
    Parameter,
    RegionRef,
    WireTensor,
)

if TYPE_CHECKING:
    from shmserve.dispatch.dispatcher import Dispatcher

_TICK_S = 1.0  # how often a waiting request looks whether its client is still there
_QUARANTINE_S = 0.5  # how long to wait for the coordinator's word on what killed an executor
_ATTEMPTS = 2  # runs of one request; a request that kills executors must not go round


_EMPTY = memoryview(b"")


class Reservation:
    """A slot being written. `view`: exactly the bytes asked for."""

    __slots__ = ("slot", "view")

    def __init__(self, slot: Slot, view: memoryview) -> None:
        self.slot = slot
        self.view = view


class OutputTensor(Struct, frozen=True):
    """One output; `view` are its bytes in shared memory, valid until `Call.close`.

    An output that went into client memory has an empty view.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    view: memoryview


class Outcome(Struct, frozen=True):
    """An answer. `final` and `error` matter in streams only: `execute` raises errors."""

    outputs: tuple[OutputTensor, ...]
    parameters: dict[str, Parameter]
    final: bool = True
    error: ShmserveError | None = None


class Call:
    """One request. A context manager; not for use by two threads at a time."""

    def __init__(self, dispatcher: Dispatcher, entry: ModelEntry, timeout_s: float) -> None:
        self.receipt = Receipt()
        self.account = Account(dispatcher.counting, dispatcher.tracer, entry, self.receipt)
        self.entry = entry
        self._dispatcher = dispatcher
        self._memory = dispatcher.memory
        self._deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        self._timeout_s = timeout_s
        self._slots: list[Slot] = []
        self._inputs: list[WireTensor] = []
        self._retained: tuple[int, ...] = ()
        self._held: list[tuple[int, int]] = []  # output slots
        self._held_bytes = 0
        self._peer: Peer | None = None

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
        message = Execute(
            self._dispatcher.numbers.next(),
            request_id,
            tuple(self._inputs),
            outputs,
            parameters or {},
            self.account.sent(request_id),
            self._deadline_ns,
            places=places,
        )
        for slot in self._slots:
            self._memory.lease(slot)
        try:
            answer = self._run(message, on_wait)
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
        """The answer is about to be sent: from now on statistics have it."""
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
        try:
            yield self.execute(request_id, outputs, parameters, on_wait, places)
        except ModelFailure as ex:
            yield Outcome((), {}, True, ex)

    def _run(self, message: Execute, on_wait: Callable[[], bool] | None) -> Answer:
        entry = self._dispatcher.latest(self.entry)
        tried: set[str] = set()
        attempt = 1
        while True:
            peer, lane, entry = self._lane(entry, tried)
            try:
                wire_execute(peer, lane, self._memory, message)
            except TooLarge:  # nothing was sent, but the lane's books may be ahead of its peer's
                peer.discard(lane)
                raise
            except PeerDied:  # it was not taken, so it is no attempt
                peer.discard(lane)
                tried.add(peer.instance.process)
                self._dispatcher.departed(peer)
                continue
            try:
                return self._exchange(peer, lane, message, on_wait)
            except (PeerDied, ProtocolViolation) as ex:
                peer.discard(lane)
                tried.add(peer.instance.process)
                self._dispatcher.lost(peer, ex)
                regions = _regions_of(message)
                if regions:  # was it one of them? Whatever it was: not a second time
                    self._dispatcher.explain(regions, _QUARANTINE_S)
                    attempt = _ATTEMPTS
                if attempt == _ATTEMPTS or not entry.spec.rerun:
                    raise ExecutorLost(
                        f"the executor of model '{entry.spec.name}' died while it had the "
                        "request; it is being restarted"
                    ) from ex
                attempt += 1
                entry = self._dispatcher.refreshed(entry)

    def _lane(self, entry: ModelEntry, tried: set[str]) -> tuple[Peer, Lane, ModelEntry]:
        """A lane to an executor that was not tried, of the version as it is by now.

        Ends: each turn but the last has tried an executor more.
        """
        while True:
            try:
                return *self._dispatcher.lane(entry, tried), entry
            except QueueFull:
                raise
            except Unavailable:  # those known of have ended: have others taken over?
                entry = self._dispatcher.refreshed(entry)
                if all(instance.process in tried for instance in entry.instances):
                    raise

    def _exchange(
        self, peer: Peer, lane: Lane, message: Execute, on_wait: Callable[[], bool] | None
    ) -> Answer:
        try:
            answer = self._wait(peer, lane, message.request, on_wait)
        except (PeerDied, ProtocolViolation, DeadlineExceeded, Cancelled):
            raise
        except BaseException:  # the executor may still read: never just let go
            self._abandon(peer, lane, message.request)
            raise
        peer.give(lane)
        return answer

    def _wait(
        self, peer: Peer, lane: Lane, number: int, on_wait: Callable[[], bool] | None
    ) -> Answer:
        while True:
            remaining = (self._deadline_ns - time.monotonic_ns()) / 1e9
            if remaining <= 0:
                self._abandon(peer, lane, number)
                raise DeadlineExceeded(
                    f"model '{self.entry.spec.name}' gave no answer within {self._timeout_s:g} s"
                )
            try:
                data, fds = lane.channel.receive(min(_TICK_S, max(remaining, 0.001)))
            except DeadlineExceeded:
                if on_wait is not None and not on_wait():
                    self._abandon(peer, lane, number)
                    raise Cancelled("the client has gone") from None
                continue
            answer = peer.take(data, fds)
            if answer is not None:
                return self._accept(peer, answer, number)

    def _accept(self, peer: Peer, answer: Answer, number: int) -> Answer:
        if answer.request != number:
            raise ProtocolViolation("an answer to something that was not asked")
        self._peer = peer
        self._retained = answer.retained
        for tensor in answer.outputs:
            if tensor.alias < 0 and isinstance(tensor.at, Descriptor):
                self._held.append((tensor.at.slot, tensor.at.generation))
                self._held_bytes += tensor.at.nbytes
        receipt = self.receipt
        self.account.timing = answer.timing
        receipt.executor = peer.instance.name
        receipt.queue_ns = answer.timing.queue
        receipt.compute_ns = answer.timing.input + answer.timing.infer + answer.timing.output
        receipt.copied_batch, receipt.copied_out, receipt.copied_device = (
            answer.copied.batch,
            answer.copied.out,
            answer.copied.device,
        )
        receipt.copied_in += answer.copied.inputs
        return answer

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

    def _abandon(self, peer: Peer, lane: Lane, number: int) -> None:
        """Nobody waits any more: the slots wait for the late answer instead."""
        try:
            lane.channel.send(messages.encode(Cancel(number)))
        except PeerDied:
            pass  # then its EOF is what the keeper will see
        slots, self._slots = self._slots, []
        leases = [(slot.number, slot.generation) for slot in slots]
        self._dispatcher.abandoned.keep(peer, lane, number, leases)

    def close(self) -> None:
        """Give every slot back. Idempotent; views of outputs are void afterwards."""
        slots, self._slots = self._slots, []
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
                self._peer.release(self._held, self._held_bytes)
            self._peer = None
            self._held = []
        self.account.close()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.account.failed(error)
        self.close()


def _regions_of(message: Execute) -> set[int]:
    """Numbers of the client regions a request touches."""
    inputs = {t.at.region for t in message.inputs if isinstance(t.at, RegionRef)}
    return inputs | {place.at.region for place in message.places}
