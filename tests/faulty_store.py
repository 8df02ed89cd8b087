"""Stores for tests: moto's S3 server as a process, and a proxy that corrupts answers."""

import http.client
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.running_server import free_port, wait_until

SECRET = "not-for-any-log"
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_WAIT_S = 60.0
# moto lets any caller with a key, valid or not, replace objects
_CREDENTIAL = "Credential=AKIDEXAMPLE/20260101/us-east-1/s3/aws4_request"
_ANYBODY = {
    "Authorization": f"AWS4-HMAC-SHA256 {_CREDENTIAL}, SignedHeaders=host, Signature=0",
    "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
}


class Moto:
    """moto's S3 server, empty."""

    def __init__(self) -> None:
        self.port = free_port()
        program = (
            "from moto.server import ThreadedMotoServer as S; import sys, threading\n"
            "S(ip_address='127.0.0.1', port=int(sys.argv[1])).start(); threading.Event().wait()"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: self._answers("GET", "/") == 200, "moto answers")
        except TimeoutError:
            self.stop()
            raise

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(_WAIT_S)

    def make_bucket(self, name: str) -> None:
        assert self._answers("PUT", f"/{name}") == 200

    def put(self, key: str, data: bytes) -> None:
        """An object, by bucket/key; keys of access are not looked at."""
        assert (status := self._answers("PUT", f"/{key}", data)) == 200, status

    def put_folder(self, folder: Path, key: str) -> None:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                self.put(f"{key}/{path.relative_to(folder)}", path.read_bytes())

    def delete(self, key: str) -> None:
        assert self._answers("DELETE", f"/{key}") == 204

    def _answers(self, method: str, path: str, body: bytes | None = None) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_WAIT_S)
        try:
            connection.request(method, path, body, _ANYBODY)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()


class Faulty:
    """HTTP proxy before a store. `faults`: fault by the end of the path:

    ``truncate`` (half of the answer, then the end), ``short`` (half, as if complete), ``longer``,
    ``corrupt``, ``stall`` (half, then nothing until `go_on` is set), ``refuse`` (403), or the
    origin to which a redirect leads. `asked`: paths of GET requests; `fields`: header fields of
    requests.
    """

    def __init__(self, upstream: int) -> None:
        self.faults: dict[str, str] = {}
        self.asked: list[str] = []
        self.fields: list[dict[str, str]] = []
        self.go_on = threading.Event()
        self._server: ThreadingHTTPServer | None = None
        self.upstream = upstream
        self.port = free_port()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                faulty._forward(self)

            do_HEAD = do_PUT = do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,)).start()

    def stop(self) -> None:
        """Stop listening; `start` listens at the same port again."""
        self.go_on.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def reset(self) -> None:
        """Listen, without faults from here on; nothing has been asked."""
        if self._server is None:
            self.start()
        self.faults, self.go_on = {}, threading.Event()
        self.asked.clear()
        self.fields.clear()

    def fault_of(self, path: str) -> str:
        path = path.partition("?")[0]
        return next((fault for end, fault in self.faults.items() if path.endswith(end)), "")

    def _forward(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.command == "GET":
            self.asked.append(handler.path)
        self.fields.append(dict(handler.headers.items()))
        length = int(handler.headers.get("Content-Length", 0))
        upstream = http.client.HTTPConnection("127.0.0.1", self.upstream, timeout=_WAIT_S)
        upstream.request(
            handler.command, handler.path, handler.rfile.read(length), dict(handler.headers.items())
        )
        answer = upstream.getresponse()
        status, fields, body = answer.status, dict(answer.getheaders()), answer.read()
        upstream.close()
        try:
            self._send(handler, status, fields, body)
        except OSError:
            handler.close_connection = True

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, fields: dict[str, str], body: bytes
    ) -> None:
        fault = self.fault_of(handler.path) if handler.command == "GET" else ""
        if fault.startswith("http"):
            status, body, fields = 302, b"", {"Location": fault + handler.path}
        if fault == "refuse":
            status, body = 403, b"<Error><Code>AccessDenied</Code></Error>"
        if fault == "corrupt":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "longer":
            body += b"x" * 100
        if fault == "short":
            body = body[: len(body) // 2]
        handler.send_response(status)
        for name, value in fields.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date"):
                handler.send_header(name, value)
        size = fields.get("Content-Length", "0") if handler.command == "HEAD" else len(body)
        handler.send_header("Content-Length", str(size))
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        if handler.command == "HEAD":
            return
        if fault in ("truncate", "stall"):
            handler.wfile.write(body[: len(body) // 2])
            handler.wfile.flush()
            if fault == "truncate":
                return
            self.go_on.wait(_WAIT_S)
            body = body[len(body) // 2 :]
        handler.wfile.write(body)


class FolderServer:
    """The web server of Python's library, with a folder."""

    def __init__(self, folder: Path) -> None:
        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,)).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
