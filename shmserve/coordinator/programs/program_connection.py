"""Connections of local programs to the client socket: one request and one reply at a time."""

import socket

from shmserve.core.caller import Caller
from shmserve.protocol.control import client_messages as wire
from shmserve.transport.deferred_close import DeferredClose
from shmserve.transport.stranger_channel import StrangerChannel

PATIENCE_S = 5.0  # time for a hello, and for a reply to be read


class ProgramUser:
    """User of the client socket. `closer`: closes the descriptors and connections of this user."""

    def __init__(self) -> None:
        self.closer = DeferredClose()
        self._sockets: list[socket.socket] = []

    def add(self, sock: socket.socket) -> None:
        """Count a connection until its socket is closed."""
        self._sockets.append(sock)

    @property
    def connections(self) -> int:
        """Return the number of connections that are not closed, ended and refused ones included."""
        self._sockets = [sock for sock in self._sockets if sock.fileno() >= 0]
        return len(self._sockets)


class ClientConnection:
    """Connection of one program. `reply`: unsent bytes. `lane`: socket to be sent along with
    `reply`."""

    def __init__(
        self, sock: socket.socket, caller: Caller, user: ProgramUser, buffer: memoryview, now: float
    ) -> None:
        self.sock = sock
        self.caller = caller
        self.closer = user.closer
        self.channel = StrangerChannel(sock, buffer, user.closer)
        self.greeted = False
        self.ending = False  # close once the reply is sent
        self.reply = b""
        self.lane: socket.socket | None = None
        self.deadline = now + PATIENCE_S

    def greet(self, version: int) -> wire.ServerHello:
        """Note the program's hello and return the answer. After the answer, a connection of
        another version ends."""
        self.greeted = True
        self.channel.pass_descriptors()
        self.ending = version != wire.VERSION
        return wire.ServerHello(wire.VERSION, lanes=True, models=True)

    def send_reply(self) -> bool:
        """Send the reply, with the lane if any. Return False if the socket is full."""
        riding = () if self.lane is None else (self.lane.fileno(),)
        if not self.channel.send(self.reply, riding, wait=False):
            return False
        self.reply = b""
        if self.lane is not None:
            self.lane.close()
            self.lane = None
        return True
