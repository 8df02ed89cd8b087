"""gRPC listeners: addresses, ports in use, socket files, several processes."""

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.frontends.grpc.http2_engine.engine import Http2Engine
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.frontends.grpc.process.listeners import AlreadyRuns, Listening
from tests.running_server import free_port

Bind = Callable[..., list[str]]


@pytest.fixture
def bind(tmp_path):
    """Return a function that binds with given settings as process `number`, and returns the
    addresses."""
    made: list[tuple[Http2Engine, Listening]] = []

    def bind(number: int = 0, **settings: Any) -> list[str]:
        given = Settings(**settings)
        server = Http2Engine({}, given, EventLoop(1))
        listening = Listening(given, str(tmp_path), number)
        made.append((server, listening))
        bound = listening.bind(server.adopt)
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
import sys
from shmserve.config import Settings
from shmserve.frontends.grpc.http2_engine.engine import Http2Engine
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.frontends.grpc.process.listeners import Listening
run_dir, address, number = sys.argv[1:]
settings = Settings(grpc_bind=(address,), grpc_processes=2)
server = Http2Engine({}, settings, EventLoop(1))
Listening(settings, run_dir, int(number)).bind(server.adopt)
server.start()
print("bound", flush=True)
sys.stdin.read()
server.stop(None).wait()
"""


def test_processes_of_one_service_share_a_port_but_not_a_number(bind: Bind, tmp_path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), address, "0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as other:  # fmt: skip
        assert other.stdout.readline() == b"bound\n"
        with pytest.raises(AlreadyRuns):
            bind(0, grpc_bind=(address,), grpc_processes=2)
        assert bind(1, grpc_bind=(address,), grpc_processes=2) == [address]
        other.communicate(b"")


def test_a_socket_file_and_its_mode(bind: Bind, tmp_path) -> None:
    path = tmp_path / "grpc.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))  # a killed process leaves such a file
    assert bind(grpc_bind=(f"unix:{path}",)) == [f"unix:{path}"]
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    open_to_all = tmp_path / "open.sock"
    bind(1, grpc_bind=(f"unix:{open_to_all}",))
    assert not open_to_all.exists()  # the socket belongs to the first process alone


def test_a_socket_file_may_be_open_to_others(bind: Bind, tmp_path) -> None:
    path = tmp_path / "grpc.sock"
    bind(grpc_bind=(f"unix:{path}",), grpc_socket_mode="0666")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o666


@pytest.mark.parametrize("what", ["live", "file"])
def test_a_path_that_is_taken_stays_as_it_is(bind: Bind, tmp_path, what: str) -> None:
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
