"""Chaos: clients loop over every protocol while random disturbances hit the service.

    python -m tests.crash.chaos --seconds 3600 [--seed N]

Disturbances come in pairs, the second within the first, drawn by a seed that is printed. After
each pair every process must be back and every kind of client must get right answers. As root with
CAP_SYS_ADMIN the run uses a private mount namespace with a small /dev/shm and a small run
directory, and fills both, too. Prints a JSON line per disturbance and a summary. Exit status 1 if
an answer was wrong, the service did not recover, or the service left anything behind.
"""

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.crash.disturbances import KILLS, OTHERS, ROLES, Scene
from tests.crash.load import DOORS, WITH_BATCHES, GrpcClient, Load, Verdict
from tests.crash.region_load import RegionClient
from tests.crash.soak import slots
from tests.needs import NEEDS
from tests.running_server import RunningServer, wait_until
from tests.servers import only

REPOSITORIES = Path(__file__).parents[1] / "repositories"
HERE = Path(__file__).parent
RECOVERY_S = 60.0  # longest time until every process is back and answers
LONGEST_S = 4.0  # of a disturbance
SHM_MIB, STATE_MIB = 1024, 32
STATE = f"/dev/shm/chaos-{os.getpid()}"  # processes are identified by their run directory
GATHERED = """backend: "python"
max_batch_size: 8
input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [
  { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "ROWS" data_type: TYPE_INT32 dims: [ 1 ] }
]
dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 3000 }
"""
# outer disturbance, inner disturbance, and their duration in seconds
Pair = tuple[str, str, float]


def with_batches(folder: Path) -> Path:
    """Make a repository of the basic models and a model that batches requests."""
    shutil.copytree(REPOSITORIES / "basic", folder, dirs_exist_ok=True)
    shutil.copytree(REPOSITORIES / "basic" / "echo", folder / "other")
    shutil.copytree(REPOSITORIES / "batching" / "native", folder / "gathered")
    (folder / "gathered" / "config.pbtxt").write_text(GATHERED)
    return folder


def whole(server: RunningServer, expected: Counter[str]) -> bool:
    """Return True if every process is back and every model answers."""
    found = counted(server)
    return all(found[role] >= count for role, count in expected.items()) and server.ready()


def counted(server: RunningServer) -> Counter[str]:
    """Processes of each role."""
    titles = server.processes().values()
    return Counter(role for title in titles for role in ROLES if f"shmserve: {role}" in title)


def at_random(rng: random.Random, names: list[str]) -> Iterator[Pair]:
    while True:
        outer = rng.choice(names)
        inner = rng.choice(["", *(name for name in names if name != outer)])
        yield outer, inner, rng.uniform(0.1, LONGEST_S)


def each_once(rng: random.Random, names: list[str]) -> Iterator[Pair]:
    """Yield every kill within another disturbance. Of the disturbances that stop processes, only a
    sample is used."""
    stops = [name for name in names if name.startswith("stop")]
    others = [name for name in names if name in OTHERS and name not in stops]
    others += rng.sample(stops, max(2, len(KILLS) - len(others)))
    rng.shuffle(others)
    for outer, inner in zip(others, KILLS, strict=False):
        yield outer, inner, 0.2


