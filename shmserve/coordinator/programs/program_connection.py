"""Connection of a local program to the client socket: one request and one reply at a time."""

import socket

from shmserve.protocol.control import client_messages as wire
from shmserve.transport.stranger_channel import StrangerChannel
from shmserve.transport.trust import peer_credentials

PATIENCE_S = 5.0  # time for a hello, and for a reply to be read


class ClientConnection:
    """Connection of one program. `reply`: unsent bytes. `lane`: socket to be sent along with
    `reply`."""

    def __init__(self, sock: socket.socket, channel: StrangerChannel, now: float) -> None:
        self.sock = sock
        self.channel = channel
        self.caller = peer_credentials.caller_of(sock)
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
