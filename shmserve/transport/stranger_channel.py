"""Channels to strangers, who may send descriptors that nobody asked for.

Such a descriptor must neither stay open nor be closed by a thread that others wait for
(`transport.deferred_close`). Since Linux 6.16 a socket can refuse descriptors: the sender gets
EPERM. On older kernels a channel has room for all descriptors of a message and hands them, and at
its end its socket, to the closing thread.
"""

import contextlib
import socket

from shmserve.errors import ProtocolViolation
from shmserve.transport.channel import Channel
from shmserve.transport.deferred_close import ALL_RIGHTS, DeferredClose

_PEEK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
_SO_PASSRIGHTS = 83  # since Linux 6.16; the socket module has no name for it


def pass_descriptors(sock: socket.socket, passing: bool) -> None:
    """Have a Unix socket take or refuse descriptors from now on. Accepted connections do as their
    listener did when the peer connected. Older kernels refuse none."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, int(passing))


class StrangerChannel(Channel):
    """Channel to a stranger. `room`: space for the descriptors of a message, for
    `receive_within`; 0 if the socket refuses descriptors."""

    def __init__(self, sock: socket.socket, buffer: memoryview, closer: DeferredClose) -> None:
        super().__init__(sock, buffer, closer.close)
        self._closer = closer
        self.room = ALL_RIGHTS
        with contextlib.suppress(OSError):
            if not sock.getsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS):
                self.room = 0

    def pass_descriptors(self) -> None:
        """Take descriptors from now on."""
        pass_descriptors(self._socket, True)
        self.room = ALL_RIGHTS

    def receive_next(self) -> tuple[memoryview, list[int]] | None:
        """Return a message that has come, else None. Raises as `receive_within`. While too many
        descriptors wait to be closed, a message with descriptors has not come yet, or raises
        ProtocolViolation if closing is stuck."""
        if self.room and self.brings_too_many():
            if self._closer.stuck:
                raise ProtocolViolation("no descriptor can be taken now")
            return None
        return self.receive_within(0.0, self.room)

    def brings_too_many(self) -> bool:
        """Return True if the next message carries descriptors, while too many wait to be closed."""
        if not self._closer.busy:
            return False
        try:
            return bool(self._socket.recvmsg(1, 0, _PEEK)[2] & socket.MSG_CTRUNC)
        except OSError:  # no message, or the peer is gone
            return False

    def close(self) -> None:
        """End the connection, without waiting for descriptors of unread messages."""
        if self.room:
            self._closer.close_socket(self._socket)
        else:
            super().close()
