"""TLS over HTTP of a real server: clients, client certificates, and renewed server certificates."""

import http.client
import json
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import shmserve.client
from tests.integration.region_client import Client
from tests.running_server import WATCHDOG_S, RunningServer, binary_request, wait_until
from tests.servers import Server, completed, failed_start, triton
from tests.tls_files import make_certificates

MODELS = Path(__file__).parents[1] / "repositories" / "basic"
HEAD_S = 2.0
_ENDS = (("cert", "pem"), ("key", "key"))
pytestmark = pytest.mark.needs("openssl")


class Encrypted(Server):
    """TLS server. `folder` holds the certificates; with `mutual`, clients need a certificate."""

    def __init__(self, folder: Path, mutual: bool, **settings: Any) -> None:
        self.folder, self.mutual = folder, mutual
        make_certificates(folder, "server", "client", "renewed")
        files: dict[str, Any] = {
            f"{door}_tls_{what}": folder / f"server.{end}"
            for door in ("http", "grpc")
            for what, end in _ENDS
        }
        if mutual:
            files |= {f"{door}_tls_client_ca": folder / "ca.pem" for door in ("http", "grpc")}
        super().__init__(MODELS, http_workers=1, head_timeout_s=HEAD_S, **files, **settings)
        self.tls = self.context("client")

    def context(self, name: str = "") -> ssl.SSLContext:
        """Return the TLS context of a client, with this certificate if a name is given."""
        context = ssl.create_default_context(cafile=self.folder / "ca.pem")
        if name:
            context.load_cert_chain(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        return context

    def plain(self) -> socket.socket:
        return socket.create_connection((self.http_host, self.http_port), WATCHDOG_S)


@pytest.fixture(scope="module", params=[False, True], ids=["tls", "mutual"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Encrypted]:
    with Encrypted(tmp_path_factory.mktemp("tls"), request.param) as server:
        yield server


def test_tritonclient(server: Encrypted) -> None:
    triton("tls", f"localhost:{server.http_port}", server.grpc_address, server.folder)


def test_the_python_client_finds_shared_memory(server: Encrypted) -> None:
    url, folder = f"https://localhost:{server.http_port}", server.folder
    files: dict[str, Any] = {"ca": folder / "ca.pem", "cert": folder / "client.pem"}
    files["cert_key"] = folder / "client.key"
    with shmserve.client.connect(url, require_shared_memory=True, **files) as client:
        x = np.arange(5000, dtype=np.float32)
        assert np.array_equal(client.infer("echo", {"IN": x})["OUT"], x)


@pytest.mark.needs("curl")
def test_curl_and_old_protocols(server: Encrypted) -> None:
    def curl(*arguments: str) -> tuple[int, str]:
        done = completed(
            *("curl", "-sS", "--cacert", "ca.pem", "--cert", "client.pem"),
            *("--key", "client.key", "-o", "/dev/null", "-w", "%{http_code}", *arguments),
            f"https://localhost:{server.http_port}/v2/health/ready",
            cwd=server.folder,
        )
        return done.returncode, done.stdout

    assert curl() == (0, "200")
    assert curl("--tlsv1.2", "--tls-max", "1.2") == (0, "200")
    assert curl("--tlsv1.1", "--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0")[0] == 35


def test_who_shows_no_certificate(server: Encrypted) -> None:
    context = server.context()
    connection = http.client.HTTPSConnection("localhost", server.http_port, context=context)

    def status() -> int:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status

    if server.mutual:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            status()
        server.wait_log("TLS client")
        server.wait_log("commonName=client")
    else:
        assert status() == 200
    connection.close()


def test_large_tensors_are_received_in_their_place(server: Encrypted) -> None:
    array = np.arange(4 << 20, dtype=np.float32)
    whole, fields = binary_request(array)
    fields |= {"Content-Length": str(len(whole)), "shmserve-receipt": "1"}
    connection = http.client.HTTPSConnection("localhost", server.http_port, context=server.tls)
    for _ in range(2):
        connection.putrequest("POST", "/v2/models/echo/infer")
        for name, value in fields.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(whole[: -array.nbytes])
        connection.send(array.data.cast("B"))
        answer = connection.getresponse()
        body = answer.read()
        length = int(answer.headers["Inference-Header-Content-Length"])
        assert np.array_equal(np.frombuffer(body[length:], np.float32), array)
        receipt = json.loads(answer.headers["shmserve-receipt"])
        assert sum(receipt["copied_bytes"].values()) == 0
    connection.close()


def test_a_body_in_pieces_and_one_request_after_another(server: Encrypted) -> None:
    document = b'{"inputs":[{"name":"IN","shape":[1],"datatype":"FP32","data":[5]}]}'
    head = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: localhost\r\n"
    whole = head + b"Content-Length: %d\r\n\r\n" % len(document) + document
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    for byte in range(0, len(document), 7):
        piece = document[byte : byte + 7]
        chunked += b"%x\r\n" % len(piece) + piece + b"\r\n"
    chunked += b"0\r\n\r\n"
    last = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with server.tls.wrap_socket(server.plain(), server_hostname="localhost") as tls:
        tls.sendall(whole + chunked + whole)
        for start in range(0, len(whole), 11):
            tls.sendall(whole[start : start + 11])
        tls.sendall(chunked + last)
        answers = b"".join(iter(lambda: tls.recv(65536), b""))
    assert answers.count(b"HTTP/1.1 200 OK") == 6
    assert answers.count(b'"data":[5.0]') == 5


def test_who_does_not_shake_hands_holds_nobody(server: Encrypted) -> None:
    silent = [server.plain() for _ in range(20)]
    half = server.plain()
    half.sendall(b"\x16\x03\x01\x02\x00\x01")
    speaks_plainly = server.plain()
    speaks_plainly.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert server.request("GET", "/v2/health/ready")[0] == 200
    for sock in (*silent, half, speaks_plainly):
        with sock:  # the server ends each connection; the watchdog waits for the end
            answer = b"".join(iter(lambda s=sock: _rest(s), b""))  # type: ignore[misc]
            assert answer.startswith(b"HTTP/1.1 400") == (sock is speaks_plainly)
    server.wait_log("TLS with")


def _rest(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionResetError:
        return b""


def test_unix_sockets_stay_as_they_are(server: Encrypted) -> None:
    client = Client(server.unix_path)
    assert client.request("GET", "/v2/health/ready")[0] == 200
    client.connection.close()


def test_new_certificates_without_a_restart(server: Encrypted) -> None:
    folder = server.folder
    grpc_port = int(server.grpc_address.rpartition(":")[2])
    known = grpc.ssl_channel_credentials(
        *((folder / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem"))
    )
    ready = "/inference.GRPCInferenceService/ServerReady"
    kept = http.client.HTTPSConnection("localhost", server.http_port, context=server.tls)
    kept.request("GET", "/v2/health/ready")
    assert kept.getresponse().read() == b'{"ready":true}'
    with grpc.secure_channel(server.grpc_address, known) as channel:
        channel.unary_unary(ready)(b"", timeout=WATCHDOG_S)
        for suffix in ("pem", "key"):
            shutil.copy(folder / f"renewed.{suffix}", folder / f"server.{suffix}")

        def renewed() -> bool:
            ports = (server.http_port, grpc_port)
            return all(_name(server, port) == "renewed" for port in ports)

        wait_until(renewed, "new connections have the new certificate")
        channel.unary_unary(ready)(b"", timeout=WATCHDOG_S)
    kept.request("GET", "/v2/health/ready")
    assert kept.getresponse().status == 200
    kept.close()
    (folder / "server.key").write_text("nonsense")

    def told() -> bool:
        assert renewed()
        return server.log().count("the old certificates stay in use") == 2

    wait_until(told, "broken ones change nothing")


def test_another_worker_class_does_not_speak_plainly_instead(tmp_path: Path) -> None:
    make_certificates(tmp_path, "server")
    files: dict[str, Any] = {f"http_tls_{what}": tmp_path / f"server.{end}" for what, end in _ENDS}
    said = failed_start(RunningServer(MODELS, gunicorn=("-k", "gthread"), **files))
    assert "http_tls_cert is for the server's own worker class" in said


def _name(server: Encrypted, port: int) -> str:
    """Return the common name of the server's certificate at a port, HTTP or gRPC."""
    context = server.context("client")
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection((server.http_host, port), WATCHDOG_S) as sock,
        context.wrap_socket(sock, server_hostname="localhost") as tls,
    ):
        return dict(part[0] for part in tls.getpeercert()["subject"])["commonName"]  # type: ignore[misc]
