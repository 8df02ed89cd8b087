"""Lane peers: admits lanes, checks and translates messages, and counts requests.

Lanes lead to strangers, so `lane_gate` checks everything. In each turn, one message of a lane is
read, or no message while too many requests or answers of the lane wait. A lane is closed if the
caller does not take answers or sends unreadable messages. Other lanes notice nothing.
"""

import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from weakref import WeakValueDictionary

from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.control.lane_rules import most_of_one, most_requests
from shmserve.errors import ProtocolViolation, QueueFull, ShmserveError, Unavailable
from shmserve.executor.peers import lane_gate
from shmserve.executor.peers.frontend_connections import Event, FromPeer
from shmserve.executor.peers.lane import Lane, LaneOwner, LaneUser
from shmserve.executor.peers.lane_counting import LaneCounting
from shmserve.executor.peers.lane_gate import LaneGate
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.data_messages import Answer, Cancel, Credit, leases
from shmserve.protocol.control.link_messages import LaneOffered, LanesOpen
from shmserve.shm.arena import ArenaMemory
from shmserve.transport.channel import message_buffer
from shmserve.transport.deferred_close import DeferredClose
from shmserve.transport.stranger_channel import StrangerChannel

log = logging.getLogger(__name__)

TakenIn = tuple[FromPeer | None, bytes | None]  # (message for the loop, packet for the lane)


