"""A client's lanes: channels of its own to executors, which answer without HTTP between.

One request at a time has a lane for itself, and there are as many as requests that ran at a time.
A lane ends when its executor moves it elsewhere or dies; then another is asked for. Where there
is none, HTTP is the way, and after a while a lane is asked for again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from shmserve.client.wire.cancel_scope import cancellable
from shmserve.client.wire.client_connection import ControlConnection
from shmserve.client.wire.http_transport import left_s
from shmserve.client.wire.inference_error import LATE, InferenceError
from shmserve.errors import PeerDied, ProtocolViolation, ShmserveError
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.client_messages import LaneOpened
from shmserve.transport.channel import MAX_MESSAGE, Channel

Key = tuple[str, str]  # name and version as they were asked for

_MAX_IDLE = 16
_AGAIN_S = 1.0  # until one is asked for again after a refusal
# For the server's own word that its deadline has passed, which it looks at once a second
_GRACE_S = 5.0
DIED = "the executor died while it had the request"


class ClientLane:
    """One lane. Not for two threads at a time.

    Attributes:
        opened: what the server said of it.
        limit_s: how long an answer takes at most; then the server's own word of that has come.
    """

    def __init__(self, opened: LaneOpened, channel: Channel) -> None:
        self.opened = opened
        self.channel = channel
        self.limit_s = opened.timeout_ns / 1e9 + _GRACE_S

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

    def refuse(self, until: float) -> None:
        """The server gives no lane now: ask again then."""
        self.refused_until = until


class Lanes:
    """All lanes of one client. Thread-safe."""

    def __init__(self, control: Callable[[], ControlConnection | None]) -> None:
        """`control`: gives the client socket, if there is one now."""
        self._control = control
        self._lock = threading.Lock()
        self._idle: dict[Key, _Idle] = {}
        self._closed = False

    def take(self, key: Key, until: float) -> ClientLane | None:
        """A lane for one request, by its deadline; None: there is none now."""
        with self._lock:
            idle = self._idle.get(key)
            if idle is None:
                idle = self._idle[key] = _Idle([])
            if idle.lanes:
                return idle.lanes.pop()
            if self._closed or time.monotonic() < idle.refused_until:
                return None
        control = self._control()
        if control is None:
            return None
        try:
            opened, channel = control.open_lane(*key, left_s(until))
        except ShmserveError:
            idle.refuse(time.monotonic() + _AGAIN_S)
            return None
        return ClientLane(opened, channel)

    def give(self, key: Key, lane: ClientLane) -> None:
        """Its request is over."""
        with self._lock:
            idle = self._idle.get(key)  # None: closed meanwhile
            if idle is not None and not self._closed and len(idle.lanes) < _MAX_IDLE:
                idle.lanes.append(lane)
                return
        lane.channel.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle = [lane for kept in self._idle.values() for lane in kept.lanes]
            self._idle.clear()
        for lane in idle:
            lane.channel.close()


def converse(
    lanes: Lanes, key: Key, request: wire.LaneRequest, once: bool, until: float
) -> tuple[wire.LaneAnswer, ClientLane] | None:
    """Send a request, again if its lane has been moved or died, and wait for its first answer; with
    the lane it came on, which is the caller's if that is not the final one. None: there is no lane
    that takes it.

    Args:
        once: it is not to be run again after an executor died of it, whatever the model says:
            it names memory, which may be the reason.
        until: its deadline (`time.monotonic`); each time the server is told what is left.

    Raises:
        InferenceError: no answer came, or none in time, or nobody wants it any more.
    """
    while True:
        lane = lanes.take(key, until)
        if lane is None:
            return None
        data = wire.encode(replace(request, timeout_ns=int(left_s(until) * 1e9)))
        if len(data) > MAX_MESSAGE:
            lanes.give(key, lane)
            return None
        answer: wire.LaneAnswer | None = None
        sent = ours = False
        try:
            lane.channel.send(data)
            sent = True
            with cancellable(lane.channel.refuse):
                answer = lane.receive(min(left_s(until), lane.limit_s))
            ours = answer is not None and answer.number == request.number and not answer.moved
        except (PeerDied, ProtocolViolation):
            if sent and (once or not lane.opened.rerun):
                raise InferenceError(502, DIED) from None
            once = once or sent  # what could not be sent is at no executor's
            continue
        finally:
            if not ours:  # nobody waits any more: that ends the lane, and with it the request
                lane.channel.close()
            elif answer is not None and answer.final:
                lanes.give(key, lane)
        if answer is not None and ours:
            return answer, lane
        if answer is None or not answer.moved:
            raise InferenceError(0, LATE)
