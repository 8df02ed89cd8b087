"""Processes of one generation, as a handover watches and ends them.

A stopped process gives no answer, and a loading model may be silent for `load_timeout_s`. So a
handover looks at the state in /proc: a process stopped by a signal is killed after `STOPPED_S`, and
the usual watcher of such a process starts a new one.
"""

import logging
import os
import signal
import time
from collections.abc import Iterable, Mapping

from shmserve.log_fields import log_fields
from shmserve.transport import rundir
from shmserve.transport.processes import has_ended, pidfd_open, send_signal, stat_of

_log = logging.getLogger(__name__)

STOPPED_S = 5.0  # a process may be stopped for so long while a reload waits
_LOOK_S = 1.0
_STOPPED = "T"
_ENDED = "ZX"


class StoppedWatch:
    """Kills processes that a signal stopped `STOPPED_S` ago. Looks are counted, not seconds, so the
    watcher's own stop does not count."""

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}
        self._looked_at = -_LOOK_S

    def look(self, pidfds: Mapping[int, int]) -> None:
        """Look at the processes of these pids, at most once a second."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        stopped = (pid for pid in pidfds if (stat := stat_of(pid)) and stat.state == _STOPPED)
        self._looks = {pid: self._looks.get(pid, 0) + 1 for pid in stopped}
        for pid, looks in self._looks.items():
            if looks > STOPPED_S / _LOOK_S:
                about = log_fields(pid=pid)
                _log.error("a stopped process keeps a reload waiting, killing it", extra=about)
                send_signal(pidfds[pid], signal.SIGKILL)


class GenerationProcesses:
    """Master and supervisor of the generation in `run_dir`, and all descendants. `master`: pid, or
    None after the master's end.

    The supervisor is no descendant of the master, and orphans get new parents. So every process
    found at one look is remembered.
    """

    def __init__(self, run_dir: str, master: int | None) -> None:
        self._run_dir = run_dir
        self._pidfds: dict[int, int] = {}
        self._stopped = StoppedWatch()
        self._add(() if master is None else (master,))

    def look(self) -> bool:
        """Forget ended processes, find new processes, and kill stopped processes. Return whether a
        process was stopped."""
        for pid in [pid for pid, pidfd in self._pidfds.items() if has_ended(pidfd)]:
            os.close(self._pidfds.pop(pid))
        supervisor = rundir.lock(self._run_dir, "supervisor").holder()
        self._add(() if supervisor is None else (supervisor,))
        parents = {
            int(name): stat.parent
            for name in os.listdir("/proc")
            if name.isdigit() and (stat := stat_of(int(name))) and stat.state not in _ENDED
        }
        # The handover descends from the old master, and is the parent of the new generation.
        parents.pop(os.getpid(), None)
        while found := {p for p in parents.keys() - self._pidfds if parents[p] in self._pidfds}:
            self._add(found)
            parents = {pid: parent for pid, parent in parents.items() if pid not in found}
        stats = map(stat_of, self._pidfds)
        any_stopped = any(stat is not None and stat.state == _STOPPED for stat in stats)
        self._stopped.look(self._pidfds)
        return any_stopped

    def await_end(self, limit_s: float) -> bool:
        """Wait for the end of all processes at most `limit_s`. Return False if one is left."""
        deadline = time.monotonic() + limit_s
        while True:
            self.look()
            remaining_s = deadline - time.monotonic()
            if not self._pidfds or remaining_s <= 0:
                return not self._pidfds
            has_ended(next(iter(self._pidfds.values())), min(remaining_s, _LOOK_S))

    def kill(self) -> None:
        """Kill all processes."""
        self.look()
        for pidfd in self._pidfds.values():
            send_signal(pidfd, signal.SIGKILL)

    def _add(self, pids: Iterable[int]) -> None:
        for pid in pids:
            if pid not in self._pidfds and (pidfd := pidfd_open(pid)) is not None:
                self._pidfds[pid] = pidfd
