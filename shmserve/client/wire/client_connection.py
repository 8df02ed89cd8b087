"""Client side of the client socket: one connection, one question at a time.

A restarted coordinator drops the connection. The client then connects and asks again, which is
harmless: registering the same memory twice is no error.
"""

import socket
import threading
import time
from collections.abc import Sequence, Set
from math import inf

from shmserve.errors import (
    Code,
    DeadlineExceeded,
    PeerDied,
    ShmserveError,
    Unimplemented,
    UnreadableMessage,
    from_code,
)
from shmserve.protocol.control import client_messages as wire
from shmserve.transport.channel import Channel, close_all

_ANSWER_S = 5.0
_RETRY_S = 3.0  # seconds that a coordinator's restart may take
_PAUSE_S = 0.05


class ControlConnection:
    """Connection to the client socket, and the questions asked there. Thread-safe. `has_lanes`:
    True if the server offers lanes."""

    def __init__(self, path: str, owners: Set[int] | None = None) -> None:
        """Connect. `owners`: uids of users one of whom must serve the socket; None: any user.
        Raise PeerDied if no server listens there, another user does, or its protocol version
        differs."""
        self._path = path
        self._owners = owners
        self.has_lanes = False
        self._lock = threading.Lock()
        # seconds to retry a question; 0 from a failed request for a lane until the server answers
        # again, so that calls do not wait for an absent server
        self._patience_s = _RETRY_S
        self._channel: Channel | None = self._connect(inf)

    def register(self, name: str, byte_size: int, fd: int) -> None:
        """Register a sealed memfd from offset 0. Raise ShmserveError if the server refused or does
        not answer."""
        self._ask(wire.RegisterMemfd(name, 0, byte_size), [fd])

    def unregister(self, names: Sequence[str]) -> None:
        """Unregister regions; raises as `register`."""
        for start in range(0, len(names), 512):
            self._ask(wire.Unregister(tuple(names[start : start + 512])))

    def open_lane(
        self, model: str, version: str, within_s: float
    ) -> tuple[wire.LaneOpened, Channel]:
        """Return a new channel to a model's executor. Raises as `register`, without retries."""
        if not self.has_lanes:
            raise Unimplemented("the server has no lanes")
        reply, fds = self._ask(wire.OpenLane(model, version), (), wire.LaneOpened, within_s)
        if len(fds) != 1 or not isinstance(reply, wire.LaneOpened):
            close_all(fds)
            raise PeerDied("the server gave no lane")
        try:
            sock = socket.socket(fileno=fds[0])
        except OSError:
            close_all(fds)
            raise PeerDied("the server gave something else than a lane") from None
        return reply, Channel(sock)

    def close(self) -> None:
        """Close the connection; registered memory stays registered until this process ends."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def _ask(
        self,
        message: wire.ToServer,
        fds: Sequence[int] = (),
        expected: type[wire.FromServer] = wire.Ok,
        within_s: float = inf,
    ) -> tuple[wire.FromServer, list[int]]:
        """Send a question and return the reply with its descriptors; raises as `register`."""
        end = time.monotonic() + within_s
        if not self._lock.acquire(timeout=min(within_s, threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("other threads are still asking the server")
        try:
            patience_s = 0.0 if expected is wire.LaneOpened else self._patience_s
            until = time.monotonic() + patience_s
            while True:
                try:
                    if self._channel is None:
                        self._channel = self._connect(end)
                    reply, received = _converse(self._channel, message, fds, end)
                    self._patience_s = _RETRY_S
                    break
                except (PeerDied, DeadlineExceeded):
                    if self._channel is not None:
                        self._channel.close()
                        self._channel = None
                    if time.monotonic() >= until:
                        self._patience_s = min(self._patience_s, patience_s)
                        raise
                    time.sleep(_PAUSE_S)
        finally:
            self._lock.release()
        if isinstance(reply, wire.Failed):
            # a newer server may have further codes
            raise from_code(Code.__members__.get(reply.code, Code.UNKNOWN), reply.text)
        if not isinstance(reply, expected):
            close_all(received)
            raise PeerDied("the server's reply is not the expected one")
        return reply, received

    def _connect(self, end: float) -> Channel:
        channel = Channel.connect(self._path, _left_s(end))
        if self._owners is not None and channel.peer_uid not in self._owners:
            channel.close()
            raise PeerDied(f"another user (uid {channel.peer_uid}) listens there")
        try:
            hello, _ = _converse(channel, wire.ClientHello(wire.VERSION), (), end)
        except ShmserveError:
            channel.close()
            raise
        if not isinstance(hello, wire.ServerHello) or hello.version != wire.VERSION:
            channel.close()
            raise PeerDied("the server speaks another version")
        self.has_lanes = hello.lanes
        return channel


def _left_s(end: float) -> float:
    return max(0.001, min(_ANSWER_S, end - time.monotonic()))


def _converse(
    channel: Channel, message: wire.ToServer, fds: Sequence[int], end: float
) -> tuple[wire.FromServer, list[int]]:
    """Send a question and return the reply. Only a LaneOpened reply keeps its descriptors."""
    channel.send(wire.encode(message), fds)
    data, received = channel.receive(_left_s(end))
    try:
        reply: wire.FromServer = wire.decode_from_server(data)
    except UnreadableMessage:
        close_all(received)
        raise PeerDied("the server's reply is malformed") from None
    if not isinstance(reply, wire.LaneOpened):
        close_all(received)
        received = []
    return reply, received
