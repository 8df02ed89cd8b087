"""Addresses of a server from its settings, for callers on the server's own host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.config import Settings
from shmserve.errors import ConfigError, Unavailable
from shmserve.transport import rundir

_ANY = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "[::]": "[::1]"}


def http(settings: Settings, url: str | None) -> str:
    """Return the HTTP address for `shmserve.client`: `url` if given, else a Unix socket of
    `http_bind`, else the first address there. Raise ConfigError if no address can be used from this
    host."""
    if url:
        return url
    address = _bound(settings.http_bind)
    if address.startswith("unix:"):
        return address
    if not address or settings.http_tls_cert:
        raise ConfigError("http_bind: no address without TLS can be used from here; give --url")
    return f"http://{address}"


def grpc(settings: Settings, address: str | None) -> str:
    """Return the address for the gRPC library: `address`, or else of `grpc_bind`, as `http`."""
    target = address or _bound(settings.grpc_bind)
    if not target or not settings.grpc_processes:
        raise ConfigError("grpc_bind: no gRPC is served here; give --grpc")
    if not address and settings.grpc_tls_cert and not target.startswith("unix:"):
        raise ConfigError("grpc_bind: no address without TLS can be used from here")
    return target


def client_socket(settings: Settings, url: str | None) -> str | None:
    """Return the path of the client socket from the settings. Return None if `url` is given: the
    settings may belong to another server, so the client looks beside the HTTP socket."""
    if url:
        return None
    return rundir.client_socket(settings)


def _bound(binds: Iterable[str]) -> str:
    usable = [bind for bind in binds if not bind.startswith("fd://")]
    usable.sort(key=lambda bind: not bind.startswith("unix:"))
    if not usable or usable[0].startswith("unix:"):
        return usable[0] if usable else ""
    host, _, port = usable[0].rpartition(":")
    return f"{_ANY.get(host, host)}:{port}"


class Asking:
    """HTTP requests to a server, with a key from a file; a context manager."""

    def __init__(self, url: str, key_file: str | None, timeout_s: float) -> None:
        """Read the key. Raise ConfigError if the address or the file cannot be used."""
        self._headers: Mapping[str, str] = {}
        if key_file:
            try:
                key = Path(key_file).read_text().strip()
            except (OSError, UnicodeDecodeError) as ex:
                raise ConfigError(f"--key-file: cannot be read: {ex}") from None
            self._headers = {"Authorization": f"Bearer {key}"}
        try:
            self._transport = Transport(url, timeout_s)
        except ValueError as ex:
            raise ConfigError(f"--url: {ex}") from None

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, str, bytes]:
        """Return status, error message and body. Raise Unavailable if no answer came."""
        try:
            reply = self._transport.request(method, path, self._headers, [body] if body else ())
        except InferenceError as ex:
            raise Unavailable(str(ex)) from None
        return reply.status, reply.error if reply.status >= 400 else "", reply.body.tobytes()

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()
