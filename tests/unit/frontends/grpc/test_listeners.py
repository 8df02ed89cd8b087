"""Where gRPC listens: addresses, ports that are taken, socket files, several processes."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.core.regions.region_book import Caller
from shmserve.errors import ConfigError
from shmserve.frontends.grpc.callers import AddressCallers
from shmserve.frontends.grpc.client_deadlines import ClientDeadlines
from shmserve.frontends.grpc.grpcio_engine import grpcio_engine
from shmserve.frontends.grpc.http2_engine.engine import Http2Engine
from shmserve.frontends.grpc.listeners import AlreadyRuns, Listening, private
from shmserve.frontends.grpc.rpc_methods import Engine
from shmserve.frontends.grpc.thread_pools import Refusals
from shmserve.testing.running_server import free_port
from shmserve.transport import peer_credentials
from shmserve.transport.listen_addresses import parse

Bind = Callable[..., list[str]]


@pytest.fixture
def bind(engine: str, tmp_path: Path) -> Iterator[Bind]:
    """Bind with these settings as process `number`; returns what is bound."""
    made: list[tuple[Engine, Listening]] = []

    def bind(number: int = 0, **settings: Any) -> list[str]:
        given = Settings(**settings, grpc_server=engine)
        server: Engine
        if engine == "http2":
            server = Http2Engine({}, given, ClientDeadlines())
        else:
            server = grpcio_engine({}, given, Refusals())
        listening = Listening(given, str(tmp_path), number)
        made.append((server, listening))
        bound = listening.bind(server)
        server.start()
        return bound

    yield bind
    for server, listening in made:
        server.stop(None).wait()
        listening.close()


def test_a_port_that_is_taken(bind: Bind) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"grpc_bind: cannot listen on {address}: "):
            bind(grpc_bind=(address,))


HOLD = """
import sys, grpc
from concurrent.futures import ThreadPoolExecutor
from shmserve.config import Settings
from shmserve.frontends.grpc.listeners import Listening
from shmserve.frontends.grpc.grpcio_engine import options
run_dir, address, number = sys.argv[1:]
settings = Settings(grpc_bind=(address,), grpc_processes=2)
server = grpc.server(ThreadPoolExecutor(1), options=options(settings))
Listening(settings, run_dir, int(number)).bind(server)
server.start()
print("bound", flush=True)
sys.stdin.read()
"""


def test_processes_of_one_service_share_a_port_but_not_a_number(bind: Bind, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), address, "0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdout.readline() == b"bound\n"
        with pytest.raises(AlreadyRuns):
            bind(0, grpc_bind=(address,), grpc_processes=2)
        assert bind(1, grpc_bind=(address,), grpc_processes=2) == [address]
        other.communicate(b"")


def test_a_socket_file_and_its_mode(bind: Bind, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))  # what a killed process leaves
    assert bind(grpc_bind=(f"unix:{path}",)) == [f"unix:{path}"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    open_to_all = tmp_path / "open.sock"
    bind(1, grpc_bind=(f"unix:{open_to_all}",))
    assert not open_to_all.exists()  # the first process has it alone


def test_a_socket_file_may_be_open_to_others(bind: Bind, tmp_path: Path) -> None:
    path = tmp_path / "grpc.sock"
    bind(grpc_bind=(f"unix:{path}",), grpc_socket_mode="0666")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666


@pytest.mark.parametrize("what", ["live", "file"])
def test_a_path_that_is_taken_stays_as_it_is(bind: Bind, tmp_path: Path, what: str) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        if what == "live":
            sock.bind(str(path))
            sock.listen()
        else:
            path.write_text("precious")
        with pytest.raises(ConfigError, match=f"unix:{path}"):
            bind(grpc_bind=(f"unix:{path}",))
    assert path.exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"grpc_tls_cert": "/x"}, "grpc_tls_cert and grpc_tls_key"),
        ({"grpc_tls_client_ca": "/x"}, "grpc_tls_client_ca"),
        ({"grpc_tls_cert": "/nowhere", "grpc_tls_key": "/nowhere"}, "/nowhere"),
    ],
)
def test_tls_that_cannot_work(bind: Bind, settings: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        bind(grpc_bind=(f"127.0.0.1:{free_port()}",), **settings)


class Seen:
    """A call as `Callers` sees it."""

    def __init__(self, peer: str, active: bool = True, **metadata: str) -> None:
        self._peer = peer
        self._metadata = metadata
        self._active = active

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self._metadata.items())

    def peer(self) -> str:
        return self._peer

    def is_active(self) -> bool:
        return self._active


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as client:
            server, _ = listener.accept()
            with server:
                yield client, server


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_caller_is_who_holds_the_other_end(
    connection: tuple[socket.socket, socket.socket], host: str
) -> None:
    client, server = connection
    callers = AddressCallers(
        [parse("grpc_bind", f"{host}:{server.getsockname()[1]}")], private=True
    )
    peer = "ipv4:{}:{}".format(*client.getsockname())
    assert callers.of(Seen(peer)).uid == os.geteuid()
    assert callers.of(Seen(peer, active=False)).remote  # it may be another's by now
    assert callers.of(Seen(peer, via="1.1 relay")).remote  # whoever it is relayed for
    mapped = f"ipv6:%5B::ffff:127.0.0.1%5D:{client.getsockname()[1]}"
    assert callers.of(Seen(mapped)).uid == os.geteuid()


def test_strangers(connection: tuple[socket.socket, socket.socket]) -> None:
    client, server = connection
    port = server.getsockname()[1]
    callers = AddressCallers([parse("grpc_bind", f"127.0.0.1:{port}")], private=False)
    for peer in ("ipv4:127.0.0.1:1", "ipv4:192.0.2.1:5000", "ipv6:[2001:db8::1]:5", "unix:", "x"):
        assert callers.of(Seen(peer)).remote, peer
    elsewhere = AddressCallers([parse("grpc_bind", f"127.0.0.1:{port - 1}")], private=False)
    assert elsewhere.of(Seen("ipv4:{}:{}".format(*client.getsockname()))).remote


def test_where_a_client_is_connected_to_is_the_kernels_word() -> None:
    def ours(client: socket.socket) -> set[tuple[str, int]]:
        # Others on the machine may have the same port for connections to other servers
        return {to for to in peer_credentials.servers_of(client.getsockname()) if to[1] == port}

    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert ours(client) == {("127.0.0.1", port)}
            with socket.create_connection(("127.0.0.2", port)) as elsewhere:
                assert ours(elsewhere) == {("127.0.0.2", port)}


def test_two_users_behind_one_address_are_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    uids = {8001: 1000, 8002: 1001}
    monkeypatch.setattr(peer_credentials, "of_addresses", lambda c, s: Caller(uids[s[1]]))
    one, two = (parse("grpc_bind", f"127.0.0.1:{port}") for port in (8001, 8002))
    assert AddressCallers([one, two], private=False).of(Seen("ipv4:127.0.0.1:5")).remote
    assert AddressCallers([two], private=False).of(Seen("ipv4:127.0.0.1:5")) == Caller(1001)


def test_a_unix_socket_names_its_caller_only_if_it_is_private() -> None:
    bound = [parse("grpc_bind", "unix:/a")]
    assert AddressCallers(bound, private=True).of(Seen("unix:")) == Caller(os.geteuid())
    assert AddressCallers(bound, private=False).of(Seen("unix:")).remote
    modes = {"0600": True, "600": True, "0660": False, "0666": False, "0602": False, "0700": True}
    for mode, expected in modes.items():
        assert private(Settings(grpc_socket_mode=mode)) is expected, mode
