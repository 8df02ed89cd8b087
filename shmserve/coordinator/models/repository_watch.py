"""Repository watch: decides when to look at the repository, and which changes are settled.

Programs write files in steps. So a changed model is loaded once two looks in a row have found the
same files. The second look follows soon after the first. A model whose folder never comes to rest
is loaded all the same. A model with changes during each load waits longer before each
further load. Pure: no clock, no files.
"""

import logging
from collections.abc import Mapping, Set
from math import inf

from msgspec import Struct

from shmserve import ids
from shmserve.log_fields import log_fields

_log = logging.getLogger(__name__)

_SETTLE_S = 0.15  # from the first look with a change to the next look
_REST_S = 5.0  # after this time a change is loaded even if the folder still changes
_LONGEST_S = 60.0  # longest wait of a model with changes during loads
_RETRY_S = 15.0  # from a failed look to the next, at most
_SHARE = 10  # looks take a tenth of the time, unless the pauses grew longer than _PAUSE_S
_PAUSE_S = 60.0


class RepositoryLook(Struct, frozen=True):
    """Fingerprints of all models of the repository, and how long the look took."""

    marks: Mapping[str, str]
    took_s: float = 0.0


class RepositoryWatch(Struct):
    """`interval_s`: time between two looks; infinite if only `ask` causes a look. `due`: time of
    the next look."""

    interval_s: float
    due: float
    _begun_at: float = -inf  # of the look under way; -inf: none
    _found: dict[str, str] = {}  # changes of the previous look
    _since: dict[str, float] = {}  # times of the first look at each change
    _loads: dict[str, float] = {}  # ends of loads without a later look; inf: still loading
    _waits: dict[str, float] = {}  # waits of models with changes during loads
    _warned: set[str] = set()

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
        self._pause(now + min(self.interval_s, _RETRY_S))

    def loaded(self, name: str, now: float) -> None:
        """Note that all requests for a model have ended. Look again if a change had to wait."""
        if name in self._loads:
            self._loads[name] = now
        if name in self._found:
            self.due = min(self.due, now)

    def end(
        self,
        look: RepositoryLook,
        tried: Mapping[str, str],
        known: Set[str],
        busy: Set[str],
        now: float,
    ) -> dict[str, str]:
        """End a look. Return models whose changes are settled, with their marks; "": removed.

        Args:
            look: result of the look.
            tried: fingerprints of the latest load of each model, failed loads included.
            known: models with a load, failed loads included.
            busy: models with requests under way: changes wait.
            now: the time.
        """
        changes = dict.fromkeys(known - look.marks.keys(), "")
        changes |= {
            n: m for n, m in look.marks.items() if tried.get(n) != m and ids.is_model_name(n)
        }
        self._judge_loads(changes)
        self._since = {name: self._since.get(name, now) for name in changes}
        settled = {n: m for n, m in changes.items() if n not in busy and self._settled(n, m, now)}
        self._found = {n: m for n, m in changes.items() if n not in settled}
        for name in settled:
            self._loads[name] = inf
            del self._since[name]
        nexts = [max(now + _SETTLE_S, self._load_at(n)) for n in self._found if n not in busy]
        bound_s = max(self.interval_s if self.interval_s < inf else 0.0, _PAUSE_S)
        after = min([self._begun_at + self.interval_s, *nexts])
        self._pause(max(after, now + min((_SHARE - 1) * look.took_s, bound_s)))
        return settled

    def _settled(self, name: str, mark: str, now: float) -> bool:
        if now < self._load_at(name):
            return False
        if self._found.get(name) == mark:
            return True
        if now - self._since[name] < _REST_S:
            return False
        self._warn(name, "a model's folder changes all the time")
        return True

    def _load_at(self, name: str) -> float:
        return self._since[name] + self._waits.get(name, 0.0)

    def _judge_loads(self, changes: Mapping[str, str]) -> None:
        """Lengthen waits of models with changes during loads; end other waits."""
        for name, ended_at in list(self._loads.items()):
            if name in changes:
                self._waits[name] = min(2 * self._waits.get(name, 0.5), _LONGEST_S)
                if self._waits[name] > 1.0:
                    self._warn(name, "a model's folder changes during each load")
            elif ended_at < self._begun_at:
                self._waits.pop(name, None)
            else:
                continue
            del self._loads[name]

    def _warn(self, name: str, text: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("%s", text, extra=log_fields(model=name))

    def _pause(self, until: float) -> None:
        self.due, self._begun_at = min(self.due, until), -inf
