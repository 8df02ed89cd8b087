"""Keeps the frontend processes that are not gunicorn's running: starts, adopts, restarts, stops;
the exporter as well.

Each has a number, and a lock of its own in the run directory once it listens: by that a new
supervisor finds those that an earlier one started, and two of one number cannot be.
"""

from __future__ import annotations

import logging
from math import inf

from shmserve.core.control.lifecycle import Restarts
from shmserve.supervisor.children import Child
from shmserve.transport import rundir
from shmserve.transport.processes import describe_status, spawn

_log = logging.getLogger(__name__)


class Frontends:
    """All `count` of one role.

    `role`: what they are, in names of locks (in `run_dir`) and in the log; `command`: what to
    exec, with number and master's pidfd appended; `keep`: descriptors that they get beside.
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
        self._missing: dict[int, float] = dict.fromkeys(range(count), 0.0)  # when to start each
        self._restarts = {number: Restarts() for number in range(count)}
        self._numbers: dict[Child, int] = {}
        self._halted = False

    @property
    def children(self) -> list[Child]:
        return list(self._numbers)

    def running(self) -> list[tuple[str, Child]]:
        """Those that run, each with the name of its lock."""
        return [(f"{self._role}-{number}", child) for child, number in self._numbers.items()]

    def listening(self) -> bool:
        """Whether all of them are there, which their locks mean."""
        roles = (role for role, _ in self.running())
        return not self._missing and all(rundir.lock(self._run_dir, r).holder() for r in roles)

    def turn(self, now: float) -> list[Child]:
        """Do what is due; returns those that are new, for their ends to be watched."""
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
        return new

    def ended(self, child: Child, now: float) -> bool:
        """A process has ended, to be started again when due; False: it is none of these."""
        number = self._numbers.pop(child, None)
        if number is None:
            return False
        status = child.reap()
        expected = child.stopping or status == 0
        level = logging.INFO if expected else logging.WARNING
        reason = describe_status(status)
        _log.log(level, "%s ended pid=%d reason=%s", child.name, child.pid, reason)
        if not child.stopping and not self._halted:
            # One that chose to exit has said why, and that will hardly have gone at once.
            killed = status is None or status < 0
            self._missing[number] = self._restarts[number].ended(now, at_once=killed)
        return True

    def halt(self) -> None:
        """Start no more of them, whatever becomes of those that run."""
        self._halted = True
        self._missing.clear()

    def next_due(self) -> float:
        """When `turn` has something to do next; inf: not before an event."""
        kills = [child.kill_at for child in self._numbers if child.kill_at is not None]
        return min([*self._missing.values(), *kills], default=inf)

    def _adopt(self, number: int, now: float) -> Child | None:
        holder = rundir.lock(self._run_dir, f"{self._role}-{number}").holder_pidfd()
        if holder is None:
            return None
        name = f"{self._role} {number}"
        _log.info("adopted %s pid=%d", name, holder[0])
        return Child(name, holder[0], holder[1], None, now)

    def _start(self, number: int, now: float) -> Child | None:
        name = f"{self._role} {number}"
        arguments = ["--number", str(number), "--master-fd", str(self._master_fd)]
        try:
            popen = spawn([*self._command, *arguments], keep=self._keep)
        except OSError as ex:
            _log.error("%s not started error=%s", name, ex)
            self._missing[number] = self._restarts[number].ended(now, at_once=False)
            return None
        _log.info("started %s pid=%d", name, popen.pid)
        return Child.of(name, popen, now)
