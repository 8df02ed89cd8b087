"""Metrics for a Prometheus without key or TLS beside HTTP with both; plain HTTP where TLS is."""

import http.client
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shmserve.client
from tests.integration.test_http_tls import Encrypted
from tests.integration.test_keys import make
from tests.running_server import WATCHDOG_S, free_port
from tests.servers import inference_error

pytestmark = pytest.mark.needs("openssl")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    folder = tmp_path_factory.mktemp("tls")
    make("me", ["use"], str(folder / "keys.toml"))
    settings: dict[str, Any] = {
        "keys_file": folder / "keys.toml",
        "keys_required_from": "anyone",
        "metrics_bind": f"127.0.0.1:{free_port()}",
        "metrics_tls": False,
        "metrics_keys": False,
    }
    with Encrypted(folder, mutual=False, **settings) as server:
        yield server


def port_of(server: Encrypted, setting: str) -> int:
    return int(server.environ[f"SHMSERVE_{setting.upper()}"].partition(",")[0].rpartition(":")[2])


def answered(port: int, request: str, **fields: str) -> tuple[int, str, str]:
    """Return status, media type and body of the answer to plain HTTP."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WATCHDOG_S)
    method, _, path = request.partition(" ")
    connection.request(method, path, headers=fields)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, answer.headers["content-type"], body


def test_a_scrape_needs_neither_key_nor_tls(server: Encrypted) -> None:
    port = port_of(server, "metrics_bind")
    status, kind, body = answered(port, "GET /metrics")
    assert (status, kind[:10]) == (200, "text/plain")
    assert "shmserve_build_info" in body
    assert answered(port, "GET /v2")[0] == 404
    assert answered(port, "GET /metrics", Host="evil.example")[0] == 403
    assert answered(port, "GET /metrics", Origin="http://evil.example")[0] == 403
    assert server.request("GET", "/v2/models/echo")[0] == 401


@pytest.mark.parametrize("setting", ["http_bind", "grpc_bind"])
@pytest.mark.parametrize("request_line", ["GET /v2", "POST /v2/models/echo/infer", "DELETE /x"])
def test_plain_http_on_a_port_with_tls(server: Encrypted, setting: str, request_line: str) -> None:
    status, kind, body = answered(port_of(server, setting), request_line)
    assert (status, kind) == (400, "text/plain; charset=utf-8")
    assert body == "The plain HTTP request was sent to an HTTPS port: use https://\n"
    assert server.ready()


def test_a_plain_request_in_pieces(server: Encrypted) -> None:
    for setting in ("http_bind", "grpc_bind"):
        with socket.create_connection(("127.0.0.1", port_of(server, setting)), WATCHDOG_S) as sock:
            sock.sendall(b"G")
            assert sock.recv(12) == b"HTTP/1.1 400"


def test_the_client_says_so(server: Encrypted) -> None:
    with inference_error(400, "The plain HTTP request was sent to an HTTPS port: use https://"):
        shmserve.client.connect(f"http://127.0.0.1:{server.http_port}")


def test_the_log_says_which_listeners_have_tls(server: Encrypted) -> None:
    place = f"https://127.0.0.1:{server.http_port}"
    metrics = f"http://{server.environ['SHMSERVE_METRICS_BIND']}"
    server.wait_log(f"Listening at: {place},unix:{server.unix_path},{metrics} (")
    server.wait_log(f"HTTP: {place} unix:{server.unix_path} {metrics},")


def test_metrics_have_tls_and_keys_by_default(tmp_path: Path) -> None:
    key = make("me", ["use"], str(tmp_path / "keys.toml"))
    own = {"keys_file": tmp_path / "keys.toml", "keys_required_from": "anyone"}
    server = Encrypted(tmp_path, mutual=False, metrics_bind=f"127.0.0.1:{free_port()}", **own)
    with server:
        port = port_of(server, "metrics_bind")
        assert answered(port, "GET /metrics")[0] == 400
        place = ("127.0.0.1", port)
        for fields, status in (({}, 401), ({"Authorization": f"Bearer {key}"}, 200)):
            connection = http.client.HTTPSConnection(*place, context=server.tls)
            connection.request("GET", "/metrics", headers=fields)
            answer = connection.getresponse()
            assert answer.status == status
            assert (b'key="me"' in answer.read()) == (status == 200)
            connection.close()
