"""Listening addresses of a service: parsing, checks, reservation, and other holders of an
address."""

import os
import socket
import subprocess
import sys

import pytest

from shmserve.errors import ConfigError
from shmserve.transport import listen_addresses
from shmserve.transport.listen_addresses import ListenAddress, of_gunicorn, parse
from tests.running_server import free_port, wait_until

LISTEN = """
import os, socket, sys
from setproctitle import setproctitle
title, kind, place = sys.argv[1:]
setproctitle(title)
if kind != "tcp":
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(place)
else:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", int(place)))
sock.listen()
print("listens", flush=True)
if kind == "inherited" and (orphan := os.fork()):  # whose parent ends
    print(orphan, flush=True)
    os._exit(0)
sys.stdin.readline()
"""


@pytest.fixture
def port():
    return free_port()


def listener(title: str, kind: str, place: object) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTEN, title, kind, str(place)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == b"listens\n"
    return process


@pytest.fixture
def other(port):
    """Another process, which would share the port."""
    with listener("somebody", "tcp", port) as process:
        yield process
        process.communicate(b"\n")


def free(address: ListenAddress, patience_s: float = 0.0) -> None:
    listen_addresses.require_free("grpc_bind", address, patience_s)


def test_addresses() -> None:
    local = parse("grpc_bind", "127.0.0.1:8001")
    assert (local.host, local.port) == ("127.0.0.1", 8001)
    six = parse("grpc_bind", "[::1]:1")
    assert (six.host, six.text) == ("::1", "[::1]:1")
    assert parse("grpc_bind", "unix:/a/b").path == "/a/b"
    for bad in ("8001", "host:", ":8001", "host:99999", "host:x", ""):
        with pytest.raises(ConfigError, match="a_bind: "):
            parse("a_bind", bad)


def test_gunicorns_addresses() -> None:
    any_one = ListenAddress("0.0.0.0:8000", "0.0.0.0", 8000, family=socket.AF_INET)
    assert of_gunicorn(("0.0.0.0", 8000)) == any_one
    assert of_gunicorn("/run/x.sock") == ListenAddress("unix:/run/x.sock", path="/run/x.sock")
    assert of_gunicorn(3) is None  # a descriptor
    assert of_gunicorn("\0name") is None


def test_who_has_a_port_is_told(port: int, other: subprocess.Popen[bytes]) -> None:
    words = rf"grpc_bind: cannot listen on 127.0.0.1:{port}: Address already in use"
    whose = rf"by pid {other.pid} \(somebody\); set another address \(grpc_bind, or SHMSERVE_GRPC"
    with pytest.raises(ConfigError, match=f"{words}, {whose}"):
        free(parse("grpc_bind", f"127.0.0.1:{port}"))


def test_a_process_that_has_lost_its_service_is_waited_for(port: int) -> None:
    with listener("shmserve: http worker 1", "tcp", port) as orphan:
        address = parse("grpc_bind", f"127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=f"pid {orphan.pid}"):
            free(address)
        orphan.stdin.write(b"\n")
        orphan.stdin.flush()
        free(address, 60.0)


def test_a_free_address_is_kept_for_those_who_share_it(port: int) -> None:
    address = parse("grpc_bind", f"127.0.0.1:{port}")
    free(address)
    (held,) = listen_addresses.reserve("grpc_bind", address)
    with held:
        with pytest.raises(ConfigError, match="Address already in use"):
            free(address)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.bind(("127.0.0.1", port))
            sock.listen()
            with socket.create_connection(("127.0.0.1", port)):
                sock.accept()[0].close()  # the listening socket gets all connections
    free(address)
    assert listen_addresses.reserve("grpc_bind", parse("grpc_bind", "127.0.0.1:0")) == []


def test_an_address_of_no_interface_here() -> None:
    with pytest.raises(ConfigError, match=r"http_bind: cannot listen on 192.0.2.1:80\d+: Cannot"):
        listen_addresses.require_free("http_bind", parse("http_bind", "192.0.2.1:8000"))


def test_a_socket_file_that_somebody_listens_on_stays(tmp_path) -> None:
    path = tmp_path / "sock"
    address = parse("grpc_bind", f"unix:{path}")
    free(address)
    with listener("somebody", "unix", path) as process:
        words = rf"cannot listen on unix:{path}: another process listens there"
        with pytest.raises(ConfigError, match=rf"{words}, by pid {process.pid} \(somebody\)"):
            free(address)
        with pytest.raises(ConfigError, match="another process"):
            listen_addresses.make_way("grpc_bind", str(path))
        process.communicate(b"\n")
    free(address)  # the file of an ended process
    assert path.exists()
    listen_addresses.make_way("grpc_bind", str(path))
    assert not path.exists()


def test_who_listens_for_packets_is_found_as_well(tmp_path) -> None:
    path = tmp_path / "c.sock"
    address = parse("client_socket", f"unix:{path}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
        sock.listen()
        own = f"another process listens there, by pid {os.getpid()}"
        with pytest.raises(ConfigError, match=own):
            free(address)
    free(address)


def test_a_process_that_has_lost_its_service_and_its_socket_file_is_waited_for(tmp_path) -> None:
    path = tmp_path / "sock"
    address = parse("http_bind", f"unix:{path}")
    with listener("orphan", "inherited", path) as service:
        (orphan,) = map(int, service.stdout.readline().split())
        assert service.wait(30) == 0
        with pytest.raises(ConfigError, match="another process listens there"):
            free(address)
        service.stdin.write(b"\n")
        service.stdin.flush()
        free(address, 60.0)
        # The socket closes before the process ends
        wait_until(lambda: not os.path.exists(f"/proc/{orphan}/fd/0"), "it has not ended")


def test_socket_files_that_cannot_be(tmp_path) -> None:
    (tmp_path / "file").write_text("precious")
    for path, why in (
        (f"{tmp_path}/file", "there already and no socket"),
        (f"{tmp_path}/nowhere/sock", "its folder is missing"),
        (f"{tmp_path}/{'x' * 108}", "too long for a Unix socket"),
    ):
        with pytest.raises(ConfigError, match=why):
            free(parse("grpc_bind", f"unix:{path}"))
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ("127.0.0.1:80", "127.0.0.1:080", True),
        ("127.0.0.1:80", "127.0.0.1:81", False),
        ("127.0.0.1:80", "127.0.0.2:80", False),
        ("127.0.0.1:80", "0.0.0.0:80", True),
        ("Localhost:80", "localhost:80", True),
        ("localhost:80", "0.0.0.0:80", True),
        ("[::]:80", "127.0.0.1:80", True),
        ("[::]:80", "0.0.0.0:80", True),
        ("[::1]:80", "0.0.0.0:80", False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("unix:/a/b", "unix:/a/./b", True),
        ("unix:/a", "unix:/b", False),
        ("unix:/a", "127.0.0.1:80", False),
    ],
)
def test_addresses_overlap(one: str, other: str, overlap: bool) -> None:
    places = [listen_addresses.parse("http_bind", text) for text in (one, other)]
    assert listen_addresses.overlap(*places) is overlap
    assert listen_addresses.overlap(*reversed(places)) is overlap
