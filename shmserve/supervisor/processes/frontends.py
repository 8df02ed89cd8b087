"""Frontend processes beside gunicorn's: keeps gRPC processes, exporter and fetcher running.

Each process has a number, and holds a lock of its own in the run directory once it listens. By the
lock, a new supervisor finds the processes of an earlier supervisor. The lock also excludes a
second process with the same number.
"""

from __future__ import annotations

import logging
from math import inf
from typing import BinaryIO

from shmserve.core.control.lifecycle import Restarts
from shmserve.log_fields import log_fields
from shmserve.observe import last_words
from shmserve.supervisor.processes.children import Child
from shmserve.transport import rundir
from shmserve.transport.processes import describe_status, spawn

_log = logging.getLogger(__name__)

_FAILURES = 2  # in a row: a restart has not helped
_PATIENCE_S = 15.0  # longer than a restart, on a busy machine too
_LOOK_S = 0.2  # between checks whether started processes serve


class Frontends:
    """All `count` processes of a role.

    Args:
        role: name of the processes in the log and in names of locks (in `run_dir`).
        command: command line to exec; number and the master's pidfd are appended.
        keep: further descriptors for the processes to inherit.

    Attributes:
        failures: number of processes in a row that ended before they served, while no other
            served.
    """

    def __init__(
        self,
        run_dir: str,
        role: str,
        command: list[str],
        count: int,
        master_fd: int,
        keep: tuple[int, ...] = (),
    ) -> None:
        self._run_dir = run_dir
        self._role = role
        self._command = command
        self._master_fd = master_fd
        self._keep = (master_fd, *keep)
        # start times (monotonic)
        self._missing: dict[int, float] = dict.fromkeys(range(count), 0.0)
        self._restarts = {number: Restarts() for number in range(count)}
        self._numbers: dict[Child, int] = {}
        self._serving: set[Child] = set()
        self._words: dict[Child, BinaryIO] = {}  # of processes started here
        self._idle_since = inf  # when the wait for a serving process began (monotonic)
        self._last_end = ""
        self._looked_at = 0.0
        self._halted = False
        self.failures = 0

    @property
    def wanted(self) -> bool:
        """Return whether any process should run."""
        return bool(self._restarts)

    @property
    def children(self) -> list[Child]:
        return list(self._numbers)

    def running(self) -> list[tuple[str, Child]]:
        """Return the running processes, each with the name of its lock."""
        return [(f"{self._role}-{number}", child) for child, number in self._numbers.items()]

    def listening(self) -> bool:
        """Return whether all processes serve, as of the last turn."""
        return not self._missing and len(self._serving) == len(self._numbers)

    def hindrance(self, now: float) -> str | None:
        """Return why no process serves; empty if a process serves or none should, None while one
        may be starting."""
        if self._serving or self._halted or not self.wanted:
            return ""
        if self.failures < _FAILURES and now < self._idle_since + _PATIENCE_S:
            return None
        return self._last_end or f"no process has begun to listen within {_PATIENCE_S:g} s"

    def excuse(self, now: float) -> None:
        """Restart the patience: processes are not allowed to listen yet."""
        self._idle_since = now

    def turn(self, now: float) -> list[Child]:
        """Start, adopt and kill processes when due. Return new children, so that the caller
        watches for their ends."""
        for child in self._numbers:
            child.enforce(now)
        new = []
        for number, due in list(self._missing.items()):
            started = self._adopt(number, now) or (self._start(number, now) if now >= due else None)
            if started is not None:
                del self._missing[number]
                self._numbers[started] = number
                self._restarts[number].started(now)
                new.append(started)
        self._look(now)
        return new

    def _look(self, now: float) -> None:
        """Note which processes have begun to serve: a serving process holds its lock."""
        self._looked_at = now
        self._idle_since = min(self._idle_since, now)
        for role, child in self.running():
            if child in self._serving or rundir.lock(self._run_dir, role).holder() != child.pid:
                continue
            self._serving.add(child)
            self.failures = 0

    def ended(self, child: Child, now: float) -> bool:
        """Note the end of a child, and schedule a restart. Return False for a child of another
        group."""
        number = self._numbers.pop(child, None)
        if number is None:
            return False
        status = child.reap()
        expected = child.stopping or status == 0
        level = logging.INFO if expected else logging.WARNING
        reason = describe_status(status)
        about = log_fields(pid=child.pid, reason=reason)
        _log.log(level, "%s ended", child.name, extra=about)
        words = self._words_of(child)
        self._last_end = f"{child.name} ended with {reason}{f' ({words})' if words else ''}"
        if child in self._serving:
            self._serving.remove(child)
            self._idle_since = now
        elif not expected and not self._serving:
            self.failures += 1
        if not child.stopping and not self._halted:
            # A process that exits by itself has a reason, which hardly disappears at once.
            killed = status is None or status < 0
            self._missing[number] = self._restarts[number].ended(now, at_once=killed)
        return True

    def _words_of(self, child: Child) -> str:
        """Return the reason that an ended process has left behind, or an empty text."""
        file = self._words.pop(child, None)
        if file is None:
            return ""
        with file:
            return last_words.read(file)

    def halt(self) -> None:
        """Start no process any more. Running processes go on."""
        self._halted = True
        self._missing.clear()

    def next_due(self) -> float:
        """Return when (monotonic) `turn` has something to do; inf if not before an event."""
        kills = [child.kill_at for child in self._numbers if child.kill_at is not None]
        starting = len(self._serving) < len(self._numbers)
        looks = [self._looked_at + _LOOK_S] if starting and not self._halted else []
        return min([*self._missing.values(), *kills, *looks], default=inf)

    def _adopt(self, number: int, now: float) -> Child | None:
        holder = rundir.lock(self._run_dir, f"{self._role}-{number}").holder_pidfd()
        if holder is None:
            return None
        name = f"{self._role} {number}"
        _log.info("adopted %s", name, extra=log_fields(pid=holder[0]))
        return Child(name, holder[0], holder[1], None, now)

    def _start(self, number: int, now: float) -> Child | None:
        name = f"{self._role} {number}"
        words = last_words.make()
        arguments = ["--number", str(number), "--master-fd", str(self._master_fd)]
        try:
            popen = spawn([*self._command, *arguments], keep=self._keep, stdin=words)
        except OSError as ex:
            words.close()
            _log.error("%s not started", name, extra=log_fields(error=ex))
            self._missing[number] = self._restarts[number].ended(now, at_once=False)
            return None
        _log.info("started %s", name, extra=log_fields(pid=popen.pid))
        child = Child.of(name, popen, now)
        self._words[child] = words
        return child
