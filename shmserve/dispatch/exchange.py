"""A request and its answers on a lane: send, wait, acknowledge, give up, try elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from shmserve.core.registry import ModelEntry
from shmserve.dispatch.cancellation import Cancellation
from shmserve.dispatch.executor_pool import Lane, Peer, wire_execute
from shmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    ExecutorLost,
    PeerDied,
    ProtocolViolation,
    QueueFull,
    ShmserveError,
    TooLarge,
    Unavailable,
)
from shmserve.protocol import messages
from shmserve.protocol.control.data_messages import (
    Answer,
    Cancel,
    Credit,
    Descriptor,
    Execute,
    RegionRef,
)

if TYPE_CHECKING:
    from shmserve.dispatch.dispatcher import Dispatcher

_TICK_S = 1.0  # how often a waiting request looks whether its client is still there
_QUARANTINE_S = 0.5  # how long to wait for the coordinator's word on what killed an executor
_ATTEMPTS = 2  # runs of one request; a request that kills executors must not go round


class Exchange:
    """One request. Its lane is taken until the final answer has come.

    Attributes:
        deadline_ns: when the wait for the next answer ends.
        overdue: what is said then.
        peer: who answered.
        abandoned: the inputs belong to the `Abandoned` keeper now.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        entry: ModelEntry,
        message: Execute,
        timeout_s: float,
        on_wait: Callable[[], bool] | None,
        cancellation: Cancellation | None,
    ) -> None:
        self.deadline_ns = message.deadline_ns
        self.overdue = f"model '{entry.spec.name}' gave no answer within {timeout_s:g} s"
        self.peer: Peer | None = None
        self.abandoned = False
        self._dispatcher = dispatcher
        self._entry = entry
        self._message = message
        self._on_wait = on_wait
        self._cancellation = cancellation
        self._lane: Lane | None = None  # while further answers come on it

    def first(self) -> Answer:
        """Send the request, on another executor if one dies of it; the first answer.

        Raises:
            Unavailable, QueueFull: no executor could run it.
            DeadlineExceeded, Cancelled: it was abandoned.
        """
        entry = self._dispatcher.latest(self._entry)
        tried: set[str] = set()
        attempt = 1
        while True:
            peer, lane, entry = self._find(entry, tried)
            try:
                self._send(peer, lane)
            except PeerDied:  # it was not taken, so it is no attempt
                peer.discard(lane)
                tried.add(peer.instance.process)
                self._dispatcher.peers.departed(peer)
                continue
            try:
                return self._begin(peer, lane)
            except (PeerDied, ProtocolViolation) as ex:
                tried.add(peer.instance.process)
                again = self._lost(peer, lane, ex)
                if not again or attempt == _ATTEMPTS or not entry.spec.rerun:
                    raise self._died() from ex
                attempt += 1
                entry = self._dispatcher.refreshed(entry)

    def next(self) -> Answer:
        """The next answer of a stream whose final one has not come; raises as `first`."""
        peer, lane = self.peer, self._lane
        assert peer is not None
        assert lane is not None
        try:
            answer = self._wait(peer, lane)
        except (PeerDied, ProtocolViolation) as ex:
            self._lane = None
            self._lost(peer, lane, ex)
            raise self._died() from ex
        if answer.final:
            self._lane = None
            peer.give(lane)
        return answer

    def acknowledge(self, answers: int, slots: tuple[tuple[int, int], ...]) -> None:
        """Answers of a stream were consumed: as many more may come."""
        assert self._lane is not None
        try:
            message = Credit(self._message.request, answers, slots)
            self._lane.channel.send(messages.encode(message))
        except PeerDied:
            pass  # the next receive says so, too

    def leave(self) -> None:
        """Nobody asks for further answers. Idempotent."""
        if self._lane is not None:
            assert self.peer is not None
            self._abandon(self.peer, self._lane)

    # --------------------------------------------------------------- inside

    def _find(self, entry: ModelEntry, tried: set[str]) -> tuple[Peer, Lane, ModelEntry]:
        """A lane to an executor that was not tried, of the version as it is by now.

        Ends: each turn but the last has tried an executor more.
        """
        while True:
            try:
                return *self._dispatcher.peers.lane(entry, tried, self._message), entry
            except QueueFull:
                raise
            except Unavailable:  # those known of have ended: have others taken over?
                entry = self._dispatcher.refreshed(entry)
                if all(instance.process in tried for instance in entry.instances):
                    raise

    def _send(self, peer: Peer, lane: Lane) -> None:
        if self._cancellation is not None:
            try:
                self._cancellation.check()
            except Cancelled:
                peer.give(lane)
                raise
        try:
            wire_execute(peer, lane, self._dispatcher.memory, self._message)
        except TooLarge:  # nothing was sent, but the lane's books may be ahead of its peer's
            peer.discard(lane)
            raise

    def _begin(self, peer: Peer, lane: Lane) -> Answer:
        """The first answer; the lane stays taken if it is not the only one."""
        answer = self._wait(peer, lane)
        self.peer = peer
        if answer.final:
            peer.give(lane)
        else:
            self._lane = lane
        return answer

    def _wait(self, peer: Peer, lane: Lane) -> Answer:
        try:
            while True:
                received = self._receive(lane)
                answer = peer.take(*received) if received is not None else None
                if answer is not None:
                    return self._checked(answer)
        except (PeerDied, ProtocolViolation):
            raise
        except BaseException:  # the executor may still read: never just let go
            self._abandon(peer, lane)
            raise

    def _receive(self, lane: Lane) -> tuple[memoryview, list[int]] | None:
        """A message, or None after a tick in which nothing came and nobody gave up.

        Raises:
            PeerDied, ProtocolViolation: of the channel.
            DeadlineExceeded, Cancelled: nobody waits any more.
        """
        remaining = (self.deadline_ns - time.monotonic_ns()) / 1e9
        if remaining <= 0:
            raise DeadlineExceeded(self.overdue)
        tick_s = min(_TICK_S, max(remaining, 0.001))
        try:
            if self._cancellation is None:
                return lane.channel.receive(tick_s)
            self._cancellation.wait(lane, tick_s)
            received = lane.channel.receive_now()
        except DeadlineExceeded:
            received = None
        if received is None and self._on_wait is not None and not self._on_wait():
            raise Cancelled("the client has gone")
        return received

    def _checked(self, answer: Answer) -> Answer:
        message = self._message
        if answer.request != message.request or not (answer.final or message.credit):
            raise ProtocolViolation("an answer to something that was not asked")
        return answer

    def _lost(self, peer: Peer, lane: Lane, ex: ShmserveError) -> bool:
        """The executor failed while it had the request; whether another may run it.

        Raises:
            InvalidArgument: a client's region was the cause.
        """
        peer.discard(lane)
        self._dispatcher.peers.lost(peer, ex)
        regions = _regions_of(self._message)
        if regions:  # was it one of them? Whatever it was: not a second time
            self._dispatcher.explain(regions, _QUARANTINE_S)
        return not regions

    def _died(self) -> ExecutorLost:
        return ExecutorLost(
            f"the executor of model '{self._entry.spec.name}' died while it had the "
            "request; it is being restarted"
        )

    def _abandon(self, peer: Peer, lane: Lane) -> None:
        """Nobody waits any more: the slots wait for the late answer instead."""
        self._lane = None
        self.abandoned = True
        try:
            lane.channel.send(messages.encode(Cancel(self._message.request)))
        except PeerDied:
            pass  # then its EOF is what the keeper will see
        inputs = [tensor.at for tensor in self._message.inputs]
        leases = [(at.slot, at.generation) for at in inputs if isinstance(at, Descriptor)]
        self._dispatcher.abandoned.keep(peer, lane, self._message.request, leases)


def _regions_of(message: Execute) -> set[int]:
    """Numbers of the client regions a request touches."""
    inputs = {t.at.region for t in message.inputs if isinstance(t.at, RegionRef)}
    return inputs | {place.at.region for place in message.places}
