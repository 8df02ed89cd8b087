"""What the service manager is told: readiness, a status line, the watchdog's sign of life."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from shmserve.core.registry import ModelState, Snapshot
from shmserve.errors import Unavailable
from shmserve.shm.registry_page import RegistryReader
from shmserve.supervisor.greeting import StartReport
from shmserve.transport.notify import Notifier

_EXTEND_EVERY_S = 20.0
_LOOK_S = 0.2  # whether it is this generation's turn to speak
_EXTENSION = "EXTEND_TIMEOUT_USEC=60000000"


class Announcer:
    """Follows the registry. READY=1 means that every model that is required is loaded.

    A model that cannot be loaded keeps the service from being ready, and the status line
    says why. The others serve meanwhile, so the service manager is asked for patience: it
    would else kill the service, and them with it, when its start times out.

    `report`: what else hears of each snapshot, in the first life of a service. `speaks`: whether
    this is the generation that speaks for the service; while it is not, nothing is told.
    `main_pid`: the service's main process from then on; 0: the one that was started as that.

    Attributes:
        notifier: to the service manager, for others of this process.
        speaks: as given.
    """

    def __init__(
        self,
        notifier: Notifier,
        reader: RegistryReader,
        watchdog_s: float,
        report: StartReport | None = None,
        speaks: Callable[[], bool] = lambda: True,
        main_pid: int = 0,
    ) -> None:
        self.notifier = notifier
        self._reader = reader
        self._report = report
        self.speaks = speaks
        self._main_pid = main_pid
        self._healthy = True
        self._watchdog_s = watchdog_s / 2  # twice as often as asked for
        self._generation = -1
        self._ready = False
        self._silent, self._looked_at = False, 0.0
        self._alive_at = 0.0
        self._extended_at = 0.0

    @property
    def due(self) -> float:
        """When `turn` has something to tell although nothing is published."""
        if self._silent:
            return self._looked_at + _LOOK_S
        due = inf if self._ready else self._extended_at + _EXTEND_EVERY_S
        if self._healthy and self._watchdog_s:
            due = min(due, self._alive_at + self._watchdog_s)
        return due

    def turn(self, now: float, healthy: bool = True) -> None:
        """Tell what is due. `healthy`: there is a sign of life to give."""
        self._healthy = healthy
        self._silent, self._looked_at = not self.speaks(), now
        if self._silent:
            return
        if self._main_pid:  # the handover says it as well, if it lives until then
            self.notifier.send(f"MAINPID={self._main_pid}")
            self._main_pid = 0
        if healthy and self._watchdog_s and now - self._alive_at >= self._watchdog_s:
            self._alive_at = now
            self.notifier.send("WATCHDOG=1")
        if not self._ready and now - self._extended_at >= _EXTEND_EVERY_S:
            self._extended_at = now
            self.notifier.send(_EXTENSION)
        try:
            snapshot = self._reader.current()
        except Unavailable:
            return
        if snapshot.generation == self._generation:
            return
        self._generation = snapshot.generation
        lines = [f"STATUS={status_line(snapshot)}"]
        if not self._ready and snapshot.ready:
            self._ready = True
            lines.insert(0, "READY=1")
        self.notifier.send(*lines)
        if self._report is not None:
            self._report.published(snapshot)

    def stopping(self) -> None:
        if self.speaks():
            self.notifier.send("STOPPING=1", "STATUS=draining")


def status_line(snapshot: Snapshot) -> str:
    """One line for ``systemctl status``."""
    if snapshot.draining:
        return "draining"
    names = dict.fromkeys(snapshot.failed)
    ready = loading = 0
    for name, versions in snapshot.models.items():
        for version, entry in versions.items():
            ready += entry.state is ModelState.READY
            loading += entry.state is ModelState.LOADING
            if entry.state is ModelState.UNAVAILABLE:
                names[f"{name}/{version}"] = None
    line = f"{ready} ready, {loading} loading"
    if snapshot.shortage:
        line = f"{line}, {snapshot.shortage}"
    return f"{line}, unavailable: {' '.join(names)}" if names else line
