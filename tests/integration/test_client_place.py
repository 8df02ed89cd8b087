"""Place of the client socket: told to some callers, and believed by some clients."""

import contextlib
import http.client
import json
import os
import socket
import tempfile
import threading
import warnings
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmserve.client
from tests.integration.region_client import OTHER_UID, as_user
from tests.integration.test_keys import make
from tests.running_server import ROOT
from tests.servers import SMALL, Server, UnixConnection, only

MODELS = ROOT / "tests/repositories/basic"
WHERE = "/shmserve/client-socket"
V2 = b"\r\n\r\n\x00\r\nQUIT\n"  # the beginning of PROXY protocol 2
X = np.arange(5000, dtype=np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with `run_dir` in a TOML file, and the HTTP socket in another folder."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        server = Server(MODELS, gunicorn=("--proxy-protocol", "auto"), **SMALL, **only("echo"))
        server.unix_path = f"{folder}/http.sock"
        binds = f"127.0.0.1:{server.http_port},unix:{server.unix_path}"
        server.environ["SHMSERVE_HTTP_BIND"] = binds
        file = Path(folder, "shmserve.toml")
        file.write_text(f'run_dir = "{server.run_dir}"\n')
        del server.environ["SHMSERVE_RUN_DIR"]
        server.environ["SHMSERVE_CONFIG"] = str(file)
        server.mark = f"SHMSERVE_CONFIG={file}"
        with server:
            yield server


def socket_of(server: Server) -> str:
    return os.path.join(server.run_dir, "client.sock")


def told(server: Server, **fields: str) -> tuple[int, Any]:
    headers = {name.replace("_", "-"): value for name, value in fields.items()}
    status, _, body = server.request("GET", WHERE, headers=headers)
    return status, json.loads(body)


def why(url: str) -> str:
    """Return why a new client goes without shared memory."""
    with warnings.catch_warnings(action="ignore"):
        client = shmserve.client.connect(url)
    with client:
        return client.why_no_shared_memory


def test_programs_on_this_host_find_it(server: Server) -> None:
    for url in (f"http://127.0.0.1:{server.http_port}", f"unix:{server.unix_path}"):
        with shmserve.client.connect(url, require_shared_memory=True) as client:
            result = client.infer("echo", {"IN": X}, receipt=True)
            assert np.array_equal(result["OUT"], X)
            assert not any((result.receipt or {})["copied_bytes"].values())
    assert told(server) == (200, {"client_socket": socket_of(server)})
    connection = UnixConnection(server.unix_path)
    connection.request("GET", WHERE)
    assert json.loads(connection.getresponse().read())["client_socket"] == socket_of(server)
    connection.close()


@pytest.mark.parametrize("field", ["X_Forwarded_For", "Forwarded", "Via"])
def test_callers_of_a_proxy_are_not_told(server: Server, field: str) -> None:
    status, answer = told(server, **{field: "for=127.0.0.1"})
    assert status == 403
    assert "programs on the server's host" in answer["error"]
    assert server.run_dir not in answer["error"]


def test_callers_behind_proxy_protocol_are_not_told(server: Server) -> None:
    for preface, status in (
        (b"PROXY TCP4 127.0.0.1 127.0.0.1 9 10\r\n", 403),
        (V2 + b"\x21\x01\x00\x00", 403),  # a client that the proxy does not name
        (V2 + b"\x20\x00\x00\x00", 200),  # LOCAL: the proxy's own request
    ):
        with socket.create_connection(("127.0.0.1", server.http_port), 60) as sock:
            request = f"GET {WHERE} HTTP/1.1\r\nHost: localhost\r\n\r\n"
            sock.sendall(preface + request.encode())
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            assert answer.status == status
            answer.close()


@pytest.mark.needs("root")
def test_a_folder_that_is_out_of_reach(server: Server) -> None:
    with as_user(OTHER_UID):
        reason = why(server.base_url)
    assert reason.startswith(f"this user may not open the client socket {socket_of(server)}: ")
    assert "setting client_socket" in reason


def test_who_is_elsewhere_or_needs_a_key_is_not_told(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    key = make("all", ["use", "register"], str(keys))
    rules: dict[str, Any] = {"keys_file": keys, "keys_required_from": "anyone"}
    server = Server(MODELS, **SMALL, **only("echo"), **rules)
    with server:
        for fields in ({}, {"shmserve_key": key}, {"shmserve_key": "shmk_unknown"}):
            status, answer = told(server, **fields)
            assert status == 403  # not 401: no key helps
            assert "the client socket takes no keys" in answer["error"]
        assert told(server, Host="0.0.0.0")[1]["error"].startswith("header Host: ")
    server = Server(MODELS, **SMALL, **only("echo"))
    server.environ["SHMSERVE_REMOTE_BINDS"] = f"127.0.0.1:{server.http_port}"
    with server:
        reason = why(server.base_url)
        assert reason.startswith("the server does not tell its client socket: the client socket is")
        with shmserve.client.connect(f"unix:{server.unix_path}") as client:
            assert client.shared_memory


def test_without_client_memory() -> None:
    with Server(MODELS, **SMALL, **only("echo"), client_shm_mode="off") as server:
        assert told(server)[0] == 501
        assert "Set client_shm_mode" in why(server.base_url)


class Answers(BaseHTTPRequestHandler):
    """Answers of a foreign server."""

    protocol_version = "HTTP/1.1"  # the kernel shows the user while the connection lasts

    def do_GET(self) -> None:
        body = json.dumps({"client_socket": self.server.place}).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextlib.contextmanager
def liar(place: str) -> Iterator[str]:
    """Yield the address of a server with `place` in the answer."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.place = place  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.needs("root")
def test_a_socket_of_another_user_gets_nothing() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
    ):
        place = f"{folder}/their.sock"
        os.chmod(folder, 0o777)
        with as_user(OTHER_UID):
            listener.bind(place)
            listener.listen()
        with liar(place) as url:
            reason = why(url)
        assert reason == (
            f"no server at the client socket {place}: another user (uid {OTHER_UID}) listens there"
        )
        listener.settimeout(60)
        with listener.accept()[0] as sock:
            assert sock.recv(1000) == b"", "no byte came"


@pytest.mark.parametrize("place", ["client.sock", "/nowhere/client.sock", "/a\0b", ["/x"], None])
def test_answers_of_no_use(place: Any) -> None:
    with liar(place) as url:
        assert "client socket" in why(url)
