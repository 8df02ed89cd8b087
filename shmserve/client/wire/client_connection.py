"""The client socket as the client sees it: one connection, one question at a time.

A coordinator that is restarted drops the connection; it is made again and the question
asked again, which is harmless: to register the same memory twice is no error.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
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
_RETRY_S = 3.0  # a restarted coordinator is back by then
_PAUSE_S = 0.05


class ControlConnection:
    """The connection, and what is asked over it. Thread-safe.

    Attributes:
        has_lanes: the server knows of lanes.
    """

    def __init__(self, path: str) -> None:
        """Connect.

        Raises:
            PeerDied: nobody listens there, or somebody of another version.
        """
        self._path = path
        self.has_lanes = False
        self._lock = threading.Lock()
        self._patience_s = _RETRY_S  # none while nobody is there, so that nobody waits each time
        self._channel: Channel | None = self._connect(inf)

    def register(self, name: str, byte_size: int, fd: int) -> None:
        """Register a sealed memfd from its start.

        Raises:
            ShmserveError: it was refused, or nobody is there.
        """
        self._ask(wire.RegisterMemfd(name, 0, byte_size), [fd])

    def unregister(self, names: Sequence[str]) -> None:
        """Remove regions; raises as `register`."""
        for start in range(0, len(names), 512):
            self._ask(wire.Unregister(tuple(names[start : start + 512])))

    def open_lane(
        self, model: str, version: str, within_s: float
    ) -> tuple[wire.LaneOpened, Channel]:
        """A channel to an executor of a model; raises as `register`, but at once."""
        if not self.has_lanes:
            raise Unimplemented("the server has no lanes")
        reply, fds = self._ask(wire.OpenLane(model, version), (), wire.LaneOpened, within_s)
        if len(fds) != 1 or not isinstance(reply, wire.LaneOpened):
            close_all(fds)
            raise PeerDied("the server gave no lane")
        return reply, Channel(socket.socket(fileno=fds[0]))

    def close(self) -> None:
        """End the connection; what was registered stays until its process ends."""
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
        """The reply, and what rides along; raises as `register`."""
        end = time.monotonic() + within_s
        if not self._lock.acquire(timeout=min(within_s, threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("others are still asking the server")
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
            raise from_code(Code(reply.code), reply.text)
        if not isinstance(reply, expected):
            close_all(received)
            raise PeerDied("the server gave no proper reply")
        return reply, received

    def _connect(self, end: float) -> Channel:
        channel = Channel.connect(self._path, _left_s(end))
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
    """Ask; the reply, and the descriptors of one that has any."""
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
