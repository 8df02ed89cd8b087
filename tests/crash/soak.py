"""Soak: long load over every protocol; memory, descriptors, threads and slots must not grow.

    python -m tests.crash.soak [--seconds 3600] [--output soak]

Writes OUTPUT.csv, with a line per role of processes and moment, and OUTPUT.svg, a chart of the
same figures. Prints what grew. Exit status 1 if a resource grew or an answer was wrong.
"""

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

from shmserve.cli.measuring.chart import line_chart
from tests.crash.load import GrpcClient, Load, Verdict
from tests.crash.region_load import RegionClient
from tests.running_server import RunningServer, open_fds, rss_bytes, wait_until

MODELS = Path(__file__).parents[1] / "repositories" / "basic"
SETTLE_S = 20.0  # time to close unneeded descriptors; leaked descriptors stay open
SPREAD = 12  # descriptors: lanes of a process that once gets all 4 connections, to 3 instances
SIZES = (1024, 1024, 1024, 1 << 20)  # floats
GROWTH_MIB = 8.0  # an allocator may keep so much
_ROLE = re.compile(r"shmserve: (http worker|[a-z]+)")
_SMAPS = re.compile(r"^(Rss|Pss):\s+(\d+) kB", re.MULTILINE)
_MEASURES = ("pss_mib", "rss_mib", "own_mib", "fds", "threads")


class Sample(Struct, frozen=True):
    """Sum over all processes of one role at one moment.

    `own_mib` is private memory; the other two memory figures include shared segments.
    """

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
    """Return one sample per role."""
    used = slots(server)
    roles: dict[str, dict[int, dict[str, float]]] = {}
    for pid, title in server.processes().items():
        match = _ROLE.match(title)
        with contextlib.suppress(OSError):  # the process ends just now
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
    """Run load for `seconds`, with samples. The last samples are of the idle server."""
    server.wait_instances()
    samples: list[Sample] = []
    with Load(server, 4, SIZES, more=(GrpcClient, RegionClient)) as verdict:
        wait_until(lambda: not verdict.silent(), "no answers over each door")
        begun = time.monotonic()
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
    """Return resources of a role that are larger at the end, idle, than in the second quarter of
    the samples.

    Growth in the first quarter is normal: each concurrent request has a lane and may need a
    separate segment. Both are kept, so their number settles at the greatest concurrency so far.
    The kernel spreads connections over the HTTP workers and may change the spread, so a few more
    may come late. A real leak grows with every request. Figures of a replaced process say nothing,
    so the first processes must still live at the end.
    """
    end = samples[-1].second
    times = sorted({one.second for one in samples if one.second < end})
    second_quarter = set(times[len(times) // 4 : len(times) // 2 + 1])
    early = [one for one in samples if one.second in second_quarter]
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
    """Return the processes of the first samples that are missing in the last samples."""
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
    output.with_suffix(".svg").write_text(line_chart(title, panels))


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
