"""Client socket: local programs pass sealed memory instead of naming shared-memory objects.

Permissions are decided as for all callers (`core.regions.region_book`); SO_PEERCRED identifies the
caller. Peers are not trusted. So each connection gets one request per turn and is not read while a
reply is unsent. Connections are bounded, hellos and replies have deadlines, and a peer that breaks
the protocol is closed, without effect on other peers. Replies are sent after the change is
published (`settle`).

A program passes a memfd sealed against shrinking and growing, so the program cannot truncate the
memory (`Region.sealed`). Huge pages are refused: hugetlbfs may have no page left for a punched
hole.

The coordinator's only thread neither calls `fstat` on a descriptor nor closes it before the
descriptor is known to be memory: both calls can wait for the peer (`transport.deferred_close`). For
the same reason another thread closes connections that may have unread descriptors. A connection
counts against the user's limit until the connection is closed. Before Linux 6.16 a refused
connection may have to wait as well. While too many wait, the listener rests; else the coordinator
would run out of descriptors.
"""

import errno
import logging
import os
import selectors
import socket
import stat
import time

from shmserve import errors
from shmserve.config import Settings
from shmserve.coordinator.programs.lane_desk import LaneDesk
from shmserve.coordinator.programs.program_connection import (
    PATIENCE_S,
    ClientConnection,
    ProgramUser,
)
from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.core.access import Access
from shmserve.core.caller import Caller
from shmserve.core.region_kinds import SYSTEM
from shmserve.core.regions.region_book import visible
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.protocol.control import client_messages as wire
from shmserve.shm import passed_memory
from shmserve.transport import rundir
from shmserve.transport.channel import listen
from shmserve.transport.deferred_close import DeferredClose
from shmserve.transport.stranger_channel import pass_descriptors
from shmserve.transport.trust import peer_credentials

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
_MAX_PER_USER = 64
_MAX_OPEN = 2 * _MAX_CONNECTIONS  # sockets, those included that wait to be closed
_MAX_MESSAGE = 64 * 1024
_PAGE = 128  # most regions in one reply


