"""Messages to the service manager: readiness, a status line, the watchdog's sign of life."""

from collections.abc import Callable
from math import inf

from shmserve.core.registry import ModelState, Snapshot
from shmserve.errors import Unavailable
from shmserve.shm.registry_page import RegistryReader
from shmserve.supervisor.greeting import StartReport
from shmserve.transport.notify import Notifier

_EXTEND_EVERY_S = 20.0
_LOOK_S = 0.2  # between checks whether this generation speaks
_PATIENCE_S = 0.1  # for the service manager, whose queue may be full of clients' memory
_EXTENSION = "EXTEND_TIMEOUT_USEC=60000000"


class Announcer:
    """Reports the registry's state to the service manager. READY=1: every required model is
    loaded.

    A required model that cannot be loaded keeps the service from becoming ready, and the status
    line names the model. Other models are served meanwhile. So the announcer keeps extending the
    start timeout, after which the service manager would kill the service.

    Args:
        report: also gets each snapshot, in the first life of a service.
        speaks: returns whether this generation speaks for the service; nothing is sent while it
            does not.
        main_pid: main process of the service from now on; 0 if the service manager knows it
            already.

    Attributes:
        notifier: connection to the service manager, for other parts of this process too.
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
        self._watchdog_s = watchdog_s / 2  # twice as often as required
        self._generation = -1
        self._ready = False
        self._untold: dict[str, str] = {}  # what the service manager has not taken yet, by name
        self._silent, self._looked_at = False, 0.0
        self._alive_at = 0.0
        self._extended_at = 0.0

    @property
    def _starting(self) -> bool:
        return not self._ready or "READY" in self._untold

    @property
    def due(self) -> float:
        """Return when (monotonic) `turn` has something to send although nothing is published."""
        if self._silent:
            return self._looked_at + _LOOK_S
        due = self._extended_at + _EXTEND_EVERY_S if self._starting else inf
        if self._untold:
            due = min(due, self._looked_at + _LOOK_S)
        if self._healthy and self._watchdog_s:
            due = min(due, self._alive_at + self._watchdog_s)
        return due

    def turn(self, now: float, healthy: bool = True) -> None:
        """Send what is due at `now`. `healthy`: whether a sign of life may be sent."""
        self._healthy = healthy
        self._silent, self._looked_at = not self.speaks(), now
        if self._silent:
            return
        if self._main_pid:  # the handover sends this too, unless it has died
            self._untold["MAINPID"], self._main_pid = str(self._main_pid), 0
        if healthy and self._watchdog_s and now - self._alive_at >= self._watchdog_s:
            self._alive_at = now
            self.notifier.send("WATCHDOG=1", patience_s=_PATIENCE_S)
        if self._starting and now - self._extended_at >= _EXTEND_EVERY_S:
            self._extended_at = now
            self.notifier.send(_EXTENSION)
        self._look()
        told = [f"{name}={value}" for name, value in self._untold.items()]
        if told and (
            not self.notifier.address or self.notifier.send(*told, patience_s=_PATIENCE_S)
        ):
            self._untold.clear()

    def _look(self) -> None:
        """Note what is to be told of the published snapshot."""
        try:
            snapshot = self._reader.current()
        except Unavailable:
            return
        if snapshot.generation == self._generation:
            return
        self._generation = snapshot.generation
        if not self._ready and snapshot.ready:
            self._ready = True
            self._untold["READY"] = "1"
        self._untold["STATUS"] = status_line(snapshot)
        if self._report is not None:
            self._report.published(snapshot)

    def stopping(self) -> None:
        if self.speaks():
            self.notifier.send("STOPPING=1", "STATUS=draining", patience_s=_PATIENCE_S)


def status_line(snapshot: Snapshot) -> str:
    """Return the state of all models in a line, for ``systemctl status``."""
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
