"""The lanes of an executor: let in, read, answered, ended; all in the loop's thread.

Strangers are at the other ends, so: nothing is believed (`lane_gate`), one message of a lane is
read in each turn, none while too many of its requests or answers wait, and one that does not take
its answers, or sends what is no message, is closed, alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections import Counter, deque
from collections.abc import Callable

from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.control.lane_rules import most_of_one, most_requests
from shmserve.core.regions.region_book import Caller
from shmserve.errors import PeerDied, ProtocolViolation, QueueFull, ShmserveError, Unavailable
from shmserve.executor.lanes import lane_gate
from shmserve.executor.lanes.lane import Lane, LoopSide
from shmserve.executor.lanes.lane_counting import LaneCounting
from shmserve.executor.lanes.lane_gate import LaneGate
from shmserve.observe import flight_recorder
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.data_messages import Answer, Cancel, Credit, leases
from shmserve.protocol.control.link_messages import LaneOffered, LanesOpen
from shmserve.shm.arena import ArenaMemory
from shmserve.transport.channel import Channel, message_buffer

log = logging.getLogger(__name__)


class LaneChannels:
    """`tell` sends to the coordinator. Any thread: `offer`, `move`, `welcomed`; else the loop's.

    Attributes:
        stalled: lanes that do not take their answers; then `turn` is to be called now and then.
    """

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
        self._most = most_requests(settings, gate.spec.decoupled)
        self._tell = tell
        self._loop: LoopSide
        self._lanes: dict[int, Lane] = {}  # by descriptor
        self.stalled: set[Lane] = set()
        self._waiting: dict[int, int] = {}  # requests by user
        self._inbox: deque[Callable[[], None]] = deque()
        self._buffer = message_buffer()
        self._closed = False

    def attach(self, loop: LoopSide) -> None:
        """Before everything else."""
        self._loop = loop

    @property
    def settled(self) -> bool:
        """Whether every answer has gone."""
        return not self.stalled

    # ------------------------------------------------------- from the link's thread

    def offer(self, message: LaneOffered, fd: int) -> None:
        """A lane comes; the descriptor is ours."""
        self._later(lambda: self._accept(message, fd))

    def move(self) -> None:
        """Take no more requests than have been sent: others serve them from now on."""
        self._later(self._refuse)

    def welcomed(self) -> None:
        """A coordinator does not know of the lanes and of what they count."""
        self._later(self._introduce)

    def _later(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._loop.wake()

    # -------------------------------------------------------------- in the loop's turn

    def turn(self) -> None:
        """Do what other threads want done, and give up those who take no answers."""
        while self._inbox:
            self._inbox.popleft()()
        until = time.monotonic() - self._settings.send_timeout_s
        for lane in [lane for lane in self.stalled if lane.stalled_at <= until]:
            self.close_lane(lane)

    def ready(self, fd: int, mask: int) -> bool:
        """Something has happened to one of these descriptors; False: it is no lane's."""
        lane = self._lanes.get(fd)
        if lane is None:
            return False
        if mask & select.EPOLLOUT:
            self._send_backlog(lane)
        if lane.refusing:  # all has been read; what says otherwise is from before
            if mask & select.EPOLLHUP:
                self.close_lane(lane)
        elif mask & ~select.EPOLLOUT and not lane.closed:
            try:
                self._read(lane)
            except PeerDied:
                self.close_lane(lane)
            except ProtocolViolation:
                self._violated(lane)
        return True

    def end_late(self) -> None:
        """Cancel streams that take too long; other requests are late in the queue or not at all.
        To be called now and then while there are any."""
        now_ns = time.monotonic_ns()
        for lane in self._lanes.values():
            for number, call in lane.waiting.items():
                if call.credit and not call.late and call.deadline_ns <= now_ns:
                    call.late = True
                    self._loop.events((lane, Cancel(number)))

    def send(self, lane: Lane, answer: Answer) -> None:
        """Answer a request, which ends with its final answer, and give the output slots back."""
        number, waiting = answer.request, lane.waiting
        call = waiting.pop(number, None) if answer.final else waiting.get(number)
        try:
            if call is not None:
                reply = lane_gate.answered(answer, call, self._memory.read)
                self._counting.answered(call, reply)
                if answer.final:
                    self._count(lane, -1)
                else:
                    call.moved(time.monotonic_ns())
                self._send(lane, reply)
                if lane.refusing:
                    self._end_refused(lane)
                elif lane.leaving and not lane.closed:
                    self._shut(lane)
        finally:
            if answer.final:
                lane.inline.calls.pop(number, None)
            if answer.outputs:
                lane.owner.give_back(leases(answer.outputs), self._memory)

    def refuse(self) -> None:
        """As `Channels.refuse`; lanes end with their last answers."""
        self.turn()
        self._closed = True
        self._refuse()

    def _refuse(self) -> None:
        for lane in list(self._lanes.values()):
            lane.leaving = True
            self._shut(lane)

    def _shut(self, lane: Lane) -> None:
        """No further message comes in on it, once no stream needs any."""
        if self._gate.spec.decoupled and lane.waiting:
            return
        lane.refusing = True
        lane.channel.refuse()
        self._watch(lane)
        try:
            while self._read(lane):
                continue
        except PeerDied:  # all has been read
            self._end_refused(lane)
        except ProtocolViolation:
            self._violated(lane)

    def _violated(self, lane: Lane) -> None:
        """Something came on it that is no message, or not now."""
        flight_recorder.record("lane violated", f"uid {lane.caller.uid}", self._gate.spec.name)
        self.close_lane(lane)

    def close_lane(self, lane: Lane) -> None:
        """It is over: what it asked for is not wanted any more."""
        if lane.closed:
            return
        lane.closed = True
        self._loop.epoll.unregister(lane.fd)
        del self._lanes[lane.fd]
        self.stalled.discard(lane)
        lane.channel.close()
        lane.backlog.clear()
        for call in lane.waiting.values():
            self._counting.lost(call)
        lane.running &= lane.waiting.keys()  # the model may go on with them: they still count
        self._count(lane, len(lane.running) - len(lane.waiting))
        lane.waiting.clear()
        self._loop.events((lane, None))
        self._tell(LanesOpen((lane.caller.uid,), ended=True))

    def stream_ended(self, lane: Lane, number: int) -> None:
        """The model has sent all of a stream's answers."""
        if number in lane.running:
            lane.running.remove(number)
            if lane.closed:
                self._count(lane, -1)

    def close(self) -> None:
        """End all of them."""
        self._closed = True
        self.turn()
        for lane in list(self._lanes.values()):
            self.close_lane(lane)
        self._counting.close()

    # ------------------------------------------------------------------------ inside

    def _owners(self) -> Counter[int]:
        return Counter(lane.caller.uid for lane in self._lanes.values())

    def _introduce(self) -> None:
        with contextlib.suppress(OSError):  # no descriptor is left: with the next lane
            self._counting.announce()
        self._tell(LanesOpen(tuple(self._owners().elements())))

    def _accept(self, message: LaneOffered, fd: int) -> None:
        """Let it in, within bounds: the coordinator, which keeps to them, may have lost count."""
        owners = self._owners()
        most, uid = self._settings.max_lanes, message.uid
        full = owners.total() >= most or owners[uid] >= most_of_one(self._settings)
        if full or self._closed or not self._counts():
            os.close(fd)
            self._tell(LanesOpen((uid,), ended=True))
            return
        caller = Caller(uid, message.pid, message.started)
        lane = Lane(Channel(socket.socket(fileno=fd), self._buffer), caller)
        lane.mask = select.EPOLLIN
        self._lanes[lane.fd] = lane
        self._loop.epoll.register(lane.fd, lane.mask)

    def _counts(self) -> bool:
        try:
            self._counting.open()
        except OSError as ex:
            log.error("lane not taken error=%s", ex)
            return False
        return True

    def _read(self, lane: Lane) -> bool:
        """Take in one message, if one is there.

        Raises:
            PeerDied: nobody is at the other end.
            ProtocolViolation: it is no message of ours; descriptors come with none.
        """
        received = lane.channel.receive_within(0.0, 0)
        if received is None:
            return False
        message: wire.ToLane = wire.decode_to_lane(received[0])
        if isinstance(message, wire.LaneCancel):
            if message.number in lane.waiting:
                self._loop.events((lane, Cancel(message.number)))
        elif isinstance(message, wire.LaneCredit):
            self._credit(lane, message)
        elif message.number in lane.waiting or message.number in lane.inline.calls:
            raise ProtocolViolation("two requests of one number")
        else:
            self._begin(lane, message)
        return True

    def _credit(self, lane: Lane, message: wire.LaneCredit) -> None:
        call = lane.waiting.get(message.number)
        if message.answers < 1:  # would keep a stream that stands still from looking so
            raise ProtocolViolation("credit for no answer")
        if call is not None and call.credit:
            call.moved(time.monotonic_ns())
            self._loop.events((lane, Credit(message.number, message.answers)))

    def _begin(self, lane: Lane, message: wire.LaneRequest) -> None:
        caller, decoupled = lane.caller, self._gate.spec.decoupled
        if decoupled and lane.leaving:  # nobody could give it credit any more
            reply = lane_gate.refused(message.number, Unavailable("the lane is about to end"))
            self._send(lane, replace(reply, moved=True))
            return
        try:
            if self._waiting.get(caller.uid, 0) >= self._most:
                why = "max_queue, max_streams, max_caller_share" if decoupled else "max_queue"
                raise QueueFull(f"{self._most} requests of this user wait already ({why})")
            if lane.credit and lane.credit + message.credit > wire.READ_AHEAD:
                raise QueueFull(
                    f"credit: {message.credit} and that of this lane's other streams are more than"
                    f" {wire.READ_AHEAD}"
                )
            execute, call = self._gate.admit(caller, message, time.monotonic_ns())
        except ShmserveError as ex:
            self._counting.refused(ex)
            self._send(lane, lane_gate.refused(message.number, ex))
            return
        lane.waiting[message.number] = lane.inline.calls[message.number] = call
        self._count(lane, 1)
        self._loop.events((lane, execute))
        if len(lane.waiting) >= wire.READ_AHEAD:
            self._watch(lane)

    def _count(self, lane: Lane, change: int) -> None:
        uid = lane.caller.uid
        waiting = self._waiting.get(uid, 0) + change
        if waiting:
            self._waiting[uid] = waiting
        else:
            self._waiting.pop(uid, None)

    def _end_refused(self, lane: Lane) -> None:
        if not lane.waiting and not lane.backlog:
            self.close_lane(lane)

    def _send(self, lane: Lane, reply: wire.LaneAnswer) -> None:
        data = lane_gate.encoded(reply)
        try:
            if not lane.backlog and lane.channel.send(data, wait=False):
                if lane.mask != select.EPOLLIN:
                    self._watch(lane)
                return
        except PeerDied:
            self.close_lane(lane)
            return
        lane.backlog.append((data, []))
        if not lane.stalled_at:
            lane.stalled_at = time.monotonic()
            self.stalled.add(lane)
        self._watch(lane)

    def _send_backlog(self, lane: Lane) -> None:
        try:
            while lane.backlog and lane.channel.send(lane.backlog[0][0], wait=False):
                lane.backlog.popleft()
                if not lane.refusing:  # the last answers share one limit
                    lane.stalled_at = time.monotonic()
        except PeerDied:
            self.close_lane(lane)
            return
        if not lane.backlog:
            lane.stalled_at = 0.0
            self.stalled.discard(lane)
            if lane.refusing:
                self._end_refused(lane)
                return
        self._watch(lane)

    def _watch(self, lane: Lane) -> None:
        """Look for what is of use now: no further request before there is room for its answer.
        Streams, which have room of their own, need what comes."""
        mask = select.EPOLLOUT if lane.backlog else 0
        full = len(lane.waiting) >= wire.READ_AHEAD and not self._gate.spec.decoupled
        if not (lane.backlog or lane.refusing or full):
            mask = select.EPOLLIN
        if mask != lane.mask and not lane.closed:
            self._loop.epoll.modify(lane.fd, mask)
            lane.mask = mask
