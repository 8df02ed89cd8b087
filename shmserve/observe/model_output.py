"""What models print, in bounds: lines beyond so many a second are dropped and counted."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import TextIO

from shmserve.observe import logs
from shmserve.observe.log_stream import LogStream

_LONGEST = 8192  # characters of a line; what is longer is several
_OWN = "shmserve."  # the server's loggers
_MODEL = ("shmserve.model", "shmserve.model.")  # the one that models are given, and those below it


class LineRate:
    """How many lines there may be: so many a second, and as many at once. For any thread."""

    def __init__(self, per_s: int, now: Callable[[], float] = monotonic) -> None:
        self._per_s = float(per_s)
        self._left = self._per_s
        self._now = now
        self._at = now()
        self._dropped = 0
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """Take a line's place: how many have been dropped since the last; None: drop it."""
        with self._lock:
            now = self._now()
            self._left = min(self._per_s, self._left + (now - self._at) * self._per_s)
            self._at = now
            if self._left < 1.0:
                self._dropped += 1
                return None
            self._left -= 1.0
            dropped, self._dropped = self._dropped, 0
            return dropped


class ModelOutput(LogStream):
    """In place of `sys.stdout` or `sys.stderr`: every line has the instance's name and counts."""

    def __init__(self, below: TextIO, rate: LineRate) -> None:
        super().__init__(below)
        self._rate = rate

    def flush(self) -> None:
        """Write what has no end yet, too: a question without a line's end, or the last words."""
        self.flush_begun()

    def _take(self, lines: str) -> None:
        for line in lines.split("\n"):
            for start in range(0, max(len(line), 1), _LONGEST):  # an empty one is one, too
                self._write_line(line[start : start + _LONGEST])

    def _write_line(self, line: str) -> None:
        dropped = self._rate.take()
        if dropped is None:
            return
        if dropped:
            lost = f"({dropped} lines of this model were dropped: it prints too many)"
            line = f"{logs.printed(lost)}\n{logs.printed(line)}"
        else:
            line = logs.printed(line)
        super()._take(line)


class _ModelLines(logging.Filter):
    """Lets through what is the server's own, of all else no more than the rate."""

    def __init__(self, rate: LineRate) -> None:
        super().__init__()
        self._rate = rate

    def filter(self, record: logging.LogRecord) -> bool:
        name = record.name
        if name.startswith(_OWN) and name != _MODEL[0] and not name.startswith(_MODEL[1]):
            return True
        dropped = self._rate.take()
        if dropped:
            record.msg = f"({dropped} lines of this model were dropped) {record.getMessage()}"
            record.args = ()
        return dropped is not None


def limit(per_s: int) -> None:
    """From now on models in this process print and log no more than this many lines a second."""
    rate = LineRate(per_s)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_ModelLines(rate))
    sys.stdout, sys.stderr = (
        below and ModelOutput(below, rate)  # a process may have been started without
        for below in (sys.stdout, sys.stderr)
    )
