"""Addresses of a server from its settings, for callers on the server's own host."""

from __future__ import annotations

import argparse
import ssl
from collections.abc import Iterable

from shmserve.client.wire.credentials import Credentials
from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.config import Settings
from shmserve.errors import ConfigError, Unavailable
from shmserve.transport import rundir

_GRPCS = "grpcs://"
_ARGUMENTS = ("key", "key_file", "ca", "cert", "cert_key")
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
    if not address:
        raise ConfigError("http_bind: no address can be used from here; give --url")
    return f"http{'s' if settings.http_tls_cert else ''}://{address}"


def grpc(settings: Settings, address: str | None) -> tuple[str, bool]:
    """Return the address of gRPC, and whether the server has TLS there: `address`, or
    else of `grpc_bind`, as `http`."""
    target = address or _bound(settings.grpc_bind)
    if not target or not settings.grpc_processes:
        raise ConfigError("grpc_bind: no gRPC is served here; give --grpc")
    if address:
        return address.removeprefix(_GRPCS), address.startswith(_GRPCS)
    return target, bool(settings.grpc_tls_cert) and not target.startswith("unix:")


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


def credentials(arguments: argparse.Namespace) -> Credentials:
    """Return key and certificates of the command line. Raise ConfigError for an unusable key."""
    given = arguments
    try:
        return Credentials(given.key, given.key_file, given.ca, given.cert, given.cert_key)
    except ValueError as ex:
        raise refusal(ex) from None


def refusal(ex: ValueError, option: str = "--url") -> ConfigError:
    """Return the error for an argument that `shmserve.client` refuses. `option`: option of the
    address."""
    name, separator, reason = str(ex).partition(": ")
    if name not in _ARGUMENTS or not separator:
        return ConfigError(f"{option}: {ex}")
    return ConfigError(f"--{name.replace('_', '-')}: {reason}")


class Asking:
    """HTTP requests to a server; a context manager."""

    def __init__(self, url: str, credentials: Credentials, timeout_s: float) -> None:
        """Raise ConfigError if the address or a file of `credentials` cannot be used."""
        try:
            self._transport = Transport(url, timeout_s, credentials)
        except ValueError as ex:
            raise refusal(ex) from None

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, str, bytes]:
        """Return status, error message and body. Raise Unavailable if no answer came, or
        ConfigError if the server's certificate is not trusted, which no wait changes."""
        try:
            reply = self._transport.request(method, path, None, [body] if body else ())
        except InferenceError as ex:
            is_trusted = not isinstance(ex.__cause__, ssl.SSLCertVerificationError)
            raise (Unavailable if is_trusted else ConfigError)(str(ex)) from None
        return reply.status, reply.error if reply.status >= 400 else "", reply.body.tobytes()

    def __enter__(self) -> Asking:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()
