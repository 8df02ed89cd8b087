"""Descriptors that a hostile program passes: the close of the last one waits for the program."""

import array
import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

_LINGER_S = 3600  # longer than any test may take


@contextlib.contextmanager
def lingering(count: int) -> Iterator[list[socket.socket]]:
    """Yield TCP sockets whose last close waits for an hour, as their other ends take no bytes. At
    the end of the block nothing waits any more."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        made: list[socket.socket] = []
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(listener.getsockname()))
            stack.enter_context(listener.accept()[0])
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sock.send(bytes(1 << 20))
            sock.setblocking(True)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _LINGER_S))
            made.append(sock)
        yield made


def pass_on(sock: socket.socket, data: bytes, strays: Sequence[socket.socket]) -> None:
    """Send sockets along with a message, which gets the last descriptor of each."""
    fds = array.array("i", [stray.fileno() for stray in strays])
    rights: list[Any] = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
    sock.sendmsg([data], rights)
    for stray in strays:
        stray.close()
