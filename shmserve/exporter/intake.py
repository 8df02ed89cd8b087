"""Intake of spans: reads the channels of the server's processes as soon as data arrives."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable

from shmserve.errors import PeerDied, ProtocolViolation, UnreadableMessage
from shmserve.protocol.control.span_messages import Spans, decode
from shmserve.transport import rundir
from shmserve.transport.channel import Channel, accept, close_all, listen

_log = logging.getLogger(__name__)

_MOST_IN_A_ROW = 64  # messages from one process before other processes are served


class Intake:
    """Listener and channels, for a single thread.

    Args:
        put: function that receives each message.
        wake_fd: eventfd that ends a waiting `turn`.
    """

    def __init__(self, run_dir: str, put: Callable[[Spans], None], wake_fd: int) -> None:
        self._put = put
        self._selector = selectors.DefaultSelector()
        self._listener = listen(os.path.join(run_dir, rundir.EXPORTER_SOCKET))
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._wake_fd = wake_fd
        self._selector.register(wake_fd, selectors.EVENT_READ, None)

    def turn(self, limit_s: float) -> bool:
        """Handle the events that come within `limit_s` seconds. Return True if any event came."""
        ready = self._selector.select(limit_s)
        for key, _ in ready:
            if isinstance(key.data, Channel):
                self._receive(key.data)
            elif key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            else:
                self._accept(self._listener)
        return bool(ready)

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Channel):
                key.data.close()
        self._listener.close()
        self._selector.close()

    def _accept(self, listener: socket.socket) -> None:
        channel = accept(listener)
        if channel is not None:
            self._selector.register(channel.fileno(), selectors.EVENT_READ, channel)

    def _receive(self, channel: Channel) -> None:
        try:
            for _ in range(_MOST_IN_A_ROW):
                received = channel.receive_now()
                if received is None:
                    return
                data, fds = received
                close_all(fds)
                self._put(decode(data))
        except PeerDied:
            self._end(channel)
        except (ProtocolViolation, UnreadableMessage) as ex:
            _log.warning("spans of pid %d cannot be read: %s", channel.peer_pid, ex)
            self._end(channel)

    def _end(self, channel: Channel) -> None:
        self._selector.unregister(channel.fileno())
        channel.close()
