"""Wire doors: callers that write a prepared request to a socket and read the answers, without a
client library.

A library in Python takes more processor time for a request than the server does, and the figures
would be the library's. A single thread drives all wire doors (`wire_loop`): each door's generator
yields when its socket is not ready, and goes on after the next event of the socket.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Generator
from typing import Self

from shmserve.cli.measuring.door import WAIT_S, Answered, FailedRequest, Receipt
from shmserve.cli.operating import server_address
from shmserve.client.wire.connections import ServerAddress, failures
from shmserve.client.wire.credentials import Credentials
from shmserve.client.wire.inference_error import LATE, InferenceError

Steps = Generator[int, None, Receipt]
"""Request under way: yields what it waits for (POLLIN, POLLOUT), and returns the receipt."""
_NOT_READY = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_PIECE = 1 << 16  # largest read, in bytes


class WireDoor:
    """Connection of a caller, opened by the first request; implements `door.Door`.

    Attributes:
        socket: None while no connection is open.
        is_ending: set by the loop once the server has closed the connection: no further event will
            tell the end.
    """

    def __init__(
        self, url: str, credentials: Credentials, protocol: str, option: str = "--url"
    ) -> None:
        """Parse the address. `protocol`: name of the protocol for TLS. Raise ConfigError for
        unusable files, or if the address, given by `option`, is malformed."""
        try:
            self._address = ServerAddress(url, credentials, protocol)
        except ValueError as ex:
            raise server_address.refusal(ex, option) from None
        self.socket: socket.socket | None = None
        self.is_ending = False
        self._drained = False  # all bytes were read that had come before the latest event

    def steps(self, answered: Answered, receipt: bool = False) -> Steps:
        """Do as `send`, but yield instead of waiting."""
        try:
            if self.socket is None:
                self._open()
            return (yield from self._exchange(answered, receipt))
        except OSError as ex:
            self.close()
            raise FailedRequest("", f"the connection broke: {ex.strerror or ex}") from None

    def send(self, answered: Answered, receipt: bool = False) -> Receipt:
        until = time.monotonic() + WAIT_S
        steps = self.steps(answered, receipt)
        poll = select.poll()
        while True:
            try:
                event = next(steps)
            except StopIteration as ex:
                return dict(ex.value)
            assert self.socket is not None
            poll.register(self.socket, event)
            if not poll.poll(max(0.0, until - time.monotonic()) * 1e3):
                self.give_up(steps)

    def give_up(self, steps: Steps) -> None:
        """End a request whose answer is late. Raise FailedRequest."""
        steps.close()
        self.close()
        raise FailedRequest("", LATE)

    def woken(self) -> None:
        """Take what arrived while no request was under way, such as the end of the connection."""
        try:
            if self.socket is not None:
                self._take_idle(self.socket.recv(_PIECE))
        except _NOT_READY:
            return
        except OSError:
            self.close()

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()
            self.socket = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, answered: Answered, receipt: bool) -> Steps:
        """Send the request over the open connection and take the answers. Raise OSError if the
        connection breaks."""
        raise NotImplementedError

    def _take_idle(self, data: bytes) -> None:
        """Take bytes that belong to no request; no bytes: the server closed the connection."""
        raise NotImplementedError

    def _open(self) -> None:
        connection = self._address.connection(WAIT_S)
        try:
            with failures(connection):
                connection.connect()
        except InferenceError as ex:
            raise FailedRequest("", ex.message) from None
        self.socket = connection.sock
        self.socket.setblocking(False)
        self.is_ending = self._drained = False

    def _send(self, data: bytes | memoryview) -> Generator[int, None, None]:
        assert self.socket is not None
        view = memoryview(data)
        while view:
            try:
                view = view[self.socket.send(view) :]
            except _NOT_READY as ex:
                yield select.POLLIN if isinstance(ex, ssl.SSLWantReadError) else select.POLLOUT
                self._drained = False

    def _receive(self) -> Generator[int, None, bytes]:
        """Return the next bytes. Raise ConnectionError at the end of the connection."""
        assert self.socket is not None
        if self._drained:  # saves a call that fails
            yield select.POLLIN
        while True:
            try:
                data = self.socket.recv(_PIECE)
            except _NOT_READY as ex:
                yield select.POLLOUT if isinstance(ex, ssl.SSLWantWriteError) else select.POLLIN
                continue
            if not data:
                raise ConnectionError("the server closed it")
            is_tls = isinstance(self.socket, ssl.SSLSocket)  # gives a record at a time
            self._drained = len(data) < _PIECE and not is_tls and not self.is_ending
            return data
