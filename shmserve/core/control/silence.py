"""For how long a process has given no sign of life, as far as a watcher can know."""

from __future__ import annotations

_MOST_S = 2.0  # between two looks; watchers look about once a second
_STARTING = 1 / 3  # what a second counts before the first sign: the process still starts


class Silence:
    """One watched process. A sign of life is a value that was not there at the last look.

    Counted in the time that the watcher itself ran: where it was stopped as well, with the whole
    machine perhaps, it saw nothing meanwhile and so can hold nothing against anybody. However long
    that was, one look adds no more than `_MOST_S`. Pure; looks come about once a second.
    """

    def __init__(self) -> None:
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
            step = min(now - self._looked_at, _MOST_S)
            self._s += step * _STARTING if self._starts else step
        self._looked_at = now
        return self._s
