"""HAProxy's runtime API: commands on its stats socket."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping

from shmserve.cluster import haproxy_slots
from shmserve.cluster.haproxy_slots import Address
from shmserve.errors import Unavailable

_TIMEOUT_S = 5.0  # of all that is asked and said at once
_AT_ONCE = 100  # commands: a line has to fit HAProxy's buffer, of 16 KiB
_LONGEST = 64 << 20  # bytes of an answer
_SHOWN = 20  # problems
_SEVERITIES = "set severity-output number"  # before each answer then stands "[N]: "
_WRONG = ("[0]: ", "[1]: ", "[2]: ", "[3]: ", "[4]: Invalid")

_log = logging.getLogger(__name__)


class Balancer:
    """One HAProxy. `address`: the path of its socket, or HOST:PORT."""

    def __init__(self, address: str) -> None:
        self.address = address

    def route(self, wanted: Mapping[str, Mapping[Address, int]]) -> tuple[int, list[str]]:
        """Make its servers what is wanted; how many commands that took, and what it could not do,
        in words.

        Raises:
            Unavailable: it cannot be reached, or does not answer as it should.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        found = haproxy_slots.slots(self.ask(["show servers state"], deadline))
        commands, problems = haproxy_slots.changes(found, wanted)
        known = {slot.backend for slot in found}
        problems += [f"it has no backend {name}" for name in wanted if name not in known]
        for start in range(0, len(commands), _AT_ONCE):
            said = self.ask([_SEVERITIES, *commands[start : start + _AT_ONCE]], deadline)
            problems += [line[5:] for line in said.splitlines() if line.startswith(_WRONG)]
        return len(commands), problems[:_SHOWN]

    def ask(self, commands: Iterable[str], deadline: float | None = None) -> str:
        """The answers to some commands, one after the other. Raises Unavailable."""
        deadline = time.monotonic() + _TIMEOUT_S if deadline is None else deadline
        try:
            with self._connected(_left_s(deadline)) as sock:
                sock.sendall((";".join(commands) + "\n").encode())
                pieces = []
                total = 0
                while piece := sock.recv(1 << 16):
                    pieces.append(piece)
                    total += len(piece)
                    if total > _LONGEST:
                        raise Unavailable(f"balancer {self.address}: its answer has no end")
                    sock.settimeout(_left_s(deadline))
        except OSError as ex:
            raise Unavailable(f"balancer {self.address}: {ex.strerror or ex}") from ex
        return b"".join(pieces).decode(errors="replace")

    def _connected(self, timeout_s: float) -> socket.socket:
        if "/" not in self.address:
            host, _, port = self.address.rpartition(":")
            return socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect(self.address)
        except BaseException:
            sock.close()
            raise
        return sock


def _left_s(deadline: float) -> float:
    """Seconds until then. Raises TimeoutError: none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


class ToldBalancer:
    """A balancer and the thread that tells it: one that does not answer holds up nobody else.
    Its owner calls `start` and `stop`. `problems`: what was wrong last, in words."""

    def __init__(self, address: str) -> None:
        self.problems: tuple[str, ...] = ()
        self._balancer = Balancer(address)
        self._changed = threading.Condition()
        self._wanted: Mapping[str, Mapping[Address, int]] | None = None  # None: it has been told
        self._end = False
        self._thread = threading.Thread(target=self._run, name=f"balancer {address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, wanted: Mapping[str, Mapping[Address, int]]) -> None:
        """Have its servers be what is wanted. Returns at once; only the last one counts."""
        with self._changed:
            self._wanted = wanted
            self._changed.notify()

    def stop(self) -> None:
        """Returns when it has been told what it should be last, or could not be."""
        with self._changed:
            self._end = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(2 * _TIMEOUT_S + 1)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._end or self._wanted is not None)
                wanted, self._wanted = self._wanted, None
            if wanted is None:
                return
            try:
                found = tuple(self._balancer.route(wanted)[1])
                problems = tuple(f"balancer {self._balancer.address}: {what}" for what in found)
            except Unavailable as ex:
                problems = (ex.message,)
            except Exception as ex:  # nobody else would tell it
                _log.exception("balancer %s could not be told", self._balancer.address)
                problems = (f"balancer {self._balancer.address}: {type(ex).__name__}",)
            for problem in problems:
                if problem not in self.problems:
                    _log.warning("%s", problem)
            self.problems = problems
