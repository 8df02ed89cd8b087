"""The client socket: local programs pass sealed memory instead of naming objects.

Who may what is decided as for everybody (`core.regions.region_book`): SO_PEERCRED says who
calls. The peers are strangers, so: one request per connection and turn, no reading while a reply is
unsent, bounds on connections, deadlines on hello and replies, and one that sends nonsense
is closed, alone. Replies leave after what they acknowledge was published (`settle`).

What a program passes is a memfd sealed against shrinking and growing. Nothing can be pulled away
from such memory, so it is mapped whatever `client_shm_mode` says and never quarantined
(`Region.sealed`). Huge pages are refused: hugetlbfs may have none left for a hole that was punched.

A descriptor is neither looked at by `fstat` nor closed by the coordinator's only thread before it
is known to be memory. On a file of a FUSE file system both calls can wait for the stranger
(`transport.deferred_close`).
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import stat
import time
from collections import Counter

from shmserve.config import Settings
from shmserve.coordinator.programs.lane_desk import LaneDesk
from shmserve.coordinator.regions.registrations import RegionRegistrations
from shmserve.core.access import Access
from shmserve.core.caller import Caller
from shmserve.core.region_kinds import SYSTEM
from shmserve.core.regions.region_book import visible
from shmserve.errors import (
    Code,
    InvalidArgument,
    PeerDied,
    ProtocolViolation,
    ShmserveError,
    TooLarge,
)
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.protocol.control import client_messages as wire
from shmserve.shm import passed_memory
from shmserve.transport.channel import Channel, listen
from shmserve.transport.deferred_close import DeferredClose
from shmserve.transport.trust import peer_credentials

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 512
_MAX_PER_USER = 64
_MAX_MESSAGE = 64 * 1024
_PATIENCE_S = 5.0  # for a hello, and for a reply to be read
_PAGE = 128  # regions in one reply
_ANCILLARY = socket.CMSG_SPACE(2 * 4)  # one descriptor too many is told; more are not taken


class ClientConnection:
    """One program's connection. `reply` is what it has not been sent yet, `lane` rides along."""

    def __init__(self, sock: socket.socket, channel: Channel, now: float) -> None:
        self.sock = sock
        self.channel = channel
        self.caller = peer_credentials.caller_of(sock)
        self.greeted = False
        self.ending = False  # once the reply is sent
        self.reply = b""
        self.lane: socket.socket | None = None
        self.deadline = now + _PATIENCE_S

    def greet(self, version: int) -> wire.ServerHello:
        """Note the program's hello; return the answer, after which a stranger's version ends."""
        self.greeted = True
        self.ending = version != wire.VERSION
        return wire.ServerHello(wire.VERSION, lanes=True)

    def answer(self, reply: wire.FromServer) -> None:
        """Have the reply sent at the end of the turn."""
        self.reply = wire.encode(reply)

    def wait_from(self, now: float) -> None:
        """Give the program time to read the reply."""
        self.deadline = now + _PATIENCE_S

    def send_reply(self) -> bool:
        """Send the reply and the lane that rides along; return False if the socket is full."""
        riding = () if self.lane is None else (self.lane.fileno(),)
        if not self.channel.send(self.reply, riding, wait=False):
            return False
        self.reply = b""
        if self.lane is not None:
            self.lane.close()
            self.lane = None
        return True


