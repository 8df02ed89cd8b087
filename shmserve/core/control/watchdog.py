"""Watchdog of executors: finds executors without work that give no sign of life. Pure.

A model may hold the interpreter lock while it loads and while it runs, for as long as the limits
of both allow. An executor cannot answer then. An executor that neither loads nor runs anything
answers at once, or is stopped, or stuck. The watchdog counts looks, not seconds: a coordinator
that was itself stopped has not looked meanwhile. Questions wake executors, so there are few of
them, and hardly any to resting executors.

An executor that runs nothing and answers nothing is replaced after 20 looks, one a second, or
fewer where `execute_timeout_s` is less. The coordinator asks an executor once in 9 looks, and a
resting executor once in 60. An executor rests while it sleeps (as /proc says), has taken no
processor time, and has no request from a frontend.

An executor that stops resting is asked at once, and replaced if it has not answered within 12
looks. So only an executor that sleeps with its interpreter locked, without a request, is found
later: within 72 looks. Without the setting `dashboard` no process reads /proc, and all executors
are asked once in 9 looks.
"""

from dataclasses import dataclass
from enum import Enum

_LIMIT_LOOKS = 20
_QUESTIONS = 2  # smallest number of questions within `_LIMIT_LOOKS` looks
_RESTING_FACTOR = 3  # factor on the number of looks if no frontend waits for an answer


class Verdict(Enum):
    """Action for an executor."""

    NOTHING = 0
    ASK = 1
    REPLACE = 2


@dataclass(slots=True)
class _Silence:
    """Silence of one process, in looks. `quiet`: since the last answer; `asked`: since the first
    unanswered question."""

    quiet: int = 0
    asked: int = 0


class Watchdog:
    """Watchdog for all executors, called once a second for each. Pure; `execute_timeout_s`
    shortens the patience."""

    def __init__(self, execute_timeout_s: float) -> None:
        self._limit = max(2, min(_LIMIT_LOOKS, round(execute_timeout_s)))
        self._period = max(1, int(self._limit / _QUESTIONS - 1))
        self._silences: dict[str, _Silence] = {}

    def looked(self, process: str, busy_ms: int | None, rests: bool = False) -> Verdict:
        """Count a look at an executor; return the action to take.

        Args:
            process: name of the executor's process.
            busy_ms: time spent on the current run, by the executor's page; 0: no run; None: no
                page, so the executor is asked but never replaced.
            rests: True if the executor seems asleep from outside, and no frontend waits for an
                answer.
        """
        if busy_ms:
            self.answered(process)
            return Verdict.NOTHING
        silence = self._silences.get(process)
        is_new = silence is None
        if silence is None:
            silence = self._silences[process] = _Silence()
        silence.quiet += 1
        if not silence.asked:
            patience = self._limit * _RESTING_FACTOR if rests else self._period
            if not is_new and silence.quiet < patience:
                return Verdict.NOTHING
        elif busy_ms == 0 and self._is_over(silence):
            return Verdict.REPLACE
        silence.asked += 1
        return Verdict.NOTHING if (silence.asked - 1) % self._period else Verdict.ASK

    def _is_over(self, silence: _Silence) -> bool:
        """Return True if the executor has had time to answer more than one question."""
        return silence.quiet > self._limit and silence.asked > self._limit - self._period

    def answered(self, process: str) -> None:
        """Note a sign of life."""
        silence = self._silences.setdefault(process, _Silence())
        silence.quiet = silence.asked = 0

    def gone(self, process: str) -> None:
        """Forget a process without a link."""
        self._silences.pop(process, None)
