"""Remote addresses: listening addresses behind a proxy, where no caller counts as local."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

_ANY = ("0.0.0.0", "::")


class RemoteAddresses:
    """Set of listening addresses, in the form of the settings: ``HOST:PORT``, ``[::1]:PORT``,
    ``unix:PATH``. An address of all interfaces stands for its port on every interface."""

    def __init__(self, binds: Iterable[str]) -> None:
        self._paths: set[str] = set()
        self._pairs: set[tuple[str, int]] = set()
        self._ports: set[int] = set()
        for bind in binds:
            if bind.startswith("unix:"):
                self._paths.add(os.path.abspath(bind.removeprefix("unix:")))
            else:
                self._add(bind)

    def _add(self, bind: str) -> None:
        host, _, port = bind.rpartition(":")
        for *_, address in socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            if address[0] in _ANY:
                self._ports.add(int(port))
            else:
                self._pairs.add((str(address[0]), int(port)))

    def __contains__(self, own: object) -> bool:
        """Return whether `own`, a connection's local address from `getsockname`, is in the set."""
        if isinstance(own, str):
            return bool(self._paths) and os.path.abspath(own) in self._paths
        if not isinstance(own, tuple) or not (self._pairs or self._ports):
            return False
        host = str(own[0]).removeprefix("::ffff:")
        return own[1] in self._ports or (host, own[1]) in self._pairs
