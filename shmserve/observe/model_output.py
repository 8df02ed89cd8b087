"""What models print, in bounds: lines beyond so many a second are dropped and counted."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, TextIO

from shmserve.observe import logs
from shmserve.observe.log_stream import DroppingStream

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


class ModelOutput(io.TextIOBase):
    """In place of `sys.stdout` or `sys.stderr`. What goes to the descriptor past it (by C code, or
    through `buffer`) is not counted."""

    def __init__(self, below: TextIO, rate: LineRate) -> None:
        self._below = below
        self._never_waits = DroppingStream(below)
        self._rate = rate
        self._begun = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Write what is whole lines by now."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if len(self._begun) > _LONGEST:
                lines, self._begun = [*lines, self._begun], ""
            for line in lines:
                for start in range(0, max(len(line), 1), _LONGEST):  # an empty one is one, too
                    self._write_line(line[start : start + _LONGEST])
        return len(text)

    def _write_line(self, line: str) -> None:
        dropped = self._rate.take()
        if dropped is None:
            return
        if dropped:
            lost = f"({dropped} lines of this model were dropped: model_log_lines_per_s)"
            line = f"{logs.printed(lost)}\n{logs.printed(line)}"
        else:
            line = logs.printed(line)
        self._never_waits.write(f"{line}\n")

    def flush(self) -> None:
        """Write what has no end yet, too: a question without a line's end, or the last words."""
        with self._lock:
            if self._begun:
                begun, self._begun = self._begun, ""
                self._write_line(begun)
            if not self._below.closed:  # finalisers flush, too, behind whoever has closed that
                self._never_waits.flush()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._below.fileno()

    def isatty(self) -> bool:
        return self._below.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._below.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)  # buffer, encoding, errors, reconfigure


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
    sys.stdout = ModelOutput(sys.stdout, rate)
    sys.stderr = ModelOutput(sys.stderr, rate)
