"""Sign of life of an HTTP worker, checked once a second by gunicorn's master (`timeout`)."""

from collections.abc import Callable
from time import monotonic
from typing import Any

from gunicorn.workers.workertmp import WorkerTmp

from shmserve.core.control.silence import Silence

_asked: list[Callable[[], None]] = []


def when_asked(call: Callable[[], None]) -> None:
    """Have the master call a function at each check: the master's own sign of life."""
    _asked[:] = [call]


class SignOfLife(WorkerTmp):  # type: ignore[misc]
    """gunicorn's file for signs of life, with two corrections. Time in which the master itself was
    stopped, perhaps with the whole machine, does not count as silence of the worker. A worker that
    hangs while booting does count as silent."""

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._silence = Silence()

    def last_update(self) -> float:
        """Return the time of the worker's last sign (monotonic), counting only time in which the
        master ran."""
        for call in _asked:
            call()
        now = monotonic()
        return now - self._silence.seconds(super().last_update(), now)
