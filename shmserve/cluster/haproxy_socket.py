"""HAProxy's runtime API: commands on the stats socket, and a thread that keeps a HAProxy up to
date."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterable, Mapping

from shmserve.cluster import haproxy_slots
from shmserve.cluster.haproxy_slots import Address
from shmserve.errors import Unavailable

_TIMEOUT_S = 5.0  # seconds for all questions of a round
_AT_ONCE = 100  # commands per line, which must fit HAProxy's buffer of 16 KiB
_LONGEST = 64 << 20  # largest answer in bytes
_SHOWN = 20  # reported problems at most
_SEVERITIES = "set severity-output number"  # puts "[N]: " before each answer
_WRONG = ("[0]: ", "[1]: ", "[2]: ", "[3]: ", "[4]: Invalid")

_log = logging.getLogger(__name__)


class Balancer:
    """Client of a HAProxy's stats socket.

    Args:
        address: path of the socket, or HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        self.address = address

    def route(self, wanted: Mapping[str, Mapping[Address, int]]) -> tuple[int, list[str]]:
        """Set the servers to the wanted weights of addresses, by backend. Return the number of
        commands, and problems as text.

        Raises:
            Unavailable: HAProxy cannot be reached, or its answer cannot be read.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        current_slots = haproxy_slots.slots(self.ask(["show servers state"], deadline))
        commands, problems = haproxy_slots.changes(current_slots, wanted)
        backends = {slot.backend for slot in current_slots}
        problems += [f"it has no backend {name}" for name in wanted if name not in backends]
        for start in range(0, len(commands), _AT_ONCE):
            answer = self.ask([_SEVERITIES, *commands[start : start + _AT_ONCE]], deadline)
            problems += [line[5:] for line in answer.splitlines() if line.startswith(_WRONG)]
        return len(commands), problems[:_SHOWN]

    def ask(self, commands: Iterable[str], deadline: float | None = None) -> str:
        """Run commands and return the answers, in order. Raise Unavailable if HAProxy does not
        answer."""
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
    """Return the seconds until a deadline. Raise TimeoutError if the deadline has passed."""
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("timed out")
    return remaining_s


class ToldBalancer:
    """Balancer with its own thread, so that a HAProxy that does not answer delays no other. Runs
    between `start` and `stop`.

    Attributes:
        problems: problems of the last round, as text.
    """

    def __init__(self, address: str) -> None:
        self.problems: tuple[str, ...] = ()
        self._balancer = Balancer(address)
        self._changed = threading.Condition()
        # weights not yet sent; None: HAProxy is up to date
        self._wanted: Mapping[str, Mapping[Address, int]] | None = None
        self._end = False
        self._thread = threading.Thread(target=self._run, name=f"balancer {address}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, wanted: Mapping[str, Mapping[Address, int]]) -> None:
        """Have the thread set the wanted weights. Returns at once; newer weights replace older
        ones."""
        with self._changed:
            self._wanted = wanted
            self._changed.notify()

    def stop(self) -> None:
        """End the thread after it has sent the last weights, or failed to."""
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
                texts = tuple(self._balancer.route(wanted)[1])
                problems = tuple(f"balancer {self._balancer.address}: {what}" for what in texts)
            except Unavailable as ex:
                problems = (ex.message,)
            except Exception as ex:  # keep the thread, the only one for this balancer
                _log.exception("balancer %s could not be updated", self._balancer.address)
                problems = (f"balancer {self._balancer.address}: {type(ex).__name__}",)
            for problem in problems:
                if problem not in self.problems:
                    _log.warning("%s", problem)
            self.problems = problems
