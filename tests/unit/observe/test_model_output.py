"""A model printing without end leaves room in the log, and missing lines are counted."""

import logging
import sys

from shmserve.observe import logs
from shmserve.observe.line_limit import LineLimit, LineRate
from shmserve.observe.model_output import ModelOutput, limit


def test_lines_beyond_the_rate_are_dropped_and_counted(tmp_path):
    now = [0.0]
    rate = LineRate(3, lambda: now[0])
    with (tmp_path / "log").open("w") as below:
        out = ModelOutput(below, rate)
        for number in range(10):
            print("line", number, file=out)
        now[0] = 0.4
        print("later", end="", file=out)
        out.flush()
        print("x" * 20_000, end="", file=out)
        now[0] = 10.0
        print("end", file=out)
        assert out.fileno() == below.fileno()
        assert out.encoding == below.encoding
    lost = "lines of this model were dropped: it prints too many"
    assert (tmp_path / "log").read_text().splitlines() == [
        *("line 0", "line 1", "line 2"),
        *(f"(7 {lost})", "later", f"(3 {lost})", "end"),
    ]


def test_a_long_line_counts_as_the_lines_that_it_fills(tmp_path):
    with (tmp_path / "log").open("w") as below:
        print("x" * 20_000, "y", sep="\n", file=ModelOutput(below, LineRate(2, lambda: 0.0)))
    assert (tmp_path / "log").read_text().splitlines() == ["x" * 8192] * 2


def test_what_the_server_itself_says_is_never_dropped(tmp_path, monkeypatch):
    root, said = logging.getLogger(), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logs, "limit", LineLimit())
    handler.addFilter(logs.limit)
    monkeypatch.setattr(root, "handlers", [handler])
    with (tmp_path / "log").open("w") as below:
        monkeypatch.setattr(sys, "stdout", below)
        monkeypatch.setattr(sys, "stderr", below)
        limit(2)
        for _ in range(5):
            print("printed", file=sys.stderr)
            logging.getLogger("shmserve.model").error("logged")
            logging.getLogger("shmserve.model.part").error("logged")
            logging.getLogger("shmserve.executor").error("own")
        sys.stdout.flush()
    assert said == ["logged", *["own"] * 5]
    assert (tmp_path / "log").read_text() == "printed\n"
