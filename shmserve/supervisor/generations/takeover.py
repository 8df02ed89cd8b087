"""A new generation's side of a handover: when it may serve, and what its predecessor is told.

gRPC processes of the new generation listen once all models are ready. The supervisor says then that
the generation serves, or why it will not.
"""

from __future__ import annotations

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

_MOST_NAMED = 8  # models that failed


class LoadingWatch:
    """Whether there is anything to wait for before clients are served: until `deadline` (monotonic)
    models that are being loaded, as long as the service is not ready without them."""

    def __init__(self, run_dir: str, deadline: float) -> None:
        self._reader = RegistryReader(run_dir)
        self._deadline = deadline

    def settled(self) -> bool:
        """Nothing is waited for any more."""
        if time.monotonic() >= self._deadline:
            return True
        snapshot = self.snapshot()
        return snapshot is not None and (snapshot.ready or bool(obstacle(snapshot)))

    def snapshot(self) -> Snapshot | None:
        """What is published last; None: nothing is yet."""
        try:
            return self._reader.current()
        except Unavailable:
            return None


class TakeOver:
    """Of one supervisor; `report` -1: there is no predecessor that waits, or it has gone already.

    Attributes:
        turn_fd: of a pipe, has a byte when gRPC processes may begin to listen; its end, when it
            has none, is that of this process.
    """

    def __init__(self, report: int, readiness: LoadingWatch) -> None:
        self._report = report
        self._readiness = readiness
        self._over = False  # it will not serve
        self.turn_fd, self._holding = os.pipe()

    @property
    def may_listen(self) -> bool:
        """Whether gRPC processes may begin to."""
        return self._holding < 0

    def _let_listen(self) -> None:
        if self._holding >= 0:
            os.write(self._holding, b"\0")
            os.close(self._holding)
            self._holding = -1

    @property
    def pending(self) -> bool:
        """Whether there is something to look for."""
        return not self._over and (self._report >= 0 or not self.may_listen)

    def turn(self, listening: Callable[[], bool], broken: str = "") -> str:
        """Tell what is to be told; why this generation is to end, if it is. `listening`: whether
        all gRPC processes do; `broken`: why they never will, empty if that is not known."""
        if self._over:
            return ""
        if self._report < 0:
            if not self.may_listen and self._readiness.settled():
                self._let_listen()
            return ""
        if given_up(self._report):
            return self._done("the reload has been given up")
        snapshot = self._readiness.snapshot()
        wrong = broken or (obstacle(snapshot) if snapshot is not None else "")
        if wrong:
            os.write(self._report, wrong.encode())
            return self._done(wrong)
        if snapshot is None:
            return ""
        if snapshot.ready and not _loading(snapshot):
            self._let_listen()
        if self.may_listen and listening():
            os.write(self._report, SERVES.encode())
            self._done("")
        return ""

    def _done(self, why: str) -> str:
        os.close(self._report)
        self._report = -1
        self._over = bool(why)
        return why


def obstacle(snapshot: Snapshot) -> str:
    """What keeps a generation from ever being ready; "": nothing, or not yet."""
    if snapshot.ready or _loading(snapshot) or not snapshot.complete:
        return ""
    if snapshot.shortage:
        return snapshot.shortage
    reasons = dict(snapshot.failed)
    for name, versions in snapshot.models.items():
        for version, entry in versions.items():
            if entry.state is ModelState.UNAVAILABLE and entry.reason:
                reasons[f"{name}/{version}"] = entry.reason
    told = "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:_MOST_NAMED])
    return told or snapshot.why_not_ready


def _loading(snapshot: Snapshot) -> bool:
    versions = (entry for model in snapshot.models.values() for entry in model.values())
    return any(entry.state is ModelState.LOADING for entry in versions)
