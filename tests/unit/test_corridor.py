"""Ceilings for the files, moves and calls of one warm request: see `bench.corridor`."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A change may only lower these numbers, or raise them with the reason beside the number.
CEILINGS = {
    # 32, 95, 135, and since then: every request's Host and origin are looked at (1, 2, 1), and what
    # a peer or client has sent is decoded where nothing but one error can come of it (1, 4, 3)
    # 33, 98, 131, and since then: a connection waits on its worker's loop, where others go on
    # meanwhile, and not in the kernel (2, 8, 12)
    # 34, 99, 128, and since then: a wait may begin with a look (1, 3, 3), and one file counts runs,
    # before an answer to a frontend and after an answer to a lane (1, 0, 0)
    "http": {"files": 36, "moves": 102, "calls": 131},
    # 34, 112, 161 with the `grpcio` library, whose own work is not counted. The default engine is
    # ours: HTTP/2's frames and windows are, the loop's turns, and what is received into slots
    # 45, 174, 242, and since then: a wait may begin with a look (1, 3, 3), and that file (1, 0, 0)
    "grpc": {"files": 47, "moves": 177, "calls": 245},
}


@pytest.fixture(scope="module")
def measured():
    # In a process of its own: threads and settings of other tests would be measured, too
    command = [sys.executable, "-m", "bench.corridor", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["routes"]


@pytest.mark.parametrize("route", CEILINGS)
def test_a_request_takes_no_more_than_the_ceilings(route: str, measured: Any) -> None:
    found = {name: measured[route][name] for name in CEILINGS[route]}
    over = {name for name, ceiling in CEILINGS[route].items() if found[name] > ceiling}
    assert not over, f"{route}: {found}; `python -m bench.corridor --functions` tells what is new"


def test_the_rooms_are_those_that_the_architecture_lists(measured: Any) -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text().split("## One request")[1].split("\n## ")[0]
    listed = [set(re.findall(r"^\| `(.+?)` \|", part, re.M)) for part in text.split("Over gRPC")]
    http, grpc = ({room["file"] for room in measured[route]["rooms"]} for route in ("http", "grpc"))
    assert http == listed[0]
    assert grpc - http == listed[1]


@pytest.mark.parametrize("route", CEILINGS)
def test_rooms_add_up(route: str, measured: Any) -> None:
    found = measured[route]
    rooms = found["rooms"]
    assert found["files"] == len({room["file"] for room in rooms}) == len(rooms)
    assert found["calls"] == sum(room["calls"] for room in rooms)
    assert all(room["calls"] == sum(room["functions"].values()) for room in rooms)
    # Frontend and executor have both been seen
    assert found["threads"] >= 2
    assert "execute" in json.dumps([room["functions"] for room in rooms])
