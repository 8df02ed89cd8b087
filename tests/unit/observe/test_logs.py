"""Log settings can be changed while a process runs."""

import json
import subprocess
import sys

PROGRAM = """
import json, logging, sys
from shmserve.core.live_settings import LogSettings
from shmserve.observe import logs

def all_levels(mark):
    for name in ("shmserve.x", "gunicorn.error"):
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger(name), level)("%s %s", mark, level)
    logging.getLogger(logs.TRACES).info("%s trace", mark)

told = json.loads(sys.argv[1])
if told.get("early"):
    logs.apply(LogSettings(info=False))
logs.setup("me 100%", told["level"], told.get("form", "text"))
gunicorn = logging.getLogger("gunicorn.error")
gunicorn.propagate = False
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("%(asctime)s [%(levelname)s] %(message)s", "[%Y]"))
gunicorn.addHandler(handler)
logs.adopt()
all_levels("first")
if "then" in told:
    logs.apply(LogSettings(**told["then"]))
    all_levels("then")
"""


def output(program: str, *words: str) -> tuple[list[str], list[str]]:
    """Run a program, and return its lines on standard output and on standard error."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


def run(**told: object) -> list[str]:
    return output(PROGRAM, json.dumps(told))[1]


def levels(lines: list[str], mark: str) -> list[str]:
    return [line.rpartition(f"{mark} ")[2] for line in lines if f"{mark} " in line]


def test_the_setting_says_what_is_logged_at_first() -> None:
    assert levels(run(level="info"), "first") == [*["info", "warning", "error"] * 2, "trace"]
    assert levels(run(level="error"), "first") == ["error", "error", "trace"]
    assert levels(run(level="debug"), "first")[0] == "debug"


def test_a_change_holds_at_once_for_gunicorns_logger_too() -> None:
    lines = run(level="info", then={"info": False, "verbose": 1})
    assert levels(lines, "then") == [*["debug", "warning", "error"] * 2, "trace"]
    lines = run(level="info", then={"error": False, "warning": False})
    assert levels(lines, "then") == ["info", "info", "trace"]


def test_the_format_changes_the_timestamps() -> None:
    lines = [line for line in run(level="info", then={"format": "ISO8601"}) if "then" in line]
    for line in lines:
        stamp = line.split()[0]
        assert (stamp[10], stamp[-1], len(stamp)) == ("T", "Z", 24)
    assert "INFO me 100% shmserve.x: then info" in lines[0]
    first = run(level="info")
    assert "T" not in first[0].split()[0]
    assert {line.split(" me 100% ")[1].split(":")[0] for line in first} >= {"gunicorn.error"}


def test_what_the_coordinator_said_before_the_setup_stays() -> None:
    lines = run(level="info", early=True)
    assert levels(lines, "first")[:2] == ["warning", "error"]


def test_every_line_can_be_an_object() -> None:
    lines = [json.loads(line) for line in run(level="info", form="json")]
    assert {line["logger"] for line in lines} == {"shmserve.x", "gunicorn.error", "shmserve.trace"}
    first = lines[0]
    assert (first["level"], first["process"], first["message"]) == ("info", "me 100%", "first info")
    assert (first["time"][10], first["time"][-1]) == ("T", "Z")
    assert isinstance(first["pid"], int)


PRINTS = """
import logging, sys
from shmserve.log_fields import log_fields
from shmserve.observe import logs, model_output
logs.setup("m", "info", "json")
model_output.limit(1000)
print("printed\\nby a model")
try:
    raise ValueError("why")
except ValueError as ex:
    about = log_fields(request="r 1", pid=7, error=ex, name="a=b", source="http://")
    logging.getLogger("x").error("failed", exc_info=True, extra=about)
"""


def test_what_models_print_has_their_names() -> None:
    program = PRINTS.replace('"m", "info", "json"', '"executor 100%/1/0", "info"')
    lines, (line, *_) = output(program)
    assert line.endswith(" x: failed request=r 1 pid=7 error=why name='a=b' from=http://")
    assert [line.partition(" INFO ")[2] for line in lines] == [
        "executor 100%/1/0 stdout: printed",
        "executor 100%/1/0 stdout: by a model",
    ]


def test_what_models_print_and_tracebacks_are_objects_too() -> None:
    printed, errors = output(PRINTS)
    assert [json.loads(line)["message"] for line in printed] == ["printed", "by a model"]
    (failed,) = map(json.loads, errors)
    assert (failed["request"], failed["message"], failed["error"]) == ("r 1", "failed", "why")
    assert (failed["name"], failed["from"], failed["other_pid"]) == ("a=b", "http://", 7)
    assert failed["pid"] != 7
    assert "ValueError: why" in failed["exception"]


OTHERS = """
import logging, sys
from shmserve.observe import logs
logs.setup("m", "info", sys.argv[1])
logging.warning("x", extra={"fields": ["a"], "request": "r 1", "status": 503})
"""


def test_attributes_that_others_give_to_their_records() -> None:
    (text,), (found,) = output(OTHERS, "text")[1], output(OTHERS, "json")[1]
    assert text.endswith(" WARNING m root: x")
    line = json.loads(found)
    assert (line["message"], line["request"], line["status"]) == ("x", "r 1", 503)
    assert "fields" not in line
