"""Repository watch: decides when to look at the repository, and which changes are settled.

Programs write files in steps. So a changed model is loaded once two looks in a row have found the
same files. The second look follows soon after the first. Pure: no clock, no files.
"""

from collections.abc import Mapping, Set
from math import inf

from msgspec import Struct

from shmserve import ids

_SETTLE_S = 0.15  # from the first look with a change to the next look
_SHARE = 10  # looks take a tenth of the time at most, however large the repository is


class RepositoryWatch(Struct):
    """`interval_s`: time between two looks; infinite if only `ask` causes a look. `due`: time of
    the next look."""

    interval_s: float
    due: float
    _begun_at: float = -inf  # of the look under way; -inf: none
    _found: dict[str, str] = {}  # changes of the previous look

    @property
    def next_look(self) -> float:
        """Return when to begin a look; inf while a look is under way."""
        return self.due if self._begun_at == -inf else inf

    def ask(self, now: float) -> None:
        """Have a look begin at once, or after the look under way."""
        self.due = now

    def begin(self, now: float) -> None:
        self._begun_at, self.due = now, inf

    def fail(self, now: float) -> None:
        """End a look without a result."""
        self._pause(self.interval_s, now)

    def end(
        self, marks: Mapping[str, str], tried: Mapping[str, str], known: Set[str], now: float
    ) -> dict[str, str]:
        """End a look. Return models whose changes are settled, with their marks; "": removed.

        Args:
            marks: fingerprints of all models of the repository.
            tried: fingerprints of the latest load of each model, failed loads included.
            known: models with a load, failed loads included.
        """
        changes = dict.fromkeys(known - marks.keys(), "")
        changes |= {n: m for n, m in marks.items() if tried.get(n) != m and ids.is_model_name(n)}
        settled = {n: m for n, m in changes.items() if self._found.get(n) == m}
        self._found = {n: m for n, m in changes.items() if n not in settled}
        self._pause(_SETTLE_S if self._found else inf, now)
        return settled

    def _pause(self, pause_s: float, now: float) -> None:
        took_s = now - self._begun_at
        after = max(self._begun_at + min(pause_s, self.interval_s), now + (_SHARE - 1) * took_s)
        self.due, self._begun_at = min(self.due, after), -inf
