"""Bounded output of models: lines beyond a rate per second are dropped and counted."""

import sys
from typing import TextIO

from shmserve.observe import logs
from shmserve.observe.line_limit import LineRate
from shmserve.observe.log_stream import LogStream

_LONGEST = 8192  # characters of a line; longer lines are split


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


def limit(per_s: int) -> None:
    """Limit the lines that models in this process print and log to `per_s` a second."""
    rate = LineRate(per_s)
    logs.limit.limit_models(rate)
    sys.stdout, sys.stderr = (
        below and ModelOutput(below, rate)  # a process may have been started without this stream
        for below in (sys.stdout, sys.stderr)
    )
