"""Listeners of the gRPC processes: addresses, socket files, TLS.

Several processes share a TCP address (SO_REUSEPORT). The gunicorn master keeps the address for
these processes (`supervisor.launch`), so no other program can take it. Only process 0 listens on
Unix sockets: of several processes, only the last to bind would get clients.
"""

import os
import socket
import time
from collections.abc import Callable, Iterable

from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.transport import rundir
from shmserve.transport.listen_addresses import ListenAddress, listeners, make_way, parse
from shmserve.transport.trust.tls import Certificates, certificates

Adopt = Callable[[socket.socket, Certificates | None], object]
"""Serves on a listening socket, with TLS or without."""

_BACKLOG = 1024
_OTHERS_S = 10.0  # seconds that another process of this service may take to bind


class AlreadyRuns(Exception):
    """Another process has the same number."""


class Listening:
    """The addresses of one process, from `bind` until `close`. Keeps the process's lock.
    `addresses`: used instead of `grpc_bind`; empty if sockets were passed to the process."""

    def __init__(
        self, settings: Settings, run_dir: str, number: int, addresses: Iterable[str] | None = None
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._number = number
        self._binding = rundir.lock(run_dir, "grpc-bind")
        self._own = rundir.lock(run_dir, f"grpc-{number}")
        self._sockets: list[tuple[str, int]] = []  # socket files and their inodes
        texts = settings.grpc_bind if addresses is None else addresses
        self.binds = [parse("grpc_bind", text) for text in texts]
        self.certificates = certificates(settings, "grpc", "h2")

    def bind(self, adopt: Adopt) -> list[str]:
        """Listen on every address, and pass the sockets to `adopt` of a server that has not been
        started. Return the bound addresses. Raise AlreadyRuns if another process with this number
        listens already. Raise ConfigError with the address that cannot be bound."""
        self._await_others()
        try:
            if self._own.holder() is not None:  # the holder of the lock listens
                raise AlreadyRuns
            binds = [bind for bind in self.binds if not bind.path or self._number == 0]
            bound = [self._bind(adopt, bind) for bind in binds]
            if not self._own.acquire():
                raise AlreadyRuns
            return bound
        finally:
            self._binding.release()

    def beat(self) -> bool:
        """Give this process's sign of life. Return False if the lock is missing from the run
        directory, else True."""
        return self._own.beat()

    def close(self) -> None:
        """Remove socket files, unless another process has replaced them, and free the lock."""
        for path, inode in self._sockets:
            try:
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)
            except OSError:
                continue  # the file is gone already
        self._own.release()

    def _await_others(self) -> None:
        deadline = time.monotonic() + _OTHERS_S
        while not self._binding.acquire():
            if time.monotonic() > deadline:
                holder = self._binding.holder()
                raise ConfigError(f"grpc_bind: process {holder} is binding and does not end")
            time.sleep(0.01)

    def _bind(self, adopt: Adopt, bind: ListenAddress) -> str:
        if bind.path:
            make_way("grpc_bind", bind.path)
        umask = os.umask(0o777 & ~int(self._settings.grpc_socket_mode, 8))
        try:
            sockets = listeners("grpc_bind", bind, _BACKLOG, takes_ipv4=True)
        except OSError as ex:
            reason = f"cannot listen on {bind.text}: {ex.strerror}"
            raise ConfigError(f"grpc_bind: {reason}") from None
        finally:
            os.umask(umask)
        for sock in sockets:
            adopt(sock, self.certificates)
        if not bind.path:
            return f"{bind.text.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"
        self._sockets.append((bind.path, os.lstat(bind.path).st_ino))
        return bind.text
