"""Links of the coordinator: connected processes and their messages."""

from __future__ import annotations

import logging
import re
import selectors
import socket
import time

from shmserve.coordinator import process_connections
from shmserve.coordinator.message_router import MessageRouter
from shmserve.coordinator.process_connections import ProcessConnection
from shmserve.errors import PeerDied, ProtocolViolation, UnreadableMessage
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Hello, Welcome
from shmserve.protocol.control.messages import FromCoordinator, ToCoordinator
from shmserve.transport.channel import close_all, message_buffer

_log = logging.getLogger(__name__)

ROLES = (
    *("http", "grpc", "model", "executor", "supervisor"),
    *("exporter", "fetcher", "successor", "cli"),
)
_PROCESS = re.compile(r"[a-z][a-z0-9-]{0,63}")


class Links:
    """Connections, at most one per process. The selector's data is the `ProcessConnection`."""

    def __init__(self, selector: selectors.BaseSelector, welcome: Welcome) -> None:
        self._selector = selector
        self._welcome = welcome
        self._connections: dict[str, ProcessConnection] = {}
        self._doomed: list[ProcessConnection] = []
        self._buffer = message_buffer()

    def accept(self, listener: socket.socket) -> None:
        connection = process_connections.accept(listener, self._buffer)
        if connection is not None:
            self._selector.register(connection.sock, selectors.EVENT_READ, connection)

    def ready(self, connection: ProcessConnection, ready: int, router: MessageRouter) -> None:
        """Read from a connection, and write to a connection with queued messages."""
        try:
            if ready & selectors.EVENT_READ:  # first, because last words of an ended process count
                for data, fds in connection.receive():
                    try:
                        message = messages.decode_to_coordinator(data)
                    except UnreadableMessage:
                        close_all(fds)
                        raise
                    self._received(connection, message, fds, router)
            if ready & selectors.EVENT_WRITE:
                connection.flush()
                self._watch(connection)
        except PeerDied:
            self._doomed.append(connection)
        except ProtocolViolation as ex:
            self._close(connection, str(ex))

    def _received(
        self,
        connection: ProcessConnection,
        message: ToCoordinator,
        fds: list[int],
        router: MessageRouter,
    ) -> None:
        now = time.monotonic()
        if connection.process:
            router.handle(connection.process, connection.role, message, fds, now)
            return
        close_all(fds)
        if not isinstance(message, Hello):
            raise ProtocolViolation("the first message is not a hello")
        if message.role not in ROLES or not _PROCESS.fullmatch(message.process):
            raise ProtocolViolation("a hello of an unknown role or with a bad process id")
        connection.send(self._welcome)
        if message.version != messages.VERSION:
            raise ProtocolViolation(f"it speaks version {message.version}")
        earlier = self._connections.get(message.process)
        # the process reconnected before we noticed the old connection's end
        if earlier is not None:
            earlier.greeted("", "")
            self._doomed.append(earlier)
        connection.greeted(message.process, message.role)
        self._connections[message.process] = connection
        _record_http_worker("process connected", connection)
        router.hello(message, connection.pid or message.pid, now)

    def send(self, process: str, message: FromCoordinator, fds: tuple[int, ...] = ()) -> None:
        """Send to a process, if connected. Never blocks, never fails.

        A dead peer's connection stays open here, because unread messages may say why the process
        ended.
        """
        connection = self._connections.get(process)
        if connection is None:
            return
        try:
            connection.send(message, fds)
            self._watch(connection)
        except PeerDied:
            return
        except ProtocolViolation as ex:
            self._close(connection, str(ex))

    def _watch(self, connection: ProcessConnection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.backlogged else 0)
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _close(self, connection: ProcessConnection, reason: str) -> None:
        process = connection.process or "unknown"
        _log.warning(
            "link closed", extra=log_fields(process=process, pid=connection.pid, reason=reason)
        )
        self._doomed.append(connection)

    def bury(self, router: MessageRouter) -> None:
        """Close doomed connections. Closing a connection may doom further connections, so repeat
        until none is left."""
        while self._doomed:
            connection = self._doomed.pop()
            if connection.sock.fileno() < 0:
                continue
            self._selector.unregister(connection.sock)
            connection.close()
            if connection.process:
                self._connections.pop(connection.process, None)
                _record_http_worker("process gone", connection)
                router.gone(connection.process, time.monotonic())


def _record_http_worker(kind: str, connection: ProcessConnection) -> None:
    """Record HTTP workers, whose starts and ends the supervisor does not see. The supervisor
    records all other processes."""
    if connection.role == "http":
        flight_recorder.record(kind, connection.process, f"pid {connection.pid}")
