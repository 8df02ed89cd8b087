"""A client that is always faster than its connection: other clients still have their turns."""

import socket
import ssl
import struct
import threading
from collections.abc import Callable
from math import inf
from pathlib import Path
from time import monotonic

import pytest
from gunicorn.config import Config

from shmserve import waiting
from shmserve.config import Settings
from shmserve.frontends.http.server.head import _WHOLE_RUN, Heads
from shmserve.frontends.http.server.loop_socket import GreenletSocket
from shmserve.frontends.http.server.tls_socket import TlsSocket, secure
from shmserve.frontends.hub import Hub
from tests.running_server import WATCHDOG_S
from tests.tls_files import make_certificates

ROUNDS = 20
PEEK, WHOLE, NOW = socket.MSG_PEEK, socket.MSG_WAITALL, socket.MSG_DONTWAIT


class Client:
    """A client without a deadline."""

    settings = Settings()
    watch: tuple[str, float] | None = ("test", inf)
    sock: socket.socket
    expired = False

    def cut_if_overdue(self, now: float) -> None:
        raise AssertionError

    def wait(self, phase: str, seconds: float) -> None:
        return


@pytest.fixture
def hub():
    hub = Hub(1, "some_threads")
    waiting.install(hub)
    try:
        yield hub
    finally:
        waiting.install(None)
        hub.close()


def greenlet_socket(hub: Hub, accepted: socket.socket) -> GreenletSocket:
    return GreenletSocket(hub, accepted, Client())


def turns_of_others(hub: Hub, run: Callable[[], object]) -> int:
    """Return how often another greenlet had a turn while `run` was running."""
    turns, over = [0], [False]

    def watch() -> None:
        while not over[0]:
            turns[0] += 1
            waiting.pause()

    def guarded() -> None:
        run()
        over[0] = True
        hub.leave()

    hub.spawn(watch)
    hub.spawn(guarded)
    hub.run(monotonic() + WATCHDOG_S)
    assert over[0], "it has failed"
    return turns[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"), "server")


def server_context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    return context


@pytest.mark.needs("openssl")
@pytest.mark.parametrize("large", [False, True])
def test_tls_whose_bytes_are_there_already(hub: Hub, folder: Path, large: bool) -> None:
    """Small requests sent ahead, and a body that arrives faster than the server reads."""
    ours, theirs = socket.socketpair()
    sock = greenlet_socket(hub, ours)
    size, count = (ROUNDS << 20, 1) if large else (100, ROUNDS)

    def send() -> None:
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        with context.wrap_socket(theirs, server_hostname="localhost") as tls:
            for _ in range(count):
                tls.sendall(bytes(size))
            sent.set()
            tls.recv(1)

    def begin() -> None:
        made.append(secure(sock, server_context(folder)))
        made[0].handshake()

    def read() -> None:
        if large:
            assert made[0].recv_into(bytearray(size), 0, WHOLE) == size
        for _ in range(0 if large else count):
            assert len(made[0].recv(8192, PEEK)) == size
            made[0].recv_into(bytearray(size), 0, WHOLE)

    made: list[TlsSocket] = []
    sent = threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    turns_of_others(hub, begin)
    assert large or sent.wait(WATCHDOG_S)
    assert turns_of_others(hub, read) >= ROUNDS
    turns_of_others(hub, made[0].close)
    sender.join()


def test_requests_that_were_read_ahead(hub: Hub) -> None:
    """Like requests after a chunked body: already read, so the socket plays no part any more."""
    ours, theirs = socket.socketpair()
    client = Client()
    client.sock = greenlet_socket(hub, ours)
    heads = Heads(client, Config(), "", {})
    heads.unreader.unread(b"GET / HTTP/1.1\r\nHost: test\r\n\r\n" * ROUNDS)
    with theirs, client.sock:
        assert turns_of_others(hub, lambda: [heads.next() for _ in range(ROUNDS)]) >= ROUNDS


def test_what_comes_whole_is_taken_at_once_the_next_time(hub: Hub) -> None:
    """A request that does not come whole is peeked at first: the rest of the request has its own
    place."""
    ours, theirs = socket.socketpair()
    client = Client()
    sock = client.sock = greenlet_socket(hub, ours)
    heads = Heads(client, Config(), "", {})
    head = b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 4\r\n\r\n"

    def read(sent: bytes, left: bytes) -> None:
        theirs.sendall(sent)
        found = heads.next()
        try:
            assert sock.recv(100, PEEK | NOW) == left
        except BlockingIOError:
            assert not left
        assert heads.take(found, decrypted=False) == len(head) + (4 if b"abcd" in sent else 2)

    def read_all() -> None:
        for _ in range(_WHOLE_RUN):
            read(head + b"abcd", head + b"abcd")
        read(head + b"abcd", b"")
        read(head + b"abcd" + head, b"")
        assert heads.unreader.take_buffered() == head
        read(head + b"ab", b"")
        read(head + b"abcd", head + b"abcd")

    with theirs, sock:
        turns_of_others(hub, read_all)


def test_small_parts_of_a_large_body(hub: Hub) -> None:
    ours, theirs = socket.socketpair()
    sock = greenlet_socket(hub, ours)
    part = bytearray(1 << 16)

    def read() -> None:
        for _ in range(ROUNDS * 16):
            theirs.sendall(part)
            assert sock.recv_into(part, 0, WHOLE) == len(part)

    with theirs, sock:
        assert turns_of_others(hub, read) >= ROUNDS


@pytest.mark.needs("openssl")
def test_tls_with_who_has_gone(hub: Hub, folder: Path) -> None:
    """A reset before the TLS handshake is an error like the end of any other client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        sock = greenlet_socket(hub, listener.accept()[0])
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()

    def begin() -> None:
        tls = secure(sock, server_context(folder))
        with pytest.raises(OSError, match="not connected"):
            tls.handshake()
        tls.close()
        assert tls.fileno() == -1

    turns_of_others(hub, begin)
    assert not hub._descriptors.waits
