"""The coordinator's links: who is connected, and what each has sent."""

from __future__ import annotations

import logging
import re
import selectors
import socket
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from shmserve.coordinator import connections as peers
from shmserve.coordinator.connections import Peer
from shmserve.errors import PeerDied, ProtocolViolation
from shmserve.protocol import messages
from shmserve.protocol.control.link_messages import Hello, Welcome
from shmserve.protocol.messages import FromCoordinator, ToCoordinator
from shmserve.transport.channel import MAX_MESSAGE
from shmserve.transport.questions import close_all

_log = logging.getLogger(__name__)

ROLES = ("http", "grpc", "executor", "supervisor", "cli")
_PROCESS = re.compile(r"[a-z][a-z0-9-]{0,63}")


class Listens(Protocol):
    """Who is told of it all: `desk.Desk`."""

    def hello(self, message: Hello, pid: int, now: float) -> None: ...

    def handle(
        self, process: str, role: str, message: ToCoordinator, fds: list[int], now: float
    ) -> None: ...

    def gone(self, process: str, now: float) -> None: ...


class Links:
    """One connection a process; the selector's data is its `Peer`."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        welcome: Callable[[], Welcome],
        desk: Callable[[], Listens],
    ) -> None:
        self._selector = selector
        self._welcome = welcome
        self._desk = desk
        self._peers: dict[str, Peer] = {}
        self._doomed: list[Peer] = []
        self._buffer = memoryview(bytearray(MAX_MESSAGE))

    def accept(self, listener: socket.socket) -> None:
        """Take the next connection, if it is of our own user."""
        peer = peers.accept(
            listener, lambda uid: _log.warning("refused a peer of another user %d", uid)
        )
        if peer is not None:
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)

    def ready(self, peer: Peer, ready: int) -> None:
        """A connection can be read, or written if messages wait."""
        try:
            if ready & selectors.EVENT_READ:  # first: of one that has ended the last words count
                for data, fds in peer.receive(self._buffer):
                    try:
                        message = messages.decode_to_coordinator(data)
                    except msgspec.DecodeError:
                        close_all(fds)
                        raise
                    self._received(peer, message, fds)
            if ready & selectors.EVENT_WRITE:
                peer.flush()
                self._watch(peer)
        except PeerDied:
            self._doomed.append(peer)
        except (ProtocolViolation, msgspec.DecodeError) as ex:
            self._close(peer, str(ex))

    def _received(self, peer: Peer, message: ToCoordinator, fds: list[int]) -> None:
        now = time.monotonic()
        if peer.process:
            self._desk().handle(peer.process, peer.role, message, fds, now)
            return
        close_all(fds)
        if not isinstance(message, Hello):
            raise ProtocolViolation("the first message is not a hello")
        if message.role not in ROLES or not _PROCESS.fullmatch(message.process):
            raise ProtocolViolation("a hello of an unknown role or with a bad process id")
        peer.send(self._welcome())
        if message.version != messages.VERSION:
            raise ProtocolViolation(f"it speaks version {message.version}")
        earlier = self._peers.get(message.process)
        if earlier is not None:  # its process reconnected before we saw the old one end
            earlier.process = ""
            self._doomed.append(earlier)
        peer.process, peer.role = message.process, message.role
        self._peers[peer.process] = peer
        self._desk().hello(message, peer.pid or message.pid, now)

    def send(self, process: str, message: FromCoordinator, fds: tuple[int, ...] = ()) -> None:
        """To a process, if it is there; never blocks, never fails.

        One that has ended is not buried here: why may be among what it has sent.
        """
        peer = self._peers.get(process)
        if peer is None:
            return
        try:
            peer.send(message, fds)
            self._watch(peer)
        except PeerDied:
            return
        except ProtocolViolation as ex:
            self._close(peer, str(ex))

    def _watch(self, peer: Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.backlogged else 0)
        if self._selector.get_key(peer.sock).events != events:
            self._selector.modify(peer.sock, events, peer)

    def _close(self, peer: Peer, why: str) -> None:
        _log.warning(
            "link closed process=%s pid=%d reason=%s", peer.process or "unknown", peer.pid, why
        )
        self._doomed.append(peer)

    def bury(self) -> None:
        """Close what must be closed; deciding about one may doom another."""
        while self._doomed:
            peer = self._doomed.pop()
            if peer.sock.fileno() < 0:
                continue
            self._selector.unregister(peer.sock)
            peer.close()
            if peer.process:
                self._peers.pop(peer.process, None)
                self._desk().gone(peer.process, time.monotonic())
