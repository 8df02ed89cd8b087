"""Bounded output of models: lines beyond a rate per second are dropped and counted."""

import logging
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import TextIO

from shmserve.observe import logs
from shmserve.observe.log_stream import LogStream

_LONGEST = 8192  # characters of a line; longer lines are split
_OWN = "shmserve."  # the server's loggers
# the logger given to models, and the loggers below it
_MODEL = ("shmserve.model", "shmserve.model.")


class LineRate:
    """Rate limit of lines: `per_s` lines a second, and as many in a burst. For any thread."""

    def __init__(self, per_s: int, now: Callable[[], float] = monotonic) -> None:
        self._per_s = float(per_s)
        self._allowance = self._per_s
        self._now = now
        self._at = now()
        self._dropped = 0
        self._lock = threading.Lock()

    def take(self) -> int | None:
        """Return the lines dropped since the last allowed one, or None to drop this line."""
        with self._lock:
            now = self._now()
            self._allowance = min(self._per_s, self._allowance + (now - self._at) * self._per_s)
            self._at = now
            if self._allowance < 1.0:
                self._dropped += 1
                return None
            self._allowance -= 1.0
            dropped, self._dropped = self._dropped, 0
            return dropped


class ModelOutput(LogStream):
    """`sys.stdout` or `sys.stderr` with the instance in each line, and a limited rate."""

    def __init__(self, below: TextIO, rate: LineRate) -> None:
        super().__init__(below)
        self._rate = rate

    def flush(self) -> None:
        """Write an incomplete line, too: a question without a line end, or the last words."""
        self.flush_begun()

    def _take(self, lines: str) -> None:
        for line in lines.split("\n"):
            for start in range(0, max(len(line), 1), _LONGEST):  # an empty line counts as a line
                self._write_line(line[start : start + _LONGEST])

    def _write_line(self, line: str) -> None:
        dropped = self._rate.take()
        if dropped is None:
            return
        if dropped:
            notice = f"({dropped} lines of this model were dropped: it prints too many)"
            line = f"{logs.printed(notice)}\n{logs.printed(line)}"
        else:
            line = logs.printed(line)
        super()._take(line)


class _ModelLines(logging.Filter):
    """Filter that passes the server's own records, and other records up to the rate."""

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
    """Limit the lines that models in this process print and log to `per_s` a second."""
    rate = LineRate(per_s)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_ModelLines(rate))
    sys.stdout, sys.stderr = (
        below and ModelOutput(below, rate)  # a process may have been started without this stream
        for below in (sys.stdout, sys.stderr)
    )
