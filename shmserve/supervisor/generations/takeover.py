"""Takeover: a new generation's side of a handover.

gRPC processes of the new generation listen once all models are ready. The supervisor then tells
its predecessor that the generation serves, or why it will not.
"""

import logging
import os
import time
from collections.abc import Callable

from shmserve.core.registry import ModelState, Snapshot
from shmserve.errors import Unavailable
from shmserve.shm.registry_page import RegistryReader
from shmserve.supervisor.generations.handover import given_up
from shmserve.transport.rundir import SERVES

_log = logging.getLogger(__name__)

_MOST_NAMED = 8  # failed models in a message


class LoadingWatch:
    """Decides how long clients wait for models: until the service is ready or cannot become ready,
    at most until `deadline` (monotonic)."""

    def __init__(self, run_dir: str, deadline: float) -> None:
        self._reader = RegistryReader(run_dir)
        self._deadline = deadline

    def settled(self) -> bool:
        """Return whether there is nothing left to wait for."""
        if time.monotonic() >= self._deadline:
            return True
        snapshot = self.snapshot()
        return snapshot is not None and (snapshot.ready or bool(obstacle(snapshot)))

    def snapshot(self) -> Snapshot | None:
        """Return the published snapshot; None if nothing is published yet."""
        try:
            return self._reader.current()
        except Unavailable:
            return None


class TakeOver:
    """Takeover by one supervisor's generation. `report`: pipe to the predecessor; -1 if no
    predecessor waits any more. `turn_fd`: reading end of a pipe, which holds a byte once gRPC
    processes may listen. EOF without a byte means that this process has ended."""

    def __init__(self, report: int, readiness: LoadingWatch) -> None:
        self._report = report
        self._readiness = readiness
        self._over = False  # this generation will not serve
        self.turn_fd, self._holding = os.pipe()

    @property
    def may_listen(self) -> bool:
        """Return whether gRPC processes may begin to listen."""
        return self._holding < 0

    def _let_listen(self) -> None:
        if self._holding >= 0:
            os.write(self._holding, b"\0")
            os.close(self._holding)
            self._holding = -1

    @property
    def pending(self) -> bool:
        """Return whether `turn` still has something to wait for."""
        return not self._over and (self._report >= 0 or not self.may_listen)

    def turn(self, listening: Callable[[], bool], broken: str = "") -> str:
        """Report progress to the predecessor. Return why this generation must end, or an empty
        text. `listening`: returns whether all gRPC processes listen. `broken`: why gRPC processes
        will never listen; empty if no such reason is known."""
        if self._over:
            return ""
        if self._report < 0:
            if not self.may_listen and self._readiness.settled():
                self._let_listen()
            return ""
        if given_up(self._report):
            return self._done("the reload has been given up")
        snapshot = self._readiness.snapshot()
        failure = broken or (obstacle(snapshot) if snapshot is not None else "")
        if failure:
            os.write(self._report, failure.encode())
            return self._done(failure)
        if snapshot is None:
            return ""
        if snapshot.ready and not _loading(snapshot):
            self._let_listen()
        if self.may_listen and listening():
            os.write(self._report, SERVES.encode())
            self._done("")
        return ""

    def _done(self, failure: str) -> str:
        os.close(self._report)
        self._report = -1
        self._over = bool(failure)
        return failure


def obstacle(snapshot: Snapshot) -> str:
    """Return what keeps a generation from ever being ready; empty if nothing, or while loading."""
    if snapshot.ready or _loading(snapshot) or not snapshot.complete:
        return ""
    if snapshot.shortage:
        return snapshot.shortage
    reasons = dict(snapshot.failed)
    for name, versions in snapshot.models.items():
        for version, entry in versions.items():
            if entry.state is ModelState.UNAVAILABLE and entry.reason:
                reasons[f"{name}/{version}"] = entry.reason
    listed = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:_MOST_NAMED])
    return listed or snapshot.why_not_ready


def _loading(snapshot: Snapshot) -> bool:
    versions = (entry for model in snapshot.models.values() for entry in model.values())
    return any(entry.state is ModelState.LOADING for entry in versions)