class Chaos:
    """One run. `notes`: disturbances, each with the time until the service had recovered."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.notes: list[dict[str, Any]] = []
        self.verdict = Verdict()
        table = KILLS | OTHERS
        missing = {"full /dev/shm": not scene.shm, "full state": not scene.state}
        self.left_out = [name for name, absent in missing.items() if absent]
        self.table = {name: do for name, do in table.items() if name not in self.left_out}

    def run(self, pairs: Iterator[Pair], seconds: float) -> None:
        """Run load and disturbances until `pairs` is exhausted or the time is over.

        Raises:
            TimeoutError: the service did not come back.
        """
        server, until = self.scene.server, time.monotonic() + seconds
        server.wait_instances()
        expected = counted(server)
        assert expected.keys() == set(ROLES), expected
        with Load(server, models=WITH_BATCHES, more=(GrpcClient, RegionClient)) as verdict:
            self.verdict = verdict
            for pair in pairs:
                if time.monotonic() > until:
                    break
                self.disturb(pair, expected)

    def disturb(self, pair: Pair, expected: Counter[str]) -> None:
        outer, inner, lasting = pair
        begun = time.monotonic()
        self.verdict.disturbed_until = math.inf
        with ExitStack() as stack:
            for name in filter(None, (outer, inner)):
                stack.enter_context(self.table[name](self.scene))
            time.sleep(lasting)
        over = time.monotonic()
        # A right answer until then may have been given before the processes died, so only
        # later answers count.
        self.wait(lambda: whole(self.scene.server, expected), f"{outer}, {inner}: not whole")
        self.verdict.disturbed_until = time.monotonic()
        seen = Counter(self.verdict.counts)
        self.wait(
            lambda: all(self.verdict.counts[door] > seen[door] for door in DOORS),
            f"{outer}, {inner}: no answers over each door after {seen}",
        )
        note = {"outer": outer, "inner": inner, "for_s": round(over - begun, 2)}
        self.notes.append({**note, "back_after_s": round(time.monotonic() - over, 2)})
        print(json.dumps(self.notes[-1]), flush=True)

    def wait(self, condition: Any, what: str) -> None:
        try:
            wait_until(condition, what, RECOVERY_S)
        except TimeoutError as ex:
            verdict, log = self.verdict, self.scene.server.log()
            seen = f"{verdict.counts}\n{verdict.refused[-5:]}\n{verdict.closed[-5:]}"
            raise TimeoutError(f"{ex}\n{seen}\n{log[-4000:]}") from None

    def summary(self, leaks: list[str]) -> dict[str, Any]:
        verdict = self.verdict
        done = Counter(note[key] for note in self.notes for key in ("outer", "inner") if note[key])
        return {
            "disturbances": dict(sorted(done.items())),
            "left_out": self.left_out,
            "counts": dict(verdict.counts),
            "wrong": verdict.wrong[:5],
            "longest_gap_s": round(max(verdict.gaps, default=0.0), 3),
            "slowest_recovery_s": max((note["back_after_s"] for note in self.notes), default=0.0),
            "leaks": leaks,
        }


def batches(server: RunningServer) -> int:
    """Return the number of batches with several requests that the batching model has run."""
    _, document = server.get("/v2/models/gathered/stats")
    (stats,) = document["model_stats"]
    return sum(
        batch["compute_infer"]["count"] for batch in stats["batch_stats"] if batch["batch_size"] > 1
    )


def inside(arguments: list[str]) -> None:
    """Restart this program in a mount namespace with file systems that may be filled. Does not
    return.

    The file systems end with the last process of the namespace, so nothing is left in any case.
    """
    script = (
        f"mount -t tmpfs -o size={SHM_MIB}m,mode=1777 tmpfs /dev/shm && mkdir {STATE} &&"
        f" mount -t tmpfs -o size={STATE_MIB}m,mode=700 tmpfs {STATE} &&"
        ' exec "$@"'
    )
    again = [sys.executable, "-m", "tests.crash.chaos", *arguments, "--inside"]
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", script, "sh", *again])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.chaos")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--once", action="store_true", help="every kind once, then end")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.inside and NEEDS["mounts"].met():
        inside(sys.argv[1:])
    print(json.dumps({"seed": options.seed}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = run(options, Path(folder))
    print(json.dumps(result))
    return 1 if result["wrong"] or result["leaks"] else 0


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    clock = folder / "clock"
    clock.write_bytes(bytes(8))
    environ = {"PYTHONPATH": str(HERE / "clock"), "CHAOS_CLOCK": str(clock)}
    settings = only("echo,pair,gathered")
    if options.inside:
        settings["run_dir"] = f"{STATE}/run"
    server = RunningServer(with_batches(folder / "models"), environ, watchdog_s=5, **settings)
    rng = random.Random(options.seed)
    folders = ("/dev/shm", STATE) if options.inside else ("", "")
    chaos = Chaos(Scene(server, rng, clock, *folders))
    plan = each_once if options.once else at_random
    with server:
        chaos.run(plan(rng, list(chaos.table)), options.seconds)
        wait_until(lambda: slots(server) == 0, "slots are left")
        gathered = batches(server)
    return {**chaos.summary(server.leaks()), "batches": gathered}


if __name__ == "__main__":
    sys.exit(main())