class ClientSocket:
    """The selector's data is this for its listener, a `ClientConnection` else."""

    def __init__(
        self,
        settings: Settings,
        base_dir: str,
        regions: RegionRegistrations,
        lanes: LaneDesk,
        selector: selectors.BaseSelector,
    ) -> None:
        self._settings = settings
        self._access = Access(settings, os.geteuid())
        self._regions = regions
        self._lanes = lanes
        self._selector = selector
        self._path = settings.client_socket or os.path.join(base_dir, wire.SOCKET_NAME)
        self._connections: set[ClientConnection] = set()
        self._per_user: Counter[int] = Counter()
        self._unsent: list[ClientConnection] = []
        self._buffer = memoryview(bytearray(_MAX_MESSAGE))
        self._closer = DeferredClose()
        self._listener: socket.socket | None = None
        self._given_up = settings.client_shm_mode == "off"

    def serve(self, serving: bool) -> None:
        """Listen while this generation serves. Then its clients come back to the next one."""
        if serving and self._listener is None and not self._given_up:
            self._open()
        elif not serving and self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
            for connection in list(self._connections):
                self._end(connection)

    def _open(self) -> None:
        """A path that cannot be used costs this socket, not the service."""
        try:
            listener = _listen(self._path, bool(self._settings.client_socket))
        except OSError as ex:
            _log.error("client_socket cannot be used", extra=log_fields(path=self._path, error=ex))
            self._given_up = True
            return
        self._selector.register(listener, selectors.EVENT_READ, self)
        self._listener = listener

    def close(self) -> None:
        """Remove the socket's name; open sockets are closed with the selector's others."""
        if self._listener is not None:
            try:
                os.unlink(self._path)
            except OSError:
                pass

    # --------------------------------------------------------------------- events

    def accept(self, listener: socket.socket) -> None:
        """Take the next connection, within bounds."""
        try:
            sock, _ = listener.accept()
        except OSError as ex:
            if ex.errno in (errno.EMFILE, errno.ENFILE):
                _log.error("no descriptors left for client connections")
            return
        channel = Channel(sock, self._buffer, self._closer.close)
        connection = ClientConnection(sock, channel, time.monotonic())
        uid = connection.caller.uid
        if len(self._connections) >= _MAX_CONNECTIONS or self._per_user[uid] >= _MAX_PER_USER:
            flight_recorder.record("limit reached", f"uid {uid}", "too many client connections")
            _log.warning("too many client connections", extra=log_fields(uid=uid))
            sock.close()
            return
        self._connections.add(connection)
        self._per_user[uid] += 1
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def ready(self, connection: ClientConnection, events: int) -> None:
        """A connection can be read, or written if a reply waits."""
        if connection.reply:
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            return
        try:
            received = self._receive(connection)
            if received is not None:
                self._handle(connection, *received)
        except PeerDied:
            self._end(connection)
        except ProtocolViolation as ex:
            caller = connection.caller
            _log.info("client closed", extra=log_fields(uid=caller.uid, pid=caller.pid, reason=ex))
            self._end(connection)

    def settle(self, now: float) -> None:
        """Send the replies of this turn, and give up on those who dawdle."""
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            if connection in self._connections:
                connection.wait_from(now)
                self._send(connection)
        for connection in list(self._connections):
            if (connection.reply or not connection.greeted) and now >= connection.deadline:
                self._end(connection)

    def _receive(self, connection: ClientConnection) -> tuple[wire.ToServer, list[int]] | None:
        space = 0 if self._closer.stuck else _ANCILLARY
        received = connection.channel.receive_within(0.0, space)
        if received is None:
            return None
        data, fds = received
        try:
            message: wire.ToServer = wire.decode_to_server(data)
        except BaseException:
            self._closer.close(fds)
            raise
        return message, fds

    def _handle(self, connection: ClientConnection, message: wire.ToServer, fds: list[int]) -> None:
        reply: wire.FromServer
        if isinstance(message, wire.RegisterMemfd) and connection.greeted:
            reply = self._register(connection.caller, message, fds)
        else:
            self._closer.close(fds)
            if isinstance(message, wire.ClientHello) == connection.greeted:
                raise ProtocolViolation(f"{type(message).__name__} out of turn")
            if isinstance(message, wire.ClientHello):
                reply = connection.greet(message.version)
            elif (refusal := self._refusal(connection.caller)) is not None:
                reply = refusal
            elif isinstance(message, wire.Unregister):
                reply = self._unregister(connection.caller, message)
            elif isinstance(message, wire.ListRegions):
                reply = self._status(connection.caller, message)
            elif isinstance(message, wire.OpenLane):
                reply = self._open_lane(connection, message)
            else:
                raise ProtocolViolation("a registration before the hello")
        connection.answer(reply)
        self._unsent.append(connection)

    def _register(
        self, caller: Caller, message: wire.RegisterMemfd, fds: list[int]
    ) -> wire.FromServer:
        refused = self._refusal(caller)
        if refused is not None:
            self._closer.close(fds)
            return refused
        refusal = ""
        passed = passed_memory.recognized(fds[0]) if len(fds) == 1 else None
        if len(fds) != 1:
            refusal = "exactly one descriptor must come with a registration"
        elif passed is None:
            refusal = passed_memory.REFUSAL
        if passed is None:
            self._closer.close(fds)
            return wire.Failed(Code.INVALID_ARGUMENT, refusal)
        try:
            try:
                passed.check(fds[0], message.name)
            except InvalidArgument:
                os.close(fds[0])
                raise
            window = (message.name, message.offset, message.byte_size)
            self._regions.system.register_passed(caller, *window, fds[0], passed.kind)
        except ShmserveError as ex:
            return wire.Failed(ex.code, ex.message)
        return wire.Ok()

    def _refusal(self, caller: Caller) -> wire.Failed | None:
        """For those of whom a key is required: none comes in here."""
        try:
            if self._access.asked_at_the_door("register"):
                self._access.check("register", caller)
        except ShmserveError as ex:
            return wire.Failed(ex.code, ex.message)
        return None

    def _open_lane(self, connection: ClientConnection, message: wire.OpenLane) -> wire.FromServer:
        try:
            if self._access.asked_at_the_door("use"):
                self._access.check("use", connection.caller)
            reply, connection.lane = self._lanes.open(connection.caller, message)
        except ShmserveError as ex:
            flight_recorder.record("lane refused", _user(connection), ex.code)
            return wire.Failed(ex.code, ex.message)
        flight_recorder.record("lane opened", _user(connection), reply.instance)
        return reply

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
        except (PeerDied, TooLarge):
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
        self._per_user[connection.caller.uid] -= 1
        if not self._per_user[connection.caller.uid]:
            del self._per_user[connection.caller.uid]
        self._selector.unregister(connection.sock)
        connection.channel.close()
        if connection.lane is not None:
            connection.lane.close()


def _user(connection: ClientConnection) -> str:
    return f"uid {connection.caller.uid}"


def _listen(path: str, for_everybody: bool) -> socket.socket:
    """A listener; for everybody where the operator chose the path: credentials decide."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise OSError(f"something else than a socket is at {path}")
    except FileNotFoundError:
        pass
    listener = listen(path)
    if for_everybody:
        os.chmod(path, 0o666)
    return listener
