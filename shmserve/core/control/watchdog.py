"""Which executors give no sign of life although they have nothing to do.

A model may hold the interpreter lock while it loads and while it runs, for as long as the limits
of those say; nobody can be asked anything then. An executor that neither loads nor runs anything
answers at once, or is stopped, or stuck. Counted in questions, not in seconds: a coordinator that
was itself stopped has asked nothing meanwhile.
"""

from __future__ import annotations

_MOST_S = 20.0
_QUESTIONS = 4  # within that time


class Watchdog:
    """Pure. `execute_timeout_s` shortens its patience.

    Attributes:
        period_s: how often to ask.
    """

    def __init__(self, execute_timeout_s: float) -> None:
        self.period_s = max(2.0, min(_MOST_S, execute_timeout_s)) / _QUESTIONS
        self._unanswered: dict[str, int] = {}

    def asked(self, process: str, idle: bool) -> bool:
        """Another question goes out; True: so many before it had no answer that there is none.

        Args:
            process: the executor's.
            idle: its page says that it runs nothing.
        """
        count = self._unanswered.get(process, 0)
        self._unanswered[process] = count + 1 if idle else 0
        return idle and count >= _QUESTIONS

    def answered(self, process: str) -> None:
        """It lives."""
        self._unanswered[process] = 0

    def gone(self, process: str) -> None:
        """It has no link any more."""
        self._unanswered.pop(process, None)
