"""Lines of a kind are bounded in each process, and further lines are counted."""

import json
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from shmserve.log_fields import log_fields
from shmserve.observe import line_limit
from shmserve.observe.line_limit import BURST, PER_S, LineLimit


class Log:
    """A logger with a limit, and the written lines."""

    def __init__(self) -> None:
        self.now = 0.0
        self.limit = LineLimit(("shmserve.access",), lambda: self.now)
        self.lines: list[str] = []
        self._handler = logging.Handler()
        self._handler.emit = lambda record: self.lines.append(record.getMessage())  # type: ignore[method-assign]
        self._handler.addFilter(self.limit)
        self.loggers = [logging.getLogger(f"shmserve.{name}") for name in ("here", "access")]
        for logger in self.loggers:
            logger.addHandler(self._handler)
            logger.setLevel(logging.DEBUG)
            logger.propagate = False

    def close(self) -> None:
        for logger in self.loggers:
            logger.removeHandler(self._handler)
            logger.propagate = True
            logger.setLevel(logging.NOTSET)


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.close()


def test_the_next_line_of_a_kind_has_the_count(log: Log) -> None:
    here, access = log.loggers
    for number in range(BURST + 12_345):
        here.info("refused %s", number)
    assert log.lines == [f"refused {number}" for number in range(BURST)]
    here.info("another kind")
    here.warning("refused %s", "a level of its own")
    for _ in range(2 * BURST):
        access.info("GET")
        here.debug("asked for")
    assert len(log.lines) == BURST + 2 + 4 * BURST
    del log.lines[:]
    log.now += 1.0
    for _ in range(PER_S + 5):
        here.info("refused %s", "again")
    log.limit.tell()
    assert log.lines == [
        "refused again (and 12,345 more)",
        *["refused again"] * (PER_S - 1),
        "refused again (and 4 more)",
    ]
    log.limit.tell()
    assert len(log.lines) == PER_S + 1, "a count is written once"


def test_a_line_left_out_keeps_no_error_alive(log: Log) -> None:
    class Failure(Exception):
        pass

    here = log.loggers[0]
    error = Failure("no room")
    gone = weakref.ref(error)
    why = (Failure, error, None)
    extra = log_fields(error=error, status=500)
    for _ in range(BURST + 2):
        about = (here.name, logging.ERROR, "", 0, "%s failed", (error,), why)
        log.limit.filter(here.makeRecord(*about, extra=extra))
    del error, why, extra, about
    assert gone() is None
    log.limit.tell()
    assert log.lines == ["no room failed (and 1 more)"]


def test_texts_with_values_in_them_are_bounded_too(log: Log) -> None:
    here = log.loggers[0]
    for number in range(line_limit._KINDS + BURST + 500):
        here.info(f"refused {number}")
    assert len(log.lines) == line_limit._KINDS + BURST


PROGRAM = """
import logging, sys, threading
from shmserve.errors import Unavailable
from shmserve.frontends.request_ids import log_failure
from shmserve.observe import line_limit, log_output, logs
logs.setup("http worker 1", "info", sys.argv[1])
line_limit._TELL_S = float(sys.argv[2])
for number in range(1200):
    log_failure(logging.getLogger("shmserve.http"), "GET /x", f"id-{number}", Unavailable("no"))
for thread in threading.enumerate():
    if isinstance(thread, threading.Timer) and sys.argv[3] == "waits":
        thread.join(30)
logging.getLogger("shmserve.http").info("the end")
log_output.end()
"""


@pytest.mark.parametrize(("tell_s", "then"), [("0.1", "waits"), ("60", "ends")])
def test_a_process_writes_each_failure_up_to_the_bound_and_the_count_soon_or_at_its_end(
    tell_s: str, then: str
) -> None:
    command = [sys.executable, "-c", PROGRAM, "json", tell_s, then]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    failures = [line for line in lines if line["message"].startswith("GET /x failed")]
    assert [line["request"] for line in failures[:BURST]] == [f"id-{n}" for n in range(BURST)]
    assert all(line["status"] == 503 for line in failures[:BURST])
    counts = [re.findall(r"\(and ([0-9,]+) more\)", line["message"]) for line in failures]
    left_out = sum(int(count.replace(",", "")) for found in counts for count in found)
    assert len(failures) < 600
    assert len(failures) + left_out == 1200
    is_last = lines[-1]["message"] != "the end"
    assert is_last == (then == "ends"), "the count comes by itself, or at the end"
