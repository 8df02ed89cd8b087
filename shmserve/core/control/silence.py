"""Silence: time without a sign of life from a process, as far as its watcher can know. Pure.

Each process writes a new number into its lock file four times within `watchdog_s`
(`FileLock.beat`), from the thread that its work depends on. The watcher looks as often. gunicorn
looks at its workers once a second.

One look adds two periods at most, for any time since the look before. A watcher that was stopped,
perhaps with the whole machine, saw nothing meanwhile and blames no process for that time. Clock
jumps make no difference. Before the first sign a second counts a third, because the process still
starts.
"""

_SIGNS = 4  # signs of life within the limit
_STARTING = 1 / 3  # weight of a second before the first sign, while the process starts


def period_s(limit_s: float) -> float:
    """Return the time between signs of life, and between looks of the watcher, in seconds.
    `limit_s`: longest silence, in seconds, of a healthy process."""
    return limit_s / _SIGNS


class Silence:
    """Silence of one watched process. A sign of life is a value different from the value at the
    last look.

    Counts only time in which the watcher itself ran: one look adds at most twice `look_s`, the
    time between looks. Pure.
    """

    def __init__(self, look_s: float = 1.0) -> None:
        self._max_step_s = 2 * look_s
        self._value: object = None
        self._looked_at: float | None = None
        self._s = 0.0
        self._starts = True

    def seconds(self, value: object, now: float) -> float:
        """Look at the current value; return for how many seconds the value has not changed."""
        if self._looked_at is None:
            self._value = value
        elif value != self._value:
            self._value, self._s, self._starts = value, 0.0, False
        else:
            step = min(now - self._looked_at, self._max_step_s)
            self._s += step * _STARTING if self._starts else step
        self._looked_at = now
        return self._s
