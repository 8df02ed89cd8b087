"""Programs that were written for other servers: the ways of tritonclient, KServe, grpc-js, curl."""

import json
import os
import socket
from pathlib import Path

import pytest

from tests.needs import KSERVE_PYTHON, NODE_PACKAGES
from tests.running_server import WATCHDOG_S
from tests.servers import Server, only, output, python, served

HERE = Path(__file__).parent
public_server = served(
    HERE.parent / "repositories" / "triton_examples", server_name="triton", **only("*")
)


def test_every_client_does_what_public_examples_do(public_server: Server) -> None:
    places = (public_server.address(), public_server.grpc_address)
    printed = python(HERE / "public_program.py", *places)
    assert printed.split() == [
        *("tritonclient.http", "tritonclient.http.aio"),
        *("tritonclient.grpc", "tritonclient.grpc.aio", "contents"),
    ]


@pytest.mark.needs("kserve")
def test_kserve_s_clients(public_server: Server) -> None:
    url = f"http://{public_server.http_host}:{public_server.http_port}"
    printed = output(
        KSERVE_PYTHON, "-I", HERE / "kserve_program.py", url, public_server.grpc_address
    )
    assert printed.split() == ["REST", "gRPC"]


@pytest.mark.needs("grpc-js")
def test_grpc_js_needs_no_proto_files(public_server: Server) -> None:
    printed = output(
        "node",
        HERE / "grpc_js_program.js",
        public_server.grpc_address,
        environ=os.environ | {"NODE_PATH": str(NODE_PACKAGES)},
    )
    assert printed.split() == ["reflection", "health", "inference"]


def post_without_a_body(server: Server, path: str) -> tuple[int, bytes]:
    """Send a POST like `curl -X POST`: with neither a length nor chunks."""
    with socket.create_connection((server.http_host, server.http_port), WATCHDOG_S) as sock:
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        answer, _, body = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")
    return int(answer.split()[1]), body


def test_a_repository_is_managed_without_bodies(public_server: Server) -> None:
    status, body = post_without_a_body(public_server, "/v2/repository/index")
    assert status == 200
    assert {row["name"] for row in json.loads(body)} >= {"simple", "simple_string"}
    for action in ("load", "unload", "load"):
        path = f"/v2/repository/models/simple_int8/{action}"
        assert post_without_a_body(public_server, path) == (200, b"")
    status, body = post_without_a_body(public_server, "/v2/models/simple/infer")
    assert status == 400
    assert json.loads(body)["error"]
