"""Addresses of servers, connections to them, and sentences for connections that fail."""

import contextlib
import http.client
import re
import socket
import ssl
import urllib.parse
from collections.abc import Iterator

from shmserve.client.wire.credentials import Credentials
from shmserve.client.wire.inference_error import LATE, InferenceError

_FORMS = "a server's address is http://HOST:PORT, https://HOST:PORT or unix:/PATH"
_USER = re.compile(r"(\w+://)?.*@", re.DOTALL)  # what an address may have before its host
_LOOPBACK = re.compile(r"127(\.[0-9]{1,3}){3}|::1").fullmatch
_EXPIRED = 10  # codes of OpenSSL for certificates
_UNKNOWN_AUTHORITY = (18, 19, 20, 21)
_OTHER_NAME = (62, 64)
_CERTIFICATE_WANTED = ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE")
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")


class ServerAddress:
    """Address of a server, which opens connections.

    Attributes:
        unix_path: path of the server's Unix socket; "": the address is a TCP address.
        prefix: path before each request's path.
    """

    def __init__(self, url: str, credentials: Credentials, protocol: str = "http/1.1") -> None:
        """Parse the address. `protocol`: name for TLS, as in `Credentials.context`. Raise
        ValueError if the address has another form, or a user or password, which the text does not
        repeat; if a file of `credentials` cannot be used, or if
        `credentials` has files for TLS and the address is http://."""
        self.unix_path, self.prefix = "", ""
        self._host, self._port = "localhost", 80
        self._context: ssl.SSLContext | None = None
        if url.startswith("unix:"):
            self.unix_path = "/" + url.removeprefix("unix:").lstrip("/")
            return
        shown = _USER.sub(r"\1", url, count=1)
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError:  # its text may have all of the address
            raise ValueError(f"{_FORMS}, not {shown}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{_FORMS}, not {shown}")
        if "@" in parts.netloc:
            place = f"{parts.scheme}://{parts.hostname}"
            raise ValueError(f"{_FORMS}, without a user and a password: {place}")
        if parts.scheme == "https":
            self._context = credentials.context(protocol)
        elif credentials.ca or credentials.cert:
            raise ValueError(f"{'ca' if credentials.ca else 'cert'}: needs an address https://")
        self._host = parts.hostname
        self._port = port or (80 if self._context is None else 443)
        self.prefix = parts.path.rstrip("/")

    @property
    def is_local(self) -> bool:
        """Return True if the server is certainly on this host, False if it may be elsewhere."""
        return (
            bool(self.unix_path) or self._host == "localhost" or _LOOPBACK(self._host) is not None
        )

    @property
    def authority(self) -> str:
        """Return host and port, as requests name them."""
        if self.unix_path:
            return self._host
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def connection(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a new connection, which the first request opens."""
        if self.unix_path:
            return UnixConnection(self.unix_path, timeout_s)
        place = (self._host, self._port)
        if self._context is None:
            return http.client.HTTPConnection(*place, timeout=timeout_s)
        return TlsConnection(*place, timeout=timeout_s, context=self._context)


class TlsConnection(http.client.HTTPSConnection):
    """HTTP over TLS. A connection that is reset in the handshake fails as one that ends."""

    def connect(self) -> None:
        try:
            super().connect()
        except (ConnectionResetError, BrokenPipeError) as ex:
            raise ssl.SSLEOFError(*ex.args) from None


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


@contextlib.contextmanager
def failures(connection: http.client.HTTPConnection) -> Iterator[None]:
    """Close the connection on any exception. Make timeouts and lost connections InferenceError,
    whose cause has no frames: a frame of http.client has the key among its local variables."""
    try:
        yield
    except TimeoutError as ex:
        connection.close()
        raise InferenceError(0, LATE) from ex.with_traceback(None)
    except (OSError, http.client.HTTPException) as ex:
        connection.close()
        raise InferenceError(
            0, f"no answer from the server at {_place(connection)}: {_why(ex, connection.host)}"
        ) from ex.with_traceback(None)
    except BaseException:  # e.g. KeyboardInterrupt: the rest of the response is still unread
        connection.close()
        raise


def _why(ex: Exception, host: str) -> str:
    if type(ex) is http.client.BadStatusLine:
        return "it does not speak HTTP/1.1; is it gRPC's port?"
    if isinstance(ex, ssl.SSLCertVerificationError):
        return _why_not_trusted(ex, host)
    if isinstance(ex, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return "it ended the connection before TLS was agreed"
    if isinstance(ex, ssl.SSLError):
        if ex.reason in _CERTIFICATE_WANTED:
            return "it asks for a client's certificate (cert, cert_key)"
        if ex.reason in _NO_TLS:
            return "it does not speak TLS there; is its address http://?"
        return f"TLS failed: {ex.reason or ex.strerror}"
    return str(ex)


def _why_not_trusted(ex: ssl.SSLCertVerificationError, host: str) -> str:
    if ex.verify_code == _EXPIRED:
        return "its certificate has expired"
    if ex.verify_code in _UNKNOWN_AUTHORITY:
        return (
            "its certificate is signed by no authority that this client trusts: name the"
            " authority's file (ca, or SSL_CERT_FILE)"
        )
    if ex.verify_code in _OTHER_NAME:
        return f"its certificate is not for {host}: use a name that the certificate has"
    return f"its certificate cannot be trusted: {ex.verify_message}"


def _place(connection: http.client.HTTPConnection) -> str:
    if isinstance(connection, UnixConnection):
        return f"unix:{connection.path}"
    scheme = "https" if isinstance(connection, http.client.HTTPSConnection) else "http"
    return f"{scheme}://{connection.host}:{connection.port}"
