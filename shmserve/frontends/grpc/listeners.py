"""Where the gRPC processes listen: addresses, socket files, TLS.

Several processes share a TCP address (SO_REUSEPORT); Unix sockets are process 0's alone,
since their clients would else be those of whoever bound last.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterable

import grpc
from msgspec import Struct

from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.frontends.grpc.rpc_methods import Ports
from shmserve.transport import rundir
from shmserve.transport.processes import FileLock
from shmserve.transport.tls import Certificates, certificates

_OTHERS_S = 10.0  # how long another process of this service may take to bind
_PROBE_S = 1.0
_READ_WRITE_OF_OTHERS = 0o066


class Bind(Struct, frozen=True):
    """One address of `grpc_bind`: `path` of a Unix socket, or host and port."""

    text: str
    host: str = ""
    port: int = 0
    path: str = ""


class AlreadyRuns(Exception):
    """Another process has this one's number."""


def parse(text: str) -> Bind:
    """An address as the settings have it: ``HOST:PORT``, ``[::1]:PORT``, ``unix:PATH``.

    Raises:
        ConfigError: it is none.
    """
    if text.startswith("unix:"):
        path = os.path.abspath(text.removeprefix("unix:"))
        return Bind(f"unix:{path}", path=path)
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(f"grpc_bind: {text!r} is no HOST:PORT and no unix:PATH")
    return Bind(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", host, int(port))


def private(settings: Settings) -> bool:
    """Whether nobody but the server's own user (and root) can connect to its Unix sockets."""
    return not int(settings.grpc_socket_mode, 8) & _READ_WRITE_OF_OTHERS


def credentials(settings: Settings) -> grpc.ServerCredentials | Certificates | None:
    """What TLS needs of the engine, from its files; None: TCP connections are not encrypted.

    Raises:
        ConfigError: a file is missing.
    """
    found = certificates(settings, "grpc", "h2")
    if found is None or settings.grpc_server == "http2":
        return found
    return _following(found)


def _following(files: Certificates) -> grpc.ServerCredentials:
    """For the `grpcio` library, which asks at each connection whether there are others."""
    latest = files.context()

    def current() -> grpc.ServerCertificateConfiguration:
        cert, key, authority = files.pems
        return grpc.ssl_server_certificate_configuration([(key, cert)], authority or None)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal latest
        context, latest = latest, files.context()
        return None if latest is context else current()

    mutual = bool(files.pems[2])
    return grpc.dynamic_ssl_server_credentials(current(), changed, mutual)


class Listening:
    """The addresses of one process, from `bind` until `close`. Keeps the process's lock.

    `addresses`: in place of `grpc_bind`; none where sockets were passed.
    """

    def __init__(
        self, settings: Settings, run_dir: str, number: int, addresses: Iterable[str] | None = None
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._number = number
        self._binding = rundir.lock(run_dir, "grpc-bind")
        self._own = rundir.lock(run_dir, f"grpc-{number}")
        self._sockets: list[tuple[str, int]] = []  # files and their inodes
        self.binds = [
            parse(text) for text in (settings.grpc_bind if addresses is None else addresses)
        ]
        self.credentials = credentials(settings)

    def bind(self, server: Ports) -> list[str]:
        """Add every address to a server that has not been started; returns what is bound.

        Raises:
            AlreadyRuns: another process does what this one should.
            ConfigError: an address that cannot be bound; the message names it.
        """
        self._await_others()
        try:
            # A lock means: listens. While others do, only this service's can share the port.
            if self._own.holder() is not None:
                raise AlreadyRuns
            alone = not any(self._locks_of_others())
            bound = []
            for bind in self.binds:
                if bind.path:
                    if self._number == 0:
                        self._bind_unix(server, bind)
                        bound.append(bind.text)
                else:
                    bound.append(self._bind_tcp(server, bind, alone))
            if not self._own.acquire():
                raise AlreadyRuns
            return bound
        finally:
            self._binding.release()

    def beat(self) -> bool:
        """This process's sign of life; False: the run directory has lost its lock."""
        return self._own.beat()

    def close(self) -> None:
        """Remove socket files (unless they are another's by now) and free the lock."""
        for path, inode in self._sockets:
            try:
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)
            except OSError:
                continue  # gRPC has removed it
        self._own.release()

    def _await_others(self) -> None:
        deadline = time.monotonic() + _OTHERS_S
        while not self._binding.acquire():
            if time.monotonic() > deadline:
                holder = self._binding.holder()
                raise ConfigError(f"grpc_bind: process {holder} is binding and does not end")
            time.sleep(0.01)

    def _locks_of_others(self) -> list[int]:
        """Pids of this service's other gRPC processes that listen."""
        numbers = set(range(self._settings.grpc_processes)) - {self._number}
        locks: list[FileLock] = [rundir.lock(self._run_dir, f"grpc-{n}") for n in numbers]
        return [pid for lock in locks if (pid := lock.holder()) is not None]

    def _bind_tcp(self, server: Ports, bind: Bind, alone: bool) -> str:
        if alone:
            _probe(bind)
        port = _add(server, bind, self.credentials)
        return f"{bind.text.rpartition(':')[0]}:{port}"

    def _bind_unix(self, server: Ports, bind: Bind) -> None:
        _make_way(bind.path)
        umask = os.umask(0o777 & ~int(self._settings.grpc_socket_mode, 8))
        try:
            _add(server, bind, None)
        finally:
            os.umask(umask)
        self._sockets.append((bind.path, os.lstat(bind.path).st_ino))


def _add(server: grpc.Server, bind: Bind, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return int(server.add_insecure_port(bind.text))
        return int(server.add_secure_port(bind.text, credentials))
    except RuntimeError as ex:
        raise ConfigError(f"grpc_bind: cannot listen on {bind.text}: {ex}") from None


def _probe(bind: Bind) -> None:
    """Refuse an address somebody else listens on, even one who would share it."""
    try:
        addresses = socket.getaddrinfo(
            bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as ex:
        raise ConfigError(f"grpc_bind: {bind.text} has no address: {ex.strerror}") from None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind(address)
            except OSError as ex:
                raise ConfigError(
                    f"grpc_bind: cannot listen on {bind.text}: {ex.strerror}"
                ) from None


def _make_way(path: str) -> None:
    """Remove the socket file of a process that is gone.

    Raises:
        ConfigError: somebody listens there, or it is no socket.
    """
    if len(os.fsencode(path)) > 107:
        raise ConfigError(f"grpc_bind: unix:{path} is too long for a Unix socket")
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    except OSError as ex:
        raise ConfigError(f"grpc_bind: cannot listen on unix:{path}: {ex.strerror}") from None
    if not stat.S_ISSOCK(info.st_mode):
        raise ConfigError(f"grpc_bind: unix:{path} is there already and no socket")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_PROBE_S)
        try:
            sock.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)  # what a process left that was killed
            return
        except OSError as ex:
            raise ConfigError(f"grpc_bind: cannot listen on unix:{path}: {ex.strerror}") from None
    raise ConfigError(f"grpc_bind: another process listens on unix:{path}")
