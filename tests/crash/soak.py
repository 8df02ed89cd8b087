"""Requests over every door for long, and nothing grows: memory, descriptors, threads, slots.

    python -m tests.crash.soak [--seconds 3600] [--output soak]

Writes OUTPUT.csv, a line for each role of processes and moment, and OUTPUT.svg, the same drawn;
prints what grew and exits with 1 if something did, or an answer was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import re
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from shmserve.cli.measuring.line_chart import svg
from shmserve.testing.running_server import RunningServer, open_fds, rss_bytes, wait_until
from tests.crash.load import GrpcClient, Load, Verdict
from tests.crash.region_load import RegionClient

MODELS = Path(__file__).parents[1] / "repositories" / "basic"
SETTLE_S = 20.0  # for what is not needed any more to be closed: what leaks stays
SPREAD = 12  # descriptors: lanes of a process that gets all 4 connections for once, to 3 instances
SIZES = (1024, 1024, 1024, 1 << 20)  # floats
GROWTH_MIB = 8.0  # what an allocator may keep for itself
_ROLE = re.compile(r"shmserve: (http worker|[a-z]+)")
_SMAPS = re.compile(r"^(Rss|Pss):\s+(\d+) kB", re.MULTILINE)
_MEASURES = ("pss_mib", "rss_mib", "own_mib", "fds", "threads")


class Sample(Struct, frozen=True):
    """All processes of one role at one moment, added up: `own_mib` is private memory, which the
    other two mix with segments that are shared."""

    second: float
    role: str
    processes: int
    pids: str
    slots: int  # of the whole service
    pss_mib: float
    rss_mib: float
    own_mib: float
    fds: int
    threads: int


def slots(server: RunningServer) -> int:
    """Slots in use in all processes."""
    return len(server.show("slots"))


def sample(server: RunningServer, second: float) -> list[Sample]:
    """One of each role."""
    used = slots(server)
    roles: dict[str, dict[int, dict[str, float]]] = {}
    for pid, title in server.processes().items():
        match = _ROLE.match(title)
        with contextlib.suppress(OSError):  # it ends just now
            measured = _measured(pid)
            roles.setdefault(match[1] if match else "master", {})[pid] = measured
    return [
        Sample(round(second, 2), role, len(rows), _pids(rows), used, **_added([*rows.values()]))
        for role, rows in sorted(roles.items())
    ]


def _pids(rows: dict[int, Any]) -> str:
    return " ".join(map(str, sorted(rows)))


def _measured(pid: int) -> dict[str, float]:
    shared = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = {f"{name.lower()}_mib": int(kib) / 1024 for name, kib in _SMAPS.findall(shared)}
    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    own = rss_bytes(pid) / 2**20
    return {**found, "own_mib": own, "fds": open_fds(pid), "threads": threads}


def _added(rows: list[dict[str, float]]) -> dict[str, Any]:
    return {key: round(sum(row[key] for row in rows), 1) for key in _MEASURES}


def soak(server: RunningServer, seconds: float, every_s: float) -> tuple[Verdict, list[Sample]]:
    """Load for `seconds`, with samples; the last ones are of the idle server, at rest."""
    server.wait_instances()
    begun, samples = time.monotonic(), []
    with Load(server, 4, SIZES, more=(GrpcClient, RegionClient)) as verdict:
        while (second := time.monotonic() - begun) < seconds:
            samples += sample(server, second)
            time.sleep(every_s)
    wait_until(lambda: slots(server) == 0, "slots are left")
    give_up = time.monotonic() + SETTLE_S
    while True:
        last = sample(server, time.monotonic() - begun)
        if not grown(samples + last) or time.monotonic() > give_up:
            return verdict, samples + last
        time.sleep(0.2)


def grown(samples: list[Sample]) -> list[str]:
    """What a role has at the end, idle, and had not in the second quarter of the load's time.

    In the first it may grow: each concurrent request has a lane and may need a segment of its
    own, which are kept, so their number settles at the greatest concurrency there was. How
    connections spread over the HTTP workers is the kernel's choice and changes: a few more
    may come late. What leaks, leaks with every request. Figures of a process that took another's
    place say nothing, so who was there first must be there at the end.
    """
    end = samples[-1].second
    loaded = max((one.second for one in samples if one.second < end), default=end)
    early = [one for one in samples if loaded / 4 <= one.second <= loaded / 2]
    problems = ended(samples)
    for last in [one for one in samples if one.second == end]:
        rows = [one for one in early if one.role == last.role]
        if not rows:
            problems.append(f"{last.role}: no samples of the second quarter")
            continue
        for measure, spread in (("fds", SPREAD), ("threads", 2), ("own_mib", GROWTH_MIB)):
            before = median(getattr(row, measure) for row in rows)
            now = getattr(last, measure)
            if now > before + spread * last.processes:
                problems.append(f"{last.role}: {before} -> {now} {measure}")
    return problems


def ended(samples: list[Sample]) -> list[str]:
    """Processes of the first samples that are not in the last ones."""
    begin, end = samples[0].second, samples[-1].second
    left = {pid for one in samples if one.second == end for pid in one.pids.split()}
    return [
        f"{one.role}: process {pid} has ended"
        for one in samples
        for pid in one.pids.split()
        if one.second == begin and pid not in left
    ]


def write(samples: list[Sample], output: Path, title: str) -> None:
    """The table and the picture."""
    with output.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(Sample.__struct_fields__)
        table.writerows([getattr(s, name) for name in Sample.__struct_fields__] for s in samples)
    roles = sorted({one.role for one in samples})
    panels = {
        f"{measure}, by role": {
            role: [(s.second, getattr(s, measure)) for s in samples if s.role == role]
            for role in roles
        }
        for measure in _MEASURES
    }
    used = {s.second: s.slots for s in samples}
    panels["slots in use"] = {"slots": [(second, float(n)) for second, n in used.items()]}
    output.with_suffix(".svg").write_text(svg(title, panels))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--output", type=Path, default=Path("soak"))
    options = parser.parse_args()
    server = RunningServer(MODELS)
    with server:
        every_s = max(0.5, options.seconds / 300)
        verdict, samples = soak(server, options.seconds, every_s)
    write(samples, options.output, f"{sum(verdict.counts.values())} requests of 4 KiB and 4 MiB")
    problems = grown(samples) + server.leaks() + verdict.silent() + verdict.wrong[:5]
    problems += [reason for reason in verdict.refused if "died" in reason][:5]
    print(json.dumps({"counts": dict(verdict.counts), "problems": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
