"""Watchdog of executors: finds those that give no sign of life although they have no work. Pure.

A model may hold the interpreter lock while it loads and while it runs, for as long as the limits of
both allow. An executor cannot be asked anything then. An executor that neither loads nor runs
anything answers at once, or is stopped, or stuck. The watchdog counts looks, not seconds: a
coordinator that was itself stopped has not looked meanwhile. Questions wake executors, so there are
few of them, and hardly any to executors that rest.

An executor that runs nothing and answers nothing is replaced after 20 looks, one a second, or fewer
where `execute_timeout_s` is less. The coordinator asks an executor once in 9 looks, and an executor
that rests once in 60. An executor rests while it sleeps (as /proc says), has taken no processor
time, and no frontend has a request with it.

An executor that rests no longer is asked at once, and replaced if it has not answered within 12
looks. So only an executor that sleeps with its interpreter locked, and that no frontend wants, is
found later: within 72 looks. Without the setting `dashboard` nobody reads /proc, and all executors
are asked once in 9 looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_MOST = 20
_QUESTIONS = 2  # at least, within so many looks
_RESTING = 3  # times as many looks, where nobody waits for an answer


class Verdict(Enum):
    """What is to be done about an executor."""

    NOTHING = 0
    ASK = 1
    REPLACE = 2


@dataclass(slots=True)
class _Silence:
    """In looks. `quiet`: since it answered; `asked`: since the first question that it has not."""

    quiet: int = 0
    asked: int = 0

    def look(self) -> None:
        """Count a look at a process that has not answered."""
        self.quiet += 1

    def ask(self) -> int:
        """Count a look since the first question. Return how many came before."""
        self.asked += 1
        return self.asked - 1

    def end(self) -> None:
        """The process has answered."""
        self.quiet = self.asked = 0


class Watchdog:
    """Looks come once a second. Pure; `execute_timeout_s` shortens its patience."""

    def __init__(self, execute_timeout_s: float) -> None:
        self._most = max(2, min(_MOST, round(execute_timeout_s)))
        self._period = max(1, int(self._most / _QUESTIONS - 1))
        self._silences: dict[str, _Silence] = {}

    def looked(self, process: str, busy_ms: int | None, rests: bool = False) -> Verdict:
        """Another look.

        Args:
            process: the executor's.
            busy_ms: for how long it has run what it runs, as its page says; 0: it runs nothing;
                None: there is no page, so it is asked and never replaced.
            rests: it sleeps as far as can be seen from outside, and nobody waits for it.
        """
        if busy_ms:
            self.answered(process)
            return Verdict.NOTHING
        silence = self._silences.get(process)
        is_new = silence is None
        if silence is None:
            silence = self._silences[process] = _Silence()
        silence.look()
        if not silence.asked:
            patience = self._most * _RESTING if rests else self._period
            if not is_new and silence.quiet < patience:
                return Verdict.NOTHING
        elif busy_ms == 0 and self._is_over(silence):
            return Verdict.REPLACE
        return Verdict.NOTHING if silence.ask() % self._period else Verdict.ASK

    def _is_over(self, silence: _Silence) -> bool:
        """Whether it has had the time to answer, and more than one question."""
        return silence.quiet > self._most and silence.asked > self._most - self._period

    def answered(self, process: str) -> None:
        """It lives."""
        self._silences.setdefault(process, _Silence()).end()

    def gone(self, process: str) -> None:
        """It has no link any more."""
        self._silences.pop(process, None)
