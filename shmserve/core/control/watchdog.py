"""Which executors give no sign of life although they have nothing to do.

A model may hold the interpreter lock while it loads and while it runs, for as long as the limits
of those say; nobody can be asked anything then. An executor that neither loads nor runs anything
answers at once, or is stopped, or stuck. Counted in looks, not in seconds: a coordinator that was
itself stopped has not looked meanwhile. Questions wake who is asked, so there are few of them.
"""

from __future__ import annotations

_MOST = 20
_QUESTIONS = 2  # at least, within so many looks


class Watchdog:
    """Looks come once a second. Pure; `execute_timeout_s` shortens its patience.

    Attributes:
        period_s: how often to ask, at most.
    """

    def __init__(self, execute_timeout_s: float) -> None:
        self._most = max(2, min(_MOST, round(execute_timeout_s)))
        self.period_s = self._most / _QUESTIONS - 1.0  # a look comes up to a second late
        self._unanswered: dict[str, int] = {}

    def looked(self, process: str, idle: bool) -> bool:
        """Another look; True: so many before it have found no answer that there is none.

        Args:
            process: the executor's.
            idle: its page says that it runs nothing.
        """
        count = self._unanswered.get(process, 0)
        self._unanswered[process] = count + 1 if idle else 0
        return idle and count >= self._most

    def answered(self, process: str) -> None:
        """It lives."""
        self._unanswered[process] = 0

    def gone(self, process: str) -> None:
        """It has no link any more."""
        self._unanswered.pop(process, None)
