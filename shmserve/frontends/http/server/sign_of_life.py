"""An HTTP worker's sign of life, which gunicorn's master looks at once a second (`timeout`)."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from gunicorn.workers.workertmp import WorkerTmp

from shmserve.core.control.silence import Silence

_asked: list[Callable[[], None]] = []


def when_asked(call: Callable[[], None]) -> None:
    """Call this in the master whenever it looks: its own sign of life."""
    _asked[:] = [call]


class SignOfLife(WorkerTmp):  # type: ignore[misc]
    """gunicorn's file, without its mistakes: time in which the master itself was stopped, with
    the whole machine perhaps, is not held against a worker; one that hangs while it boots is.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._silence = Silence()

    def last_update(self) -> float:
        """When the worker gave its last sign, by the time in which the master has run."""
        for call in _asked:
            call()
        now = monotonic()
        return now - self._silence.seconds(super().last_update(), now)
