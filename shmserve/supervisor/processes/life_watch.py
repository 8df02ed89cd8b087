"""Life watch: kills processes beside the supervisor that give no sign of life."""

import logging

from shmserve.core.control.silence import Silence, period_s
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.supervisor.processes.children import Child
from shmserve.transport import rundir

_log = logging.getLogger(__name__)

_REPLACED = 4  # times the limit: a silent process has been replaced by then


class LifeWatch:
    """Checks the beats in the lock file of each role (`FileLock.beat`), every `look_s` seconds.

    The supervisor cannot replace its own master. So a silent master, or a silent coordinator that
    was not replaced, is left to the service manager, which can replace both (`healthy`).

    `limit_s`: longest silence, in seconds, of a healthy process. `master_s`: limit, in seconds, for
    gunicorn's master, which is silent while it stops.
    """

    def __init__(self, run_dir: str, limit_s: float, master_s: float) -> None:
        self._run_dir = run_dir
        self._limit_s = limit_s
        self._master_s = master_s
        self.look_s = period_s(limit_s)
        self._silences: dict[str, tuple[int, Silence]] = {}
        self._master = Silence(self.look_s)
        self._coordinator = Silence(self.look_s)

    def look(self, role: str, child: Child, now: float) -> None:
        """Kill a silent process, unless `Child.stop` has set a limit already."""
        pid, silence = self._silences.get(role, (0, None))
        if silence is None or pid != child.pid:
            silence = Silence(self.look_s)
            self._silences[role] = child.pid, silence
        if silence.seconds(self._beat(role), now) > self._limit_s and not child.stopping:
            about = log_fields(pid=child.pid)
            _log.error("%s gives no sign of life, killing it", child.name, extra=about)
            child.kill()
            flight_recorder.record("process killed", child.name, "it gives no sign of life")
            flight_recorder.keep(self._run_dir)
            del self._silences[role]

    def healthy(self, now: float) -> bool:
        """Return whether two things work that the supervisor cannot repair: the master's loop, and
        the replacement of a silent coordinator."""
        beat = self._beat("master")  # None: gunicorn runs with timeout = 0
        master_s = self._master.seconds(beat, now) if beat is not None else 0.0
        coordinator_s = self._coordinator.seconds(self._beat("coordinator"), now)
        return master_s <= self._master_s and coordinator_s <= self._limit_s * _REPLACED

    def _beat(self, role: str) -> int | None:
        return rundir.lock(self._run_dir, role).last_beat()
