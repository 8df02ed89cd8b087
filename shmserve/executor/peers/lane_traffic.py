"""Lane traffic: reads messages of lanes, sends answers, and closes lanes.

`LanePeers` checks and translates the messages. A lane is closed if the caller breaks the protocol,
or does not take answers within `send_timeout_s`. Other lanes notice nothing.
"""

import select
import time

from shmserve.errors import PeerDied, ProtocolViolation
from shmserve.executor.peers.frontend_connections import Peers
from shmserve.executor.peers.lane import Lane
from shmserve.executor.peers.lane_peers import LanePeers
from shmserve.protocol.control.data_messages import Answer
from shmserve.protocol.control.link_messages import LaneOffered


class LaneTraffic:
    """The lanes among an executor's connections. For the thread that uses the channels. `stalled`:
    lanes whose callers do not take answers."""

    def __init__(self, peers: LanePeers, connections: Peers) -> None:
        self.stalled: set[Lane] = set()
        self._peers = peers
        self._connections = connections
        self._epoll = connections.epoll

    # ------------------------------------------------------------- beginning and end

    def let_in(self, message: LaneOffered, fd: int, closed: bool) -> None:
        """Admit an offered lane, unless the executor is closed or has too many lanes."""
        lane = self._peers.admit(message, fd, closed)
        if lane is not None:
            self._connections.by_fd[lane.fd] = lane
            self._epoll.register(lane.fd, lane.mask)

    def leave_all(self) -> None:
        """Take no more requests of lanes than have been sent."""
        for connection in list(self._connections.by_fd.values()):
            if isinstance(connection, Lane):
                self._leave(connection)

    def _leave(self, lane: Lane) -> None:
        """Refuse a lane once no stream needs further credit. The last answer ends the lane."""
        lane.leaving = True
        streams_wait = lane.decoupled and lane.waiting  # need credit messages
        if not (streams_wait or lane.refusing):
            lane.refuse(self._epoll)
            self.read(lane)

    def _end_refused(self, lane: Lane) -> None:
        if not lane.waiting and not lane.backlog:
            self.close(lane)

    def close(self, lane: Lane) -> None:
        """Close a lane and forget the lane's requests."""
        if self._connections.close(lane):
            self.stalled.discard(lane)
            self._peers.ended(lane)

    def close_overdue(self) -> None:
        """Close the lanes whose callers have not taken answers within `send_timeout_s`."""
        for lane in self._peers.overdue(self.stalled):
            self.close(lane)

    # ------------------------------------------------------------- messages

    def read(self, lane: Lane) -> None:
        """Read one message, so that every lane has a turn. Read all messages of a refused lane."""
        channel, behind = lane.channel, True
        try:
            while behind:
                if channel.room and channel.brings_too_many():
                    raise ProtocolViolation("descriptors on a lane")
                received = channel.receive_within(0.0, channel.room)
                if received is None:
                    break
                message, refusal = self._peers.take_in(lane, *received)
                if message is not None:
                    self._connections.events.append((lane, message))
                if refusal is not None:
                    self._send(lane, refusal)
                behind = lane.refusing and not lane.closed
            if lane.mask != select.EPOLLIN or not lane.reads:
                lane.watch(self._epoll)
        except PeerDied:
            if lane.refusing:  # all messages have been read
                self._end_refused(lane)
            else:
                self.close(lane)
        except ProtocolViolation:  # not logged: a stranger could fill the log
            self._peers.violated(lane)
            self.close(lane)

    def answer(self, lane: Lane, answer: Answer) -> None:
        """Send an answer, unless the request was abandoned."""
        if not self._peers.answer(lane, answer, self._send):
            return
        if lane.refusing:
            self._end_refused(lane)
        elif lane.leaving and not lane.closed:
            self._leave(lane)

    def _send(self, lane: Lane, data: bytes) -> None:
        try:
            if lane.backlog or not lane.channel.send(data, wait=False):
                lane.keep(self._epoll, data, [])
                lane.stalled_at = lane.stalled_at or time.monotonic()
                self.stalled.add(lane)
            elif lane.mask != select.EPOLLIN:
                lane.watch(self._epoll)
        except PeerDied:
            self.close(lane)

    def backlog_sent(self, lane: Lane) -> None:
        """Note that all answers of a lane have been taken."""
        self.stalled.discard(lane)
        if lane.refusing:
            self._end_refused(lane)