class LanePeers:
    """The lanes of one executor, for the thread that uses the channels. `tell`: sends a message to
    the coordinator."""

    def __init__(
        self,
        gate: LaneGate,
        memory: ArenaMemory,
        counting: LaneCounting,
        settings: Settings,
        tell: Callable[[LanesOpen], None],
    ) -> None:
        self._gate = gate
        self._memory = memory
        self._counting = counting
        self._settings = settings
        self._limit = most_requests(settings, gate.spec.decoupled)
        self._tell = tell
        self._lanes: set[Lane] = set()
        self._users: WeakValueDictionary[int, LaneUser] = WeakValueDictionary()  # by user id
        # By user id. A closer outlives the user's last lane until all descriptors are closed.
        self._closers: WeakValueDictionary[int, DeferredClose] = WeakValueDictionary()
        self._buffer = message_buffer()

    # ------------------------------------------------------------- beginning and end

    def admit(self, message: LaneOffered, fd: int, closed: bool) -> Lane | None:
        """Return a new lane on this descriptor. If a limit is reached, close the descriptor and
        return None. The coordinator keeps to the limits, but may have lost count."""
        owners = self._owners()
        max_lanes, uid = self._settings.max_lanes, message.uid
        full = owners.total() >= max_lanes or owners[uid] >= most_of_one(self._settings)
        user = self._users.get(uid) or LaneUser(self._closers.setdefault(uid, DeferredClose()))
        channel = StrangerChannel(socket.socket(fileno=fd), self._buffer, user.closer)
        if full or closed or user.closer.busy or not self._counts():
            channel.close()
            self._tell(LanesOpen((uid,), ended=True))
            return None
        caller = Caller(uid, message.pid, message.started)
        owner, decoupled = LaneOwner(f"lane of {uid}"), self._gate.spec.decoupled
        self._users[uid] = user
        lane = Lane(
            owner, channel=channel, caller=caller, decoupled=decoupled, owner=owner, user=user
        )
        self._lanes.add(lane)
        return lane

    def introduce(self) -> None:
        """Tell a new coordinator of the lanes and of their counter page."""
        self._tell(LanesOpen(tuple(self._owners().elements())))
        with contextlib.suppress(OSError):  # no descriptor is left: the next lane tries again
            self._counting.announce()

    def violated(self, lane: Lane) -> None:
        """Record an unreadable message of a lane, or a message that is not allowed now."""
        flight_recorder.record("lane violated", f"uid {lane.caller.uid}", self._gate.spec.name)

    def ended(self, lane: Lane) -> None:
        """Forget a closed lane and the lane's requests."""
        self._lanes.discard(lane)
        calls = lane.abandon()
        for call in calls:
            self._counting.lost(call)
        # Streams that the model goes on with still count.
        lane.user.waiting += len(lane.running) - len(calls)
        self._tell(LanesOpen((lane.caller.uid,), ended=True))

    def close(self) -> None:
        """Close the counter page."""
        self._counting.close()

    def _owners(self) -> Counter[int]:
        return Counter(lane.caller.uid for lane in self._lanes)

    def _counts(self) -> bool:
        try:
            self._counting.open()
        except OSError as ex:
            log.error("lane refused", extra=log_fields(error=ex))
            return False
        return True

    # ------------------------------------------------------------- slow readers, late streams

    def overdue(self, stalled: Iterable[Lane]) -> list[Lane]:
        """Return the lanes that have not taken their answers within `send_timeout_s`."""
        until = time.monotonic() - self._settings.send_timeout_s
        return [lane for lane in stalled if lane.stalled_at <= until]

    def late(self) -> list[Event]:
        """Return a cancellation for each stream that takes too long. For other requests, the queue
        watches the deadline."""
        now_ns = time.monotonic_ns()
        events: list[Event] = []
        for lane in self._lanes:
            for number, call in lane.waiting.items():
                if call.runs_late(now_ns):
                    events.append((lane, Cancel(number)))
        return events

    def stream_ended(self, lane: Lane, number: int) -> None:
        """Note that the model has sent all of a stream's answers."""
        if number in lane.running:
            lane.running.remove(number)
            if lane.closed:
                lane.user.waiting -= 1

    # ------------------------------------------------------------- messages

    def take_in(self, lane: Lane, data: memoryview, fds: list[int]) -> TakenIn:
        """Translate a message of a lane. Return the message for the loop and the packet to send at
        once; each may be None. Raise ProtocolViolation if the message is unreadable, carries
        descriptors, or is not allowed now."""
        if fds:
            lane.user.closer.close(fds)
            raise ProtocolViolation("a message with descriptors")
        message: wire.ToLane = wire.decode_to_lane(data)
        if isinstance(message, wire.LaneRequest):
            if message.number in lane.owner.inline.calls:
                raise ProtocolViolation("two requests of one number")
            return self._begin(lane, message)
        if isinstance(message, wire.LaneCredit):
            return self._credit(lane, message), None
        return (Cancel(message.number) if message.number in lane.waiting else None), None

    def _credit(self, lane: Lane, message: wire.LaneCredit) -> Credit | None:
        call = lane.waiting.get(message.number)
        if message.answers < 1:  # would extend the deadline of a stream that stands still
            raise ProtocolViolation("credit for no answer")
        if call is None or not call.credit:
            return None
        call.moved(time.monotonic_ns())
        return Credit(message.number, message.answers)

    def _begin(self, lane: Lane, message: wire.LaneRequest) -> TakenIn:
        caller, decoupled = lane.caller, self._gate.spec.decoupled
        if decoupled and lane.leaving:  # the coming refusal would stop further credit
            reply = lane_gate.refused(message.number, Unavailable("the lane is about to end"))
            return None, lane_gate.encoded(replace(reply, moved=True))
        try:
            if lane.user.waiting >= self._limit:
                settings = "max_queue, max_streams, max_caller_share" if decoupled else "max_queue"
                raise QueueFull(f"{self._limit} requests of this user wait already ({settings})")
            if decoupled and lane.credit and lane.credit + message.credit > wire.READ_AHEAD:
                raise QueueFull(
                    f"credit: {message.credit} and that of this lane's other streams are more than"
                    f" {wire.READ_AHEAD}"
                )
            execute, call = self._gate.admit(caller, message, time.monotonic_ns())
        except ShmserveError as ex:
            self._counting.refused(ex)
            return None, lane_gate.encoded(lane_gate.refused(message.number, ex))
        lane.waiting[message.number] = lane.owner.inline.calls[message.number] = call
        lane.user.waiting += 1
        return execute, None

    def answer(self, lane: Lane, answer: Answer, send: Callable[[Lane, bytes], None]) -> bool:
        """Convert and send an answer. Then count the request, if the answer is final, and release
        the output slots. Return False if the request was abandoned."""
        number, waiting, is_final = answer.request, lane.waiting, answer.final
        call = waiting.pop(number, None) if is_final else waiting.get(number)
        try:
            if call is None:
                return False
            reply = lane_gate.answered(answer, call, self._memory.read)
            data, now_ns = lane_gate.encoded(reply), time.monotonic_ns()
            if is_final:
                self._counting.sending(call)
                send(lane, data)
                self._counting.answered(call, reply, now_ns)
                lane.user.waiting -= 1
            else:
                self._counting.add(call, reply)
                call.moved(now_ns)
                send(lane, data)
            return True
        finally:
            if is_final:
                lane.owner.inline.calls.pop(number, None)
            if lane.owner.held:
                lane.owner.give_back(leases(answer.outputs), self._memory)
