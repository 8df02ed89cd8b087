"""Reload drill: models are loaded, reloaded and unloaded while requests run.

    python -m tests.crash.reload --cycles 500

Each cycle reloads `echo` with a changed configuration, so that the model is really replaced, loads
`other` and unloads it again. Meanwhile clients send requests to `echo` and to `pair`, which is
never reloaded. Every request must get a right answer, and no resource may grow.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.crash.load import Load, Verdict
from tests.crash.soak import SETTLE_S, SPREAD
from tests.running_server import ROOT, RunningServer, open_fds, rss_bytes, wait_until
from tests.servers import only

SMALL = (10, 1000)
STEADY = ("http worker", "coordinator", "supervisor", "executor pair")


def repository(folder: Path) -> Path:
    """`echo`, `pair`, and `other`, a copy of the former."""
    for name, source in (("echo", "echo"), ("pair", "pair"), ("other", "echo")):
        shutil.copytree(ROOT / "tests/repositories/basic" / source, folder / name)
    return folder


def changed(turn: int) -> str:
    """Return a configuration of `echo` that differs by turn but takes the same requests."""
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    return json.dumps(
        {
            "backend": "python",
            "input": [{"name": "IN", **tensor}],
            "output": [{"name": "OUT", **tensor}],
            "parameters": {"turn": {"string_value": str(turn)}},
        }
    )


def cycle(server: RunningServer, turn: int) -> None:
    """Run one cycle; every step must succeed."""
    for action, model, more in (
        ("load", "echo", {"config": changed(turn)}),
        ("load", "other", {}),
        ("unload", "other", {}),
    ):
        answer = server.control(action, model, **more)
        assert answer == (200, None), f"{action} {model}: {answer}\n{server.log()[-4000:]}"


def sample(server: RunningServer, turn: int) -> dict[str, Any]:
    """Measure resources that could grow: processes, fds, private memory, segments, names in
    /dev/shm, files."""
    titles = server.processes()
    steady = {
        f"{role} {index}": pid for role in STEADY for index, pid in enumerate(server.pids(role))
    }
    return {
        "cycle": turn,
        "processes": len(titles),
        "fds": {name: open_fds(pid) for name, pid in steady.items()},
        "rss_mib": {name: round(rss_bytes(pid) / 2**20, 1) for name, pid in steady.items()},
        "segments": len(server.show("segments")),
        "names": len([name for name in os.listdir("/dev/shm") if "shmserve." in name]),
        "files": sum(len(files) for _, _, files in os.walk(server.run_dir)),
    }


def settled(server: RunningServer, processes: int) -> None:
    """Wait until replaced processes have ended."""
    wait_until(
        lambda: len(server.processes()) == processes and not leaving(server),
        f"processes are left: {server.processes()}",
    )


def leaving(server: RunningServer) -> bool:
    """Return True if a revision is still being unloaded."""
    return any(row["state"] == "UNLOADING" for row in server.show("models"))


def drill(
    server: RunningServer, cycles: int, samples: int, clients: int = 4
) -> tuple[Verdict, list[dict[str, Any]]]:
    """Cycles under load, with samples of the idle server in between."""
    server.wait_instances()
    processes = len(server.processes())
    found = []
    total = Verdict()
    for part in range(samples):
        with Load(server, clients, SMALL) as verdict:
            for turn in range(part * cycles // samples, (part + 1) * cycles // samples):
                cycle(server, turn)
        settled(server, processes)
        found.append(sample(server, (part + 1) * cycles // samples))
        total.add(verdict)
    give_up = time.monotonic() + SETTLE_S
    while grown(found) and time.monotonic() < give_up:
        time.sleep(0.2)
        found[-1] = sample(server, cycles)
    return total, found


def lost(verdict: Verdict) -> list[str]:
    """Return the requests without a right answer."""
    return [*verdict.wrong, *verdict.refused, *verdict.closed]


def grown(samples: list[dict[str, Any]]) -> list[str]:
    """Return the resources that were larger at the end than in the middle."""
    middle, last = samples[len(samples) // 2], samples[-1]
    found = [
        f"{what}: {middle[what]} -> {last[what]}"
        for what in ("processes", "names", "files")
        if last[what] > middle[what]
    ]
    found += [
        f"{name}: {middle['fds'][name]} -> {count} fds"
        for name, count in last["fds"].items()
        if count > middle["fds"].get(name, count) + SPREAD
    ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=500)
    parser.add_argument("--samples", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RunningServer(repository(Path(folder)), **only("echo,pair"))
        begun = time.monotonic()
        with server:
            verdict, samples = drill(server, arguments.cycles, arguments.samples)
    for one in samples:
        print(json.dumps(one))
    problems = [*lost(verdict)[:5], *grown(samples), *server.leaks()]
    gaps = sorted(verdict.gaps)
    summary = {
        "seconds": round(time.monotonic() - begun),
        "counts": dict(verdict.counts),
        "longest_gap_s": round(gaps[-1], 3) if gaps else None,
        "problems": problems,
    }
    print(json.dumps(summary))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
