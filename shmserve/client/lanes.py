"""A client's lanes: channels of its own to executors, which answer without HTTP between.

One request at a time has a lane for itself, and there are as many as requests that ran at a time.
A lane ends when its executor moves it elsewhere or dies; then another is asked for. Where there
is none, HTTP is the way, and after a while a lane is asked for again.
"""

from __future__ import annotations

import threading
import time

from msgspec import Struct

from shmserve.client.cancel_scope import cancellable
from shmserve.client.client_connection import ControlConnection
from shmserve.client.errors import InferenceError
from shmserve.errors import PeerDied, ProtocolViolation, ShmserveError
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.client_messages import LaneOpened
from shmserve.transport.channel import MAX_MESSAGE, Channel

Key = tuple[str, str]  # name and version as they were asked for

_MAX_IDLE = 16
_AGAIN_S = 1.0  # until one is asked for again after a refusal
_GRACE_S = 1.0  # for the server's own word that a deadline has passed


class ClientLane:
    """One lane. Not for two threads at a time.

    Attributes:
        opened: what the server said of it.
    """

    def __init__(self, opened: LaneOpened, channel: Channel) -> None:
        self.opened = opened
        self.channel = channel
        self._numbers = 0

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def receive(self, timeout_s: float) -> wire.LaneAnswer | None:
        """An answer that comes within the timeout.

        Raises:
            PeerDied, ProtocolViolation: none will.
        """
        received = self.channel.receive_within(timeout_s, 0)
        if received is None:
            return None
        answer: wire.LaneAnswer = wire.decode_from_lane(received[0])
        return answer


class _Idle(Struct):
    lanes: list[ClientLane]
    refused_until: float = 0.0


class Lanes:
    """All lanes of one client. Thread-safe."""

    def __init__(self, control: ControlConnection) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._idle: dict[Key, _Idle] = {}
        self._closed = False

    def take(self, key: Key) -> ClientLane | None:
        """A lane for one request; None: there is none now."""
        with self._lock:
            idle = self._idle.setdefault(key, _Idle([]))
            if idle.lanes:
                return idle.lanes.pop()
            if self._closed or time.monotonic() < idle.refused_until:
                return None
        try:
            opened, channel = self._control.open_lane(*key)
        except ShmserveError:
            idle.refused_until = time.monotonic() + _AGAIN_S
            return None
        return ClientLane(opened, channel)

    def give(self, key: Key, lane: ClientLane) -> None:
        """Its request is over."""
        with self._lock:
            idle = self._idle.setdefault(key, _Idle([])).lanes
            if not self._closed and len(idle) < _MAX_IDLE:
                idle.append(lane)
                return
        lane.channel.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [lane for kept in self._idle.values() for lane in kept.lanes]
            self._idle.clear()
        for lane in idle:
            lane.channel.close()


class LaneExchange:
    """One request over lanes, another one if the first has been moved or died: what is to be sent
    and whether it is to be sent again, but not how one waits.

    Args:
        once: the request is not to be run again after an executor died of it, whatever the
            model says: it names memory, which may be the reason.
    """

    def __init__(self, lanes: Lanes, key: Key, request: wire.LaneRequest, once: bool) -> None:
        self._lanes = lanes
        self._key = key
        self._request = request
        self._once = once
        self._number = 0
        self.lane: ClientLane | None = None

    def send(self) -> ClientLane | None:
        """Send it. None: there is no lane that takes it, and nobody has it."""
        while True:
            lane = self._lanes.take(self._key)
            if lane is None:
                return None
            self._number = lane.next_number()
            data = wire.encode(_numbered(self._request, self._number))
            if len(data) > MAX_MESSAGE:
                self._lanes.give(self._key, lane)
                return None
            try:
                lane.channel.send(data)
            except PeerDied:  # it takes no more; this request is not at any executor's
                lane.channel.close()
                continue
            self.lane = lane
            return lane

    def timeout_s(self, asked_s: float) -> float:
        """How long to wait for the answer."""
        assert self.lane is not None
        return min(asked_s, self.lane.opened.timeout_ns / 1e9 + _GRACE_S)

    def received(self, answer: wire.LaneAnswer | None) -> tuple[wire.LaneAnswer, LaneOpened]:
        """The answer came, and whose it is; None: not in time.

        Raises:
            InferenceError: it did not come, or to something else.
        """
        lane = self.lane
        assert lane is not None
        if answer is None or answer.number != self._number:
            self.abandon()
            raise InferenceError(0, "the server did not answer in time")
        self.lane = None
        self._lanes.give(self._key, lane)
        return answer, lane.opened

    def lost(self) -> None:
        """The executor has died, or broken the protocol.

        Raises:
            InferenceError: the request is not to be sent again.
        """
        assert self.lane is not None
        again = self.lane.opened.rerun and not self._once
        self.abandon()
        if not again:
            raise InferenceError(503, "the executor died while it had the request")
        self._once = True

    def abandon(self) -> None:
        """Nobody waits any more: that ends the lane, and with it the request. Idempotent."""
        lane, self.lane = self.lane, None
        if lane is not None:
            lane.channel.close()


def converse(exchange: LaneExchange, timeout_s: float) -> tuple[wire.LaneAnswer, LaneOpened] | None:
    """Send a request, and wait for its answer. None: there is no lane that takes it.

    Raises:
        InferenceError: no answer came, or none in time, or nobody wants it any more.
    """
    try:
        while (lane := exchange.send()) is not None:
            try:
                with cancellable(lane.channel.refuse):
                    answer = lane.receive(exchange.timeout_s(timeout_s))
            except (PeerDied, ProtocolViolation):
                exchange.lost()
            else:
                return exchange.received(answer)
        return None
    finally:
        exchange.abandon()


def _numbered(request: wire.LaneRequest, number: int) -> wire.LaneRequest:
    return wire.LaneRequest(
        number,
        request.inputs,
        request.outputs,
        request.id,
        request.parameters,
        request.timeout_ns,
    )
