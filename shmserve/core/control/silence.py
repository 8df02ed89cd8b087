"""Silence: for how long a process has given no sign of life, as far as its watcher can know. Pure.

Each process writes a new number into its lock file four times within `watchdog_s`
(`FileLock.beat`), from the thread that its work depends on. The watcher looks as often. gunicorn
looks at its workers once a second.

One look adds two periods at most, however long ago the look before was. A watcher that was stopped,
perhaps with the whole machine, saw nothing meanwhile and blames no process for that time. Clocks
that jump make no difference. Before the first sign a second counts a third, because the process
still starts.
"""

from __future__ import annotations

_SIGNS = 4  # within the time after which silence is too long
_STARTING = 1 / 3  # what a second counts before the first sign: the process still starts


def period_s(limit_s: float) -> float:
    """How often a process gives a sign of life, and its watcher looks for one, in seconds.

    Args:
        limit_s: for how long nobody is silent who lives.
    """
    return limit_s / _SIGNS


class Silence:
    """One watched process. A sign of life is a value that was not there at the last look.

    Counted in the time that the watcher itself ran: where it was stopped as well, with the whole
    machine perhaps, it saw nothing meanwhile and so can hold nothing against anybody. However long
    that was, one look adds no more than twice `look_s`, which is how often looks come. Pure.
    """

    def __init__(self, look_s: float = 1.0) -> None:
        self._most_s = 2 * look_s
        self._value: object = None
        self._looked_at: float | None = None
        self._s = 0.0
        self._starts = True

    def seconds(self, value: object, now: float) -> float:
        """Look: for how long the value has been this one, in seconds."""
        if self._looked_at is None:
            self._value = value
        elif value != self._value:
            self._value, self._s, self._starts = value, 0.0, False
        else:
            step = min(now - self._looked_at, self._most_s)
            self._s += step * _STARTING if self._starts else step
        self._looked_at = now
        return self._s
