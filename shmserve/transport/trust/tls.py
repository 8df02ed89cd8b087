"""TLS of the server: certificates, read again when their files have changed."""

import logging
import ssl
import threading
from typing import Any

from msgspec import Struct

from shmserve import bounded_files
from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.transport.trust.file_changes import FileChanges

_log = logging.getLogger("shmserve.tls")

_MOST_BYTES = 1 << 20  # of a file


class CertificateFiles(Struct, frozen=True):
    """PEM files as the settings of a transport name them.

    Attributes:
        door: prefix of the settings' names, such as `http`.
    """

    door: str
    cert: str
    key: str
    client_ca: str

    def check(self) -> bool:
        """Return whether TLS is configured.

        Raises:
            ConfigError: a file is missing in the settings.
        """
        name = f"{self.door}_tls"
        if bool(self.cert) != bool(self.key):
            raise ConfigError(f"{name}_cert and {name}_key: TLS needs both")
        if self.client_ca and not self.cert:
            raise ConfigError(f"{name}_client_ca: needs {name}_cert and {name}_key")
        return bool(self.cert)


class Certificates:
    """Certificates for new connections. Files that have become unusable change nothing, but are
    reported in the log. Thread-safe.

    Args:
        files: paths of the files.
        protocol: the protocol's ALPN name.
    """

    def __init__(self, files: CertificateFiles, protocol: str) -> None:
        self._files = files
        self._protocol = protocol
        self._lock = threading.Lock()
        self._changes = FileChanges(files.cert, files.key, files.client_ca)
        self._failure = ""  # of the last reading; logged once
        self._context = self._read()

    @property
    def due(self) -> bool:
        """Return whether `context` would look at the files now."""
        return self._changes.due

    def context(self) -> ssl.SSLContext:
        """Return the context for a connection that begins now; another object after a change of
        the files."""
        if self._changes.found():
            with self._lock:  # the last reading wins
                try:
                    self._context = self._read()
                    _log.info("%s: new certificates", self._files.door)
                    self._failure = ""
                except ConfigError as ex:
                    self._changes.forget()  # the fault may pass
                    if ex.message != self._failure:
                        self._failure = ex.message
                        _log.error("%s; the old certificates stay in use", ex.message)
        return self._context

    def _read(self) -> ssl.SSLContext:
        files, name = self._files, f"{self._files.door}_tls"
        for which in ("cert", "key", "client_ca"):
            if path := getattr(files, which):  # OpenSSL opens it, and would wait for a FIFO
                bounded_files.read(path, _MOST_BYTES, f"{name}_{which}: {path!r}")
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # Without a password here, OpenSSL asks the terminal for an encrypted key's password.
            context.load_cert_chain(files.cert, files.key, password="")
            if files.client_ca:
                context.load_verify_locations(files.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as ex:
            raise ConfigError(f"{name}_cert, {name}_key: not usable: {ex.strerror}") from None
        context.set_alpn_protocols([self._protocol])
        return context


def certificates(settings: Settings, door: str, protocol: str) -> Certificates | None:
    """Return the certificates of a transport; None without TLS. `door`: prefix of the settings'
    names.

    Raises:
        ConfigError: the certificates cannot be used.
    """
    cert, key, authority = (
        getattr(settings, f"{door}_tls_{which}") for which in ("cert", "key", "client_ca")
    )
    files = CertificateFiles(door, cert, key, authority)
    return Certificates(files, protocol) if files.check() else None


def plain_ports(settings: Settings) -> frozenset[int]:
    """Return the TCP ports of HTTP without TLS where HTTP's other ports have TLS."""
    binds = () if settings.metrics_tls else settings.metrics_bind
    return frozenset(int(bind.rpartition(":")[2]) for bind in binds)


def with_scheme(settings: Settings, listener: str) -> str:
    """Return gunicorn's name of a listener, such as `http://127.0.0.1:8000`, with https if the
    listener has TLS."""
    scheme, separator, address = listener.partition("://")
    port = address.rpartition(":")[2]
    if not settings.http_tls_cert or not separator or int(port) in plain_ports(settings):
        return listener
    return f"{scheme}s://{address}"


def subject_of(tls: ssl.SSLSocket) -> str:
    """Return the subject of a client's certificate, for the log; empty without a certificate."""
    shown: dict[str, Any] = tls.getpeercert() or {}
    names = [f"{name}={value}" for part in shown.get("subject", ()) for name, value in part]
    return ascii(", ".join(names))[1:-1]
