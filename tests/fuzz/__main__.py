"""Fuzz campaign: coverage-guided inputs for every parser, in turns.

    python -m tests.fuzz --inputs 10000000 [--seconds 600] [--targets http2,lane] [--keep]

A campaign can be stopped and continued: STATE/<target>/ holds the inputs that reached new code,
the progress, and the findings. Prints a JSON line per turn and a summary, also written to
STATE/report.json. Exit status 1 if there is a finding, or a target whose turn tried nothing new.
`--keep` writes the smallest inputs that reach as much code to the corpus in the repository, which
`make test` replays.
"""

import argparse
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.targets import CORPUS, SEEDS, TARGETS, inputs

TURN_S = 60  # turn of one target, before the next target
SHORTEST_S = 10  # of a turn, which first runs all known inputs
LIMITS = ("-timeout=20", "-rss_limit_mb=1024", "-malloc_limit_mb=256")
KEPT_FILES, KEPT_BYTES = 60, 8192  # of a target's corpus in the repository


def prepare(folder: Path, name: str) -> None:
    """Fill the folder of a target with all first inputs."""
    for part in ("inputs", "findings"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for data in inputs(name):
        (folder / "inputs" / hashlib.sha1(data).hexdigest()).write_bytes(data)


def engine(name: str, folder: Path, *options: str, seconds: float) -> tuple[int, str]:
    """Run the fuzzer; return the exit status and stderr.

    A minute after the time limit the fuzzer gets SIGABRT, and so writes the input that hangs to
    the findings.
    """
    command = [sys.executable, "-m", "tests.fuzz.engine", name, str(folder), *LIMITS, *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        for last_word in (signal.SIGABRT, signal.SIGKILL):
            try:
                told = process.communicate(timeout=seconds + 60)[1]
                break
            except subprocess.TimeoutExpired:
                process.send_signal(last_word)
        else:
            told = process.communicate()[1]
    return process.returncode, told.decode(errors="replace")


def progress(folder: Path) -> dict[str, int]:
    """Return the target's number of turns so far, and of inputs in all turns."""
    path = folder / "progress.json"
    found: dict[str, int] = json.loads(path.read_text()) if path.exists() else {}
    return {"turns": 0, "inputs": 0, **found}


def turn(name: str, folder: Path, left: int, seconds: float) -> dict[str, object]:
    """Run one target for a while; return its progress. The first inputs were counted in an earlier
    turn."""
    prepare(folder, name)
    known = len(list((folder / "inputs").iterdir()))
    _, told = engine(
        name, folder, f"-runs={known + left}", f"-max_total_time={int(seconds)}",
        "-print_final_stats=1", seconds=seconds,
    )  # fmt: skip
    runs = re.findall(r"stat::number_of_executed_units:\s*(\d+)", told) or re.findall(
        r"^#(\d+)\t", told, re.MULTILINE
    )
    if not runs:
        raise RuntimeError(f"the fuzzer did not run {name}:\n{told[-3000:]}")
    # without INITED, the turn ended among the known inputs
    begun = re.search(r"^#(\d+)\tINITED", told, re.MULTILINE)
    new = int(runs[-1]) - int(begun[1]) if begun else 0
    so_far = progress(folder)
    so_far = {"turns": so_far["turns"] + 1, "inputs": so_far["inputs"] + new}
    (folder / "progress.json").write_text(json.dumps(so_far))
    covered = re.findall(r"cov: (\d+)", told)
    covers = int(covered[-1]) if covered else 0
    return {"target": name, **state(folder), "new": new, "covered": covers}


def state(folder: Path) -> dict[str, object]:
    found = sorted(p.name for p in (folder / "findings").glob("*") if p.suffix != ".txt")
    return {"inputs": progress(folder)["inputs"], "findings": found}


def keep(name: str, folder: Path) -> None:
    """Replace the target's corpus by the smallest inputs that cover as much as all inputs.

    Raises:
        RuntimeError: the fuzzer found none; the corpus is unchanged.
    """
    prepare(folder, name)
    with tempfile.TemporaryDirectory() as merged:
        own = Path(merged) / "own"
        for part in ("inputs", "findings"):
            (own / part).mkdir(parents=True)
        status, told = engine(name, own, "-merge=1", str(folder / "inputs"), seconds=240)
        found = sorted((own / "inputs").iterdir(), key=lambda path: path.stat().st_size)
        if status or not found:
            raise RuntimeError(f"the fuzzer merged nothing of {name}:\n{told[-3000:]}")
        target, total = CORPUS / name, 0
        target.mkdir(parents=True, exist_ok=True)
        for old in target.glob("cov-*"):  # inputs that have found a fault stay
            old.unlink()
        for path in found[:KEPT_FILES]:
            total += path.stat().st_size
            if total > KEPT_BYTES:
                break
            if path.read_bytes() not in SEEDS[name]:
                shutil.copyfile(path, target / f"cov-{path.name[:12]}")


def campaign(options: argparse.Namespace) -> int:
    root, names = Path(options.state), options.targets.split(",")
    until = time.monotonic() + options.seconds
    stopped: list[str] = []
    while time.monotonic() < until:
        missing = {name: options.inputs - progress(root / name)["inputs"] for name in names}
        pending = [name for name in names if missing[name] > 0 and name not in stopped]
        if not pending:
            break
        # The target with the fewest turns, so that the parts of a campaign add up evenly.
        name = min(pending, key=lambda one: progress(root / one)["turns"])
        seconds = max(SHORTEST_S, min(TURN_S, until - time.monotonic()))
        row = turn(name, root / name, missing[name], seconds)
        print(json.dumps(row), flush=True)
        if not row["new"]:  # nor would the next turn try any
            stopped.append(name)
    summary = {name: {**state(root / name), "stopped": name in stopped} for name in names}
    (root / "report.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary))
    return 1 if stopped or any(row["findings"] for row in summary.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--inputs", type=int, default=10_000_000, help="of each target")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this run")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--state", default=".fuzz")
    parser.add_argument("--keep", action="store_true", help="write the corpus and end")
    options = parser.parse_args()
    if unknown := set(options.targets.split(",")) - TARGETS.keys():
        parser.error(f"--targets: nothing is called {', '.join(sorted(unknown))}")
    if options.keep:
        for name in options.targets.split(","):
            keep(name, Path(options.state) / name)
        return 0
    return campaign(options)


if __name__ == "__main__":
    sys.exit(main())
