"""Remote models: asks the fetcher for models of remote repositories, and waits for answers.

Each question has a deadline and is repeated to a fetcher's successor. The first question is for
all wanted models and is repeated until the stores were reached once. Afterwards only poll mode
repeats the question.
"""

import itertools
import logging
from collections.abc import Callable, Iterable

from msgspec import Struct

from shmserve import model_places
from shmserve.config import Settings
from shmserve.coordinator.models.supervisor_sync import Send, SupervisorSync
from shmserve.log_fields import log_fields
from shmserve.protocol.control.model_messages import FetchModels, ModelsFetched
from shmserve.repository import catalog

_log = logging.getLogger(__name__)

_BEYOND_S = 10.0  # seconds beyond the fetcher's own deadline until a question ends
_MOST_KEPT = 1024

Fetched = Callable[[ModelsFetched], None]


class _Question(Struct):
    message: FetchModels
    done: Fetched
    due: float


class RemoteModels:
    """Questions to the fetcher; none is asked without remote repositories. `notices`: for each
    model served from an older snapshot than its repository holds, the reason, as text for
    clients."""

    def __init__(self, settings: Settings, sync: SupervisorSync, send: Send) -> None:
        self.there = model_places.fetches(settings)
        self._cache = model_places.cache_dir(settings)
        self._sync = sync
        self._send = send
        self._limit_s = settings.repository_timeout_s + _BEYOND_S
        self._interval_s = settings.poll_interval_s
        self._polls = settings.model_control == "poll"
        explicit = settings.model_control == "explicit"
        self._wanted = settings.load_models if explicit else ("*",)
        self._fetcher = ""
        self._tickets = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._next_round = 0.0
        self._in_round = False
        self._settled = not self.there  # true once a round has succeeded
        self.notices: dict[str, str] = {}
        self.on_round: Fetched = lambda message: None

    def fetch(self, names: Iterable[str], now: float, done: Fetched) -> None:
        """Have models fetched. `done` is called with the result, or at the deadline with an
        error."""
        message = FetchModels(next(self._tickets), tuple(names), self._kept())
        self._questions[message.ticket] = _Question(message, done, now + self._limit_s)
        if self._fetcher:
            self._send(self._fetcher, message)

    def again(self) -> None:
        """Start another round even without poll mode, because the fetched models could not be
        used."""
        self._settled = not self.there

    def hello(self, process: str) -> None:
        """Repeat all open questions to a newly linked fetcher, which knows nothing yet."""
        self._fetcher = process
        if kept := self._kept():
            self._send(process, FetchModels(0, (), kept))
        for question in self._questions.values():
            self._send(process, question.message)

    def gone(self, process: str) -> None:
        if process == self._fetcher:
            self._fetcher = ""

    def answered(self, message: ModelsFetched) -> None:
        """Take in the fetcher's answer, and update `notices`."""
        question = self._questions.pop(message.ticket, None)
        if question is None:
            return
        asked = question.message.names
        kept = {n: w for n, w in self.notices.items() if "*" not in asked and n not in asked}
        self.notices = kept | message.problems
        question.done(message)

    def tick(self, now: float) -> None:
        """End overdue questions, and start a round when due."""
        for ticket, question in list(self._questions.items()):
            if now >= question.due:
                names = ",".join(question.message.names)
                _log.error("the fetcher does not answer", extra=log_fields(models=names))
                del self._questions[ticket]
                question.done(ModelsFetched(ticket, {}, ("the fetcher does not answer",)))
        due = self._polls or not self._settled
        if self.there and due and not self._in_round and now >= self._next_round:
            self._in_round = True
            self._next_round = now + self._interval_s
            self.fetch(self._wanted, now, self._round_done)

    def _round_done(self, message: ModelsFetched) -> None:
        self._in_round = False
        self._settled = self._settled or not message.unlisted
        self.on_round(message)

    def _kept(self) -> tuple[str, ...]:
        found = {
            catalog.snapshot_of(instance.directory, self._cache)
            for instance in self._sync.instances.values()
        }
        return tuple(sorted(found - {""}))[:_MOST_KEPT]
