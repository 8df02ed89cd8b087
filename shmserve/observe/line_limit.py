"""Limit of log lines: a process writes a bounded number of lines of each kind, and counts the rest.

A client can cause one line with each request, for as long as the client likes. All lines of one
log call are of one kind: they have the same logger, level and text before values are filled in.
The next line of the kind that may be written says how many were left out. If no such line comes
soon, the text of the first line left out is written with the count.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Collection
from time import monotonic

PER_S = 10  # lines of a kind, in each process
BURST = 200  # lines of a kind at once
_KINDS = 256  # further texts of a logger are one kind: libraries fill in values beforehand
_TELL_S = 5.0  # from the first line left out until the count is written
_OWN = "shmserve."  # the server's loggers
# the logger given to models, and loggers below
_MODEL = ("shmserve.model", "shmserve.model.")
_COUNTED = "shmserve_counted"  # attribute of a record with a count


class LineRate:
    """Rate limit of lines: `per_s` lines a second, and `burst` at once. For any thread, and for
    signal handlers."""

    def __init__(self, per_s: int, now: Callable[[], float] = monotonic, burst: int = 0) -> None:
        self._per_s = float(per_s)
        self._burst = self._allowance = float(burst or per_s)
        self._now = now
        self._at = now()
        self._dropped = 0
        self._lock = threading.RLock()

    def take(self) -> int | None:
        """Return the lines dropped since the last allowed one, or None to drop this line."""
        with self._lock:
            now = self._now()
            self._allowance = min(self._burst, self._allowance + (now - self._at) * self._per_s)
            self._at = now
            if self._allowance < 1.0:
                self._dropped += 1
                return None
            self._allowance -= 1.0
            return self.forget()

    def forget(self) -> int:
        """Forget the number of dropped lines. Return the number."""
        with self._lock:
            dropped, self._dropped = self._dropped, 0
            return dropped


class _LineKind:
    """Lines of a kind. `left_out`: the first line left out since the last count, without error and
    fields, which would keep the memory of the failed call."""

    def __init__(self, rate: LineRate) -> None:
        self.rate = rate
        self.left_out: logging.LogRecord | None = None


class LineLimit(logging.Filter):
    """Filter for the handlers of a process. Debug lines and lines of `unlimited` loggers pass."""

    def __init__(
        self, unlimited: Collection[str] = (), now: Callable[[], float] = monotonic
    ) -> None:
        super().__init__()
        self._unlimited = unlimited
        self._now = now
        self._models: _LineKind | None = None
        self.begin(threads=False)

    def begin(self, threads: bool) -> None:
        """Begin a process, perhaps a fork: the parent writes the counts of the parent. Without
        threads, a count waits for the next line of the kind or for the end of the process."""
        self._kinds: dict[tuple[str, ...], _LineKind] = {}
        self.telling: threading.Timer | None = None
        self._threads = threads

    def limit_models(self, rate: LineRate) -> None:
        """Limit all records except the server's own, of all kinds together, to a rate."""
        self._models = _LineKind(rate)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True to write a record, perhaps with a count. Return False for a record that is
        left out and counted."""
        kind = self._kind(record)
        if kind is None or hasattr(record, _COUNTED):
            return True
        dropped = kind.rate.take()
        if dropped is None:
            if kind.left_out is None:
                kind.left_out = _plain(record)
            self._tell_later()
            return False
        if dropped:
            kind.left_out = None
            record.msg, record.args = _with_count(_text(record), dropped), ()
        return True

    def tell(self) -> None:
        """Write the counts not yet written with a line."""
        self.telling = None
        models = () if self._models is None else (self._models,)
        for kind in (*self._kinds.copy().values(), *models):
            record, kind.left_out = kind.left_out, None
            if record is not None and (dropped := kind.rate.forget()):
                record.msg = _with_count(record.msg, dropped - 1)
                logging.getLogger(record.name).handle(record)

    def _kind(self, record: logging.LogRecord) -> _LineKind | None:
        """Return the kind of a record; None for a record that passes."""
        name = record.name
        if self._models is not None and not _is_own(name):
            return self._models
        if record.levelno < logging.INFO or name in self._unlimited:
            return None
        key: tuple[str, ...] = (name, record.levelname, str(record.msg))
        if key not in self._kinds and len(self._kinds) >= _KINDS:
            key = key[:2]
        if (kind := self._kinds.get(key)) is None:
            kind = self._kinds.setdefault(key, _LineKind(LineRate(PER_S, self._now, BURST)))
        return kind

    def _tell_later(self) -> None:
        if self.telling is None and self._threads:
            timer = self.telling = threading.Timer(_TELL_S, self.tell)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError:  # no thread is available now; the next line tries again
                self.telling = None


def _is_own(name: str) -> bool:
    return name.startswith(_OWN) and name != _MODEL[0] and not name.startswith(_MODEL[1])


def _plain(record: logging.LogRecord) -> logging.LogRecord:
    plain = logging.LogRecord(record.name, record.levelno, "", 0, _text(record), (), None)
    setattr(plain, _COUNTED, True)
    return plain


def _text(record: logging.LogRecord) -> str:
    with contextlib.suppress(Exception):  # values of a model may not fit its text
        return record.getMessage()
    return str(record.msg)


def _with_count(text: str, dropped: int) -> str:
    return f"{text} (and {dropped:,} more)" if dropped else text
