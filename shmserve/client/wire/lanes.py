"""Lanes of a client: direct channels to executors, without HTTP in between.

A lane serves one request at a time, so a client opens as many lanes as it has concurrent requests.
A lane ends when its executor moves the lane elsewhere or dies; the client then opens another.
While no lane is available, requests go over HTTP, and after a pause the client asks for a lane
again.
"""

import math
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
from shmserve.transport.looking import LookingWait

Key = tuple[str, str]  # model name and version, as requested

_MAX_IDLE = 16
_STEPS = 8  # steps, per second, of longer waits for an answer
_AGAIN_S = 1.0  # seconds without further attempts after a refused lane
# Seconds to wait beyond the server's deadline, for the server's own deadline error: the server
# checks deadlines once a second.
_GRACE_S = 5.0
DIED = "the executor died while it had the request"


class ClientLane:
    """Open lane, for one thread at a time. `opened`: the server's description of the lane.
    `limit_s`: longest wait for an answer, in seconds: the server's own limit and a grace period."""

    def __init__(self, opened: LaneOpened, channel: Channel) -> None:
        self._wait = LookingWait(channel.receive_within, 0).wait  # without descriptors
        self.opened = opened
        self.channel = channel
        self.limit_s = opened.timeout_ns / 1e9 + _GRACE_S

    def receive(self, timeout_s: float) -> wire.LaneAnswer | None:
        """Return the next answer, or None after `timeout_s` seconds or slightly more. Raise
        PeerDied or ProtocolViolation if the lane has failed; no answer will come."""
        if timeout_s > 1.0:  # the same time for most requests costs no system call to set it
            timeout_s = math.ceil(timeout_s * _STEPS) / _STEPS
        received = self._wait(timeout_s)
        if received is None:
            return None
        answer: wire.LaneAnswer = wire.decode_from_lane(received[0])
        return answer


class _Idle(Struct):
    lanes: list[ClientLane]
    refused_until: float = 0.0  # no lane is asked for before


class Lanes:
    """Idle lanes of one client. Thread-safe."""

    def __init__(self, control: Callable[[], ControlConnection | None]) -> None:
        """Make an empty set. `control` returns the client socket's connection, None without one."""
        self._control = control
        self._lock = threading.Lock()
        self._idle: dict[Key, _Idle] = {}
        self._closed = False

    def take(self, key: Key, until: float) -> ClientLane | None:
        """Return a lane for one request before the deadline `until`; None if none is available."""
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
            idle.refused_until = time.monotonic() + _AGAIN_S
            return None
        return ClientLane(opened, channel)

    def give(self, key: Key, lane: ClientLane) -> None:
        """Take a lane back after its request."""
        with self._lock:
            idle = self._idle.get(key)  # None: the client was closed meanwhile
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
    """Send a request over a lane and wait for the first answer. If the lane was moved or its
    executor died, try another lane.

    Return the answer and its lane, which belongs to the caller unless the answer is final. Return
    None if no lane takes the request.

    Args:
        once: never repeat the request after an executor died with it, even if the model allows
            repeats. The request names memory, which may be the cause.
        until: deadline (`time.monotonic`); each attempt tells the server the remaining time.

    Raises:
        InferenceError: the executor died, the deadline passed, or the request was cancelled.
    """
    while True:
        lane = lanes.take(key, until)
        if lane is None:
            return None
        remaining_s = left_s(until)
        data = wire.encode(replace(request, timeout_ns=int(remaining_s * 1e9)))
        if len(data) > MAX_MESSAGE:
            lanes.give(key, lane)
            return None
        answer: wire.LaneAnswer | None = None
        sent = ours = False
        try:
            lane.channel.send(data)
            sent = True
            with cancellable(lane.channel.refuse):
                answer = lane.receive(min(remaining_s, lane.limit_s))
            ours = answer is not None and answer.number == request.number and not answer.moved
        except (PeerDied, ProtocolViolation):
            if sent and (once or not lane.opened.rerun):
                raise InferenceError(502, DIED) from None
            once = once or sent  # a request that could not be sent has reached no executor
            continue
        finally:
            if not ours:  # closing the lane ends the request
                lane.channel.close()
            elif answer is not None and answer.final:
                lanes.give(key, lane)
        if answer is not None and ours:
            return answer, lane
        if answer is None or not answer.moved:
            raise InferenceError(0, LATE)
