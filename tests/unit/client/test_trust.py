"""Sentences for servers without a client's trust, or without the protocol."""

import asyncio
import contextlib
import http.client
import http.server
import select
import socket
import ssl
import struct
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmserve import cli
from shmserve.client import InferenceError, aio, api
from shmserve.client.wire.credentials import Credentials
from shmserve.client.wire.http_transport import Transport
from tests.tls_files import make_certificates

pytestmark = pytest.mark.needs("openssl")
KEY = "shmk_hidden"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of certificates: `expired.pem` has ended, `other` has another authority."""
    folder = make_certificates(tmp_path_factory.mktemp("tls"), "server")
    sign = "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -extfile ext -days -1"
    words = [*sign.split(), "-CAcreateserial", "-out", "expired.pem"]
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)
    (folder / "other").mkdir()
    make_certificates(folder / "other", "client")
    return folder


@contextlib.contextmanager
def serving(
    certificate: Path | None, host: str = "127.0.0.1", mutual: bool = False
) -> Iterator[str]:
    """Yield HOST:PORT of a server that answers 404, with TLS if a certificate is given. `mutual`:
    the server asks for a client's certificate."""
    server = http.server.ThreadingHTTPServer((host, 0), Silent)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, certificate.parent / "server.key")
        context.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Silent(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *_: object) -> None: ...


def why(url: str, credentials: Credentials | None = None) -> str:
    """Return the reason if no answer comes, "" after an answer."""
    transport = Transport(url, 30.0, credentials)
    try:
        transport.request("GET", "/")
        return ""
    except InferenceError as ex:
        return ex.message.removeprefix(f"no answer from the server at {url}: ")
    finally:
        transport.close()


def test_authorities(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = (
        "its certificate is signed by no authority that this client trusts: name the authority's"
        " file (ca, or SSL_CERT_FILE)"
    )
    with serving(folder / "server.pem") as place:
        url = f"https://{place}"
        assert why(url, Credentials(ca=folder / "ca.pem")) == ""
        assert why(url, Credentials(ca=folder / "other/ca.pem")) == nobody
        assert why(url) == nobody
        monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
        assert why(url) == ""


def test_the_command_ready_does_not_wait_for_trust(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(folder / "server.pem") as place:
        where = ["--url", f"https://{place}", "--ca", str(folder / "other/ca.pem")]
        assert cli.main(["ready", "--wait", "60", *where]) == 2
    assert "signed by no authority that this client trusts" in capsys.readouterr().err


def test_certificates_that_are_not_good(folder: Path) -> None:
    trusted = Credentials(ca=folder / "ca.pem")
    with serving(folder / "expired.pem") as place:
        assert why(f"https://{place}", trusted) == "its certificate has expired"
    with serving(folder / "server.pem", "127.0.0.2") as place:
        expected = "its certificate is not for 127.0.0.2: use a name that the certificate has"
        assert why(f"https://{place}", trusted) == expected


def test_a_refusal_that_comes_before_the_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = http.client.HTTPSConnection.connect

    def connect_and_wait(connection: http.client.HTTPSConnection) -> None:
        connect(connection)
        ended = select.poll()
        ended.register(connection.sock, 0)  # POLLHUP
        assert ended.poll(60_000)

    monkeypatch.setattr(http.client.HTTPSConnection, "connect", connect_and_wait)
    with serving(folder / "server.pem", mutual=True) as place:
        expected = "it asks for a client's certificate (cert, cert_key)"
        assert why(f"https://{place}", Credentials(ca=folder / "ca.pem")) == expected


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_in_the_handshake(reset: bool) -> None:
    def close_two() -> None:
        for _ in range(2):
            accepted = server.accept()[0]
            linger = struct.pack("ii", reset, 0)  # with 0 s, closing resets the connection
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            accepted.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"https://127.0.0.1:{server.getsockname()[1]}"
        closing = threading.Thread(target=close_two)
        closing.start()
        assert why(url) == "it ended the connection before TLS was agreed"
        closing.join()


def test_a_server_without_tls(folder: Path) -> None:
    with serving(None) as place:
        expected = "it does not speak TLS there; is its address http://?"
        assert why(f"https://{place}") == expected


def test_files_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    ours = folder / "server.pem"
    for options, text in (
        ({"ca": "/none"}, "ca: /none cannot be read: No such file or directory"),
        ({"ca": folder / "ext"}, "is not a PEM file of certificates"),
        ({"cert": ours, "cert_key": folder / "other/client.key"}, "is not a PEM certificate and"),
        ({"cert": "/none"}, "cert: /none cannot be read: No such file or directory"),
    ):
        with pytest.raises(ValueError, match=text):
            Transport("https://a", 1.0, Credentials(**options))
    key = tmp_path / "key"
    key.write_bytes(b"secret\xff")
    with pytest.raises(ValueError, match="key_file: a key is one word of printable") as caught:
        Credentials(key_file=key)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="key: a key is one word"):
        Credentials("two\nwords")


def shown(call: Callable[[], object], error: type[Exception]) -> str:
    """Return a call's exception as a report with local variables shows the exception."""
    with pytest.raises(error) as caught:
        call()
    # without the tests' own frames, which have the key
    trace = caught.tb
    while trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    report = traceback.TracebackException(error, caught.value, trace, capture_locals=True)
    return "".join(report.format())


def test_no_report_shows_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # reads nothing
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        transport = Transport(url, 0.2, Credentials(KEY))
        large = [b"x" * (1 << 26)]
        assert KEY not in shown(lambda: transport.request("POST", "/", body=large), InferenceError)
    malformed = f"{KEY} \u00e9"
    (tmp_path / "key").write_text(malformed)
    assert KEY not in shown(lambda: Credentials(malformed), ValueError)
    assert KEY not in shown(lambda: Credentials(key_file=tmp_path / "key"), ValueError)
    assert KEY not in shown(lambda: api.connect("http://a", look_us=-1, key=KEY), ValueError)
    assert KEY not in shown(lambda: asyncio.run(connected("ftp://a", KEY)), ValueError)
    monkeypatch.setenv("SHMSERVE_KEY", malformed)
    assert KEY not in shown(Credentials, ValueError)


async def connected(url: str, key: str) -> None:
    context = aio.connect(url, key=key)
    del key
    async with context:
        pass
