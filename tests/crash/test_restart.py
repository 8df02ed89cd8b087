"""Short form of the restart drill; `python -m tests.crash.restart` is the long form.

Runs in a separate process, which is the parent of all processes that a service leaves behind, as
systemd is.
"""

import json
import subprocess
import sys

from tests.running_server import ROOT, WATCHDOG_S


def test_no_request_is_lost_in_a_restart_and_a_reload() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.crash.restart",
            "--restarts",
            "1",
            "--reloads",
            "1",
            "--short",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=4 * WATCHDOG_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["step"] for step in steps] == ["restart", "reload", "all"]
    ways = steps[-1]["ways"]
    for way in (
        "right",
        "over new connections",
        "over grpc",
        "over regions",
        "over lane",
        "over aio",
    ):
        assert ways.get(way, 0) > 0, way