class ClientSocket:
    """Listener and connections. The selector's data is the `ClientSocket` for the listener and a
    `ClientConnection` for a connection."""

    def __init__(
        self,
        settings: Settings,
        regions: RegionRegistrations,
        lanes: LaneDesk,
        selector: selectors.BaseSelector,
    ) -> None:
        self._settings = settings
        self._access = Access(settings, os.geteuid())
        self._regions = regions
        self._lanes = lanes
        self._selector = selector
        self._path = rundir.client_socket(settings)
        self._connections: set[ClientConnection] = set()
        self._users: dict[int, ProgramUser] = {}
        self._unsent: list[ClientConnection] = []
        self._buffer = memoryview(bytearray(_MAX_MESSAGE))
        self._listener: socket.socket | None = None
        self._resting = False  # the listener accepts nothing
        self._given_up = settings.client_shm_mode == "off"

    def serve(self, serving: bool) -> None:
        """Listen while this generation serves. Afterwards close all connections, so clients
        reconnect to the next generation."""
        if serving and self._listener is None and not self._given_up:
            self._open()
        elif not serving and self._listener is not None:
            self._selector.unregister(self._listener)
            # Connections that nobody has accepted may have unread descriptors.
            DeferredClose().close_socket(self._listener)
            self._listener = None
            for connection in list(self._connections):
                self._end(connection)

    def _open(self) -> None:
        """Listen at the path. A path that cannot be used disables this socket, not the service."""
        try:
            listener = _listen(self._path, bool(self._settings.client_socket))
        except OSError as ex:
            _log.error("client_socket cannot be used", extra=log_fields(path=self._path, error=ex))
            self._given_up = True
            return
        self._selector.register(listener, selectors.EVENT_READ, self)
        self._listener = listener

    def close(self) -> None:
        """Remove the socket's name. The loop closes open sockets along with all others of the
        selector."""
        if self._listener is not None:
            try:
                os.unlink(self._path)
            except OSError:
                pass

    # --------------------------------------------------------------------- events

    def accept(self, listener: socket.socket) -> None:
        """Accept the next connection, unless the limits are reached."""
        try:
            sock, _ = listener.accept()
        except OSError as ex:
            if ex.errno in (errno.EMFILE, errno.ENFILE):
                _log.error("no descriptors left for client connections")
            return
        caller = peer_credentials.caller_of(sock)
        uid, user = caller.uid, self._user(caller.uid)
        connection = ClientConnection(sock, caller, user, self._buffer, time.monotonic())
        if len(self._connections) >= _MAX_CONNECTIONS or user.connections >= _MAX_PER_USER:
            flight_recorder.record("limit reached", f"uid {uid}", "too many client connections")
            _log.warning("too many client connections", extra=log_fields(uid=uid))
            connection.channel.close()
        else:
            self._connections.add(connection)
            self._selector.register(sock, selectors.EVENT_READ, connection)
        user.add(sock)
        if self._crowded():
            _log.error("client connections wait to be closed", extra=log_fields(uid=uid))
            self._rest(listener, True)

    def _crowded(self) -> bool:
        return sum(user.connections for user in self._users.values()) >= _MAX_OPEN

    def _rest(self, listener: socket.socket, resting: bool) -> None:
        # A listener is never writable.
        events = selectors.EVENT_WRITE if resting else selectors.EVENT_READ
        self._selector.modify(listener, events, self)
        self._resting = resting

    def _user(self, uid: int) -> ProgramUser:
        if uid not in self._users:
            self._users = {known: user for known, user in self._users.items() if user.connections}
            self._users[uid] = ProgramUser()
        return self._users[uid]

    def ready(self, connection: ClientConnection, events: int) -> None:
        """Read a request, or go on writing an unsent reply."""
        if connection.reply:
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            return
        try:
            received = self._receive(connection)
            if received is not None:
                self._handle(connection, *received)
        except errors.PeerDied:
            self._end(connection)
        except errors.ProtocolViolation as ex:
            caller = connection.caller
            _log.info("client closed", extra=log_fields(uid=caller.uid, pid=caller.pid, reason=ex))
            self._end(connection)

    def settle(self, now: float) -> None:
        """Send the replies of this turn, and close connections past their deadlines. Accept
        connections again once fewer wait to be closed."""
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            if connection in self._connections:
                connection.deadline = now + PATIENCE_S
                self._send(connection)
        for connection in list(self._connections):
            if (connection.reply or not connection.greeted) and now >= connection.deadline:
                self._end(connection)
        if self._resting and self._listener is not None and not self._crowded():
            self._rest(self._listener, False)

    def _receive(self, connection: ClientConnection) -> tuple[wire.ToServer, list[int]] | None:
        received = connection.channel.receive_next()
        if received is None:
            return None
        data, fds = received
        try:
            message: wire.ToServer = wire.decode_to_server(data)
        except BaseException:
            connection.closer.close(fds)
            raise
        return message, fds

    def _handle(self, connection: ClientConnection, message: wire.ToServer, fds: list[int]) -> None:
        reply: wire.FromServer
        if isinstance(message, wire.RegisterMemfd) and connection.greeted:
            reply = self._register(connection, message, fds)
        else:
            connection.closer.close(fds)
            if isinstance(message, wire.ClientHello) == connection.greeted:
                raise errors.ProtocolViolation(f"{type(message).__name__} out of turn")
            if isinstance(message, wire.ClientHello):
                reply = connection.greet(message.version)
            elif isinstance(message, wire.OpenLane):
                reply = self._open_lane(connection, message)
            elif isinstance(message, wire.DescribeModel):
                reply = self._describe(connection.caller, message)
            elif (refusal := self._refusal(connection.caller)) is not None:
                reply = refusal
            elif isinstance(message, wire.Unregister):
                reply = self._unregister(connection.caller, message)
            elif isinstance(message, wire.ListRegions):
                reply = self._status(connection.caller, message)
            else:
                raise errors.ProtocolViolation("a registration before the hello")
        connection.reply = wire.encode(reply)  # sent at the end of the turn
        self._unsent.append(connection)

    def _register(
        self, connection: ClientConnection, message: wire.RegisterMemfd, fds: list[int]
    ) -> wire.FromServer:
        refused = self._refusal(connection.caller)
        if refused is not None:
            connection.closer.close(fds)
            return refused
        refusal = "exactly one descriptor must come with a registration"
        passed = None
        if len(fds) == 1:
            refusal, passed = passed_memory.REFUSAL, passed_memory.recognized(fds[0])
        if passed is None:
            connection.closer.close(fds)
            return wire.Failed(errors.Code.INVALID_ARGUMENT, refusal)
        try:
            try:
                passed.check(fds[0], message.name)
            except errors.InvalidArgument:
                os.close(fds[0])
                raise
            window = (message.name, message.offset, message.byte_size)
            self._regions.system.register_passed(connection.caller, *window, fds[0], passed.kind)
        except errors.ShmserveError as ex:
            return wire.Failed(ex.code, ex.message)
        return wire.Ok()

    def _refusal(self, caller: Caller) -> wire.Failed | None:
        """Return a refusal of requests that register, list or unregister memory, if the caller must
        present a key or a secret: no request on this socket carries one."""
        try:
            self._access.check_client_socket("register", caller, "shared-memory")
        except errors.ShmserveError as ex:
            return wire.Failed(ex.code, ex.message)
        return None

    def _open_lane(self, connection: ClientConnection, message: wire.OpenLane) -> wire.FromServer:
        try:
            self._access.check_client_socket("use", connection.caller, "inference")
            reply, connection.lane = self._lanes.open(connection.caller, message)
        except errors.ShmserveError as ex:
            flight_recorder.record("lane refused", _named(connection), ex.code)
            return wire.Failed(ex.code, ex.message)
        flight_recorder.record("lane opened", _named(connection), reply.instance)
        return reply

    def _describe(self, caller: Caller, message: wire.DescribeModel) -> wire.FromServer:
        try:
            self._access.check_client_socket("use", caller, "metadata")
            return self._lanes.describe(message)
        except errors.ShmserveError as ex:
            return wire.Failed(ex.code, ex.message)

    def _unregister(self, caller: Caller, message: wire.Unregister) -> wire.FromServer:
        book, now = self._regions.book, time.monotonic()
        if message.names:
            for name in filter(None, message.names):
                self._regions.forget(book.unregister(caller, name), now)
        elif caller.pid:
            self._regions.process_ended(caller.pid, caller.started, now)
        return wire.Ok()

    def _status(self, caller: Caller, message: wire.ListRegions) -> wire.FromServer:
        book = self._regions.book.regions
        own = visible(book, caller, self._settings, os.geteuid(), SYSTEM)
        regions = [region for region in own if region.name > message.after]
        page = tuple(wire.RegionInfo(r.name, r.key, r.offset, r.byte_size) for r in regions[:_PAGE])
        return wire.Ok(page, more=len(regions) > _PAGE)

    def _send(self, connection: ClientConnection) -> None:
        try:
            if not connection.send_reply():
                self._watch(connection, selectors.EVENT_WRITE)
                return
        except (errors.PeerDied, errors.TooLarge):
            self._end(connection)
            return
        if connection.ending:
            self._end(connection)
        else:
            self._watch(connection, selectors.EVENT_READ)

    def _watch(self, connection: ClientConnection, events: int) -> None:
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _end(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection.sock)
        connection.channel.close()
        if connection.lane is not None:
            connection.lane.close()


def _named(connection: ClientConnection) -> str:
    return f"uid {connection.caller.uid}"


def _listen(path: str, for_everybody: bool) -> socket.socket:
    """Return a listener. All users may connect if the operator chose the path; credentials decide
    what each may do."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(f"{path} exists and is not a socket")
    except FileNotFoundError:
        pass
    listener = listen(path)
    pass_descriptors(listener, False)  # before a connection's hello
    if for_everybody:
        os.chmod(path, 0o666)
    return listener
