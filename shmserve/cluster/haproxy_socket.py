"""HAProxy's runtime API: commands on its stats socket."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterable, Mapping

from shmserve.cluster import haproxy_slots
from shmserve.cluster.haproxy_slots import Address
from shmserve.errors import Unavailable

_TIMEOUT_S = 5.0
_AT_ONCE = 100  # commands: a line has to fit HAProxy's buffer, of 16 KiB
_LONGEST = 64 << 20  # bytes of an answer

_log = logging.getLogger(__name__)


class Balancer:
    """One HAProxy. `address`: the path of its socket, or HOST:PORT."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._told: list[str] = []

    def route(self, wanted: Mapping[str, Mapping[Address, int]]) -> int:
        """Make its servers what is wanted; how many commands that took.

        Raises:
            Unavailable: it cannot be reached, or does not answer as it should.
        """
        found = haproxy_slots.slots(self.ask(["show servers state"]))
        commands, problems = haproxy_slots.changes(found, wanted)
        known = {slot.backend for slot in found}
        problems += [f"it has no backend {name}" for name in wanted if name not in known]
        for start in range(0, len(commands), _AT_ONCE):
            self.ask(commands[start : start + _AT_ONCE])
        if problems != self._told:
            for problem in problems:
                _log.error("balancer %s: %s", self.address, problem)
            self._told = problems
        return len(commands)

    def ask(self, commands: Iterable[str]) -> str:
        """The answers to some commands, one after the other. Raises Unavailable."""
        deadline = time.monotonic() + _TIMEOUT_S
        try:
            with self._connected() as sock:
                sock.sendall((";".join(commands) + "\n").encode())
                pieces = []
                total = 0
                while piece := sock.recv(1 << 16):
                    pieces.append(piece)
                    total += len(piece)
                    if total > _LONGEST or time.monotonic() > deadline:
                        raise Unavailable(f"balancer {self.address}: its answer has no end")
        except OSError as ex:
            raise Unavailable(f"balancer {self.address}: {ex.strerror or ex}") from ex
        return b"".join(pieces).decode(errors="replace")

    def _connected(self) -> socket.socket:
        if "/" not in self.address:
            host, _, port = self.address.rpartition(":")
            return socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(_TIMEOUT_S)
            sock.connect(self.address)
        except BaseException:
            sock.close()
            raise
        return sock
