"""A new generation's side of a handover: when it may serve, and what its predecessor is told."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable

from shmserve.core.registry import ModelState, Snapshot
from shmserve.errors import Unavailable
from shmserve.shm.registry_page import RegistryReader
from shmserve.transport.rundir import SERVES

_log = logging.getLogger(__name__)

_MOST_NAMED = 8  # models that failed


class TakeOver:
    """Of one supervisor; `report` -1: there is no predecessor that waits, or it has gone already.

    Attributes:
        may_listen: gRPC processes may begin to.
    """

    def __init__(self, report: int, reader: RegistryReader) -> None:
        self._report = report
        self._reader = reader
        self.may_listen = report < 0

    @property
    def pending(self) -> bool:
        """Whether the predecessor has been told nothing yet."""
        return self._report >= 0

    def turn(self, listening: Callable[[], bool]) -> str:
        """Tell what is to be told; why this generation is to end, if it is. `listening`: whether
        all gRPC processes do."""
        if not self.pending:
            return ""
        if _has_no_reader(self._report):
            return self._done("the reload has been given up")
        try:
            snapshot = self._reader.current()
        except Unavailable:
            return ""
        if wrong := obstacle(snapshot):
            os.write(self._report, wrong.encode())
            return self._done(wrong)
        self.may_listen = self.may_listen or (snapshot.ready and not _loading(snapshot))
        if self.may_listen and listening():
            os.write(self._report, SERVES.encode())
            self._done("")
        return ""

    def _done(self, why: str) -> str:
        os.close(self._report)
        self._report = -1
        return why


def obstacle(snapshot: Snapshot) -> str:
    """What keeps a generation from ever being ready; "": nothing, or not yet."""
    if snapshot.ready or _loading(snapshot):
        return ""
    if snapshot.shortage:
        return snapshot.shortage
    reasons = dict(snapshot.failed)
    for name, versions in snapshot.models.items():
        for version, entry in versions.items():
            if entry.state is ModelState.UNAVAILABLE and entry.reason:
                reasons[f"{name}/{version}"] = entry.reason
    return "; ".join(f"{name}: {why}" for name, why in list(reasons.items())[:_MOST_NAMED])


def _loading(snapshot: Snapshot) -> bool:
    versions = (entry for model in snapshot.models.values() for entry in model.values())
    return any(entry.state is ModelState.LOADING for entry in versions)


def _has_no_reader(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, 0)
    return bool(poll.poll(0))
