"""The kill matrix: clients loop while every kind of process is killed -9, again and again.

    python -m tests.crash.drill --seconds 60 --kills 3

Prints one JSON line a kill and a summary; exit status 1 if an answer was wrong or
anything was left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from shmserve.testing.running_server import RunningServer, wait_until
from tests.crash.load import WITH_BATCHES, Load, Verdict

REPOSITORIES = Path(__file__).parents[1] / "repositories"
ROLES = (
    *("http worker", "grpc", "executor echo", "executor pair", "executor gathered"),
    *("template", "coordinator", "supervisor"),
)
GATHERED = """backend: "python"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [
  { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] }
]
dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 3000 }
"""


def with_batches(folder: Path) -> Path:
    """A repository of the basic models, and of one whose requests meet in batches."""
    shutil.copytree(REPOSITORIES / "basic", folder, dirs_exist_ok=True)
    shutil.copytree(REPOSITORIES / "batching" / "native", folder / "gathered")
    (folder / "gathered" / "config.pbtxt").write_text(GATHERED)
    return folder


def whole(server: RunningServer, expected: dict[str, int]) -> bool:
    """Whether every process is there again and every model answers."""
    if any(len(server.pids(role)) < count for role, count in expected.items()):
        return False
    return server.ready()


def kill_one(server: RunningServer, role: str, expected: dict[str, int]) -> dict[str, object]:
    """Kill one process of a role; how long until the service was whole again."""
    victim = server.pids(role)[0]
    os.kill(victim, signal.SIGKILL)
    begun = time.monotonic()
    wait_until(
        lambda: victim not in server.pids(role) and whole(server, expected),
        f"{role} is not back\n{server.log()[-4000:]}",
    )
    return {"killed": role, "pid": victim, "whole_after_s": round(time.monotonic() - begun, 3)}


def drill(
    server: RunningServer, seconds: float, kills: int
) -> tuple[Verdict, list[dict[str, object]]]:
    """Load for `seconds`, every role killed `kills` times meanwhile, evenly spread."""
    server.wait_instances()
    expected = {role: len(server.pids(role)) for role in ROLES}
    assert all(expected.values()), expected
    notes = []
    begun = time.monotonic()
    with Load(server, models=WITH_BATCHES) as verdict:
        for turn, role in enumerate(ROLES * kills):
            due = begun + seconds * (turn + 1) / (len(ROLES) * kills + 1)
            time.sleep(max(0.0, due - time.monotonic()))
            notes.append(kill_one(server, role, expected))
        time.sleep(max(0.0, begun + seconds - time.monotonic()))
    return verdict, notes


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--kills", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RunningServer(with_batches(Path(folder)))
        with server:
            verdict, notes = drill(server, arguments.seconds, arguments.kills)
    for note in notes:
        print(json.dumps(note))
    leaks = server.leaks()
    gaps = sorted(verdict.gaps)
    summary = {
        "counts": dict(verdict.counts),
        "wrong": verdict.wrong[:5],
        "longest_gap_s": round(gaps[-1], 3) if gaps else None,
        "leaks": leaks,
    }
    print(json.dumps(summary))
    return 1 if verdict.wrong or leaks else 0


if __name__ == "__main__":
    sys.exit(main())
