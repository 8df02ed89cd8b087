"""Cost of an idle service: `python -m bench.idle [MODELS ...]`.

For each number of models (each an `identity` in Python with one instance; 0: the shipped workers):
seconds from the start to ready, memory by kind of process as the kernel shares it out (PSS), and,
over `--seconds` of idling, how often each kind of process was woken and the processor time for
these wake-ups. Wake-ups are voluntary context switches of all threads: their number is the same on
a busy machine as on an idle machine.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench.cpu_time import role_of
from tests.running_server import ROOT, RunningServer

IDENTITY = ROOT / "workers" / "identity"
SETTLE_S = 3.0


def _repository(models, folder):
    for number in range(models):
        _identity(folder / f"identity_{number:03}")
    return folder if models else ROOT / "workers"


def _identity(folder):
    shutil.copytree(IDENTITY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity"', f'"{folder.name}"'))


def memory(processes):
    """Return MiB by kind of process: PSS, and the part of PSS that no other process has (both
    private)."""
    found = defaultdict(lambda: [0, 0.0, 0.0])
    for folder, role in processes:
        with contextlib.suppress(OSError):
            lines = (line.split() for line in (folder / "smaps_rollup").read_text().splitlines())
            kib = {words[0]: int(words[1]) for words in lines if words[0].endswith(":")}
            row = found[role]
            row[0] += 1
            row[1] += kib["Pss:"] / 1024
            row[2] += (kib["Private_Clean:"] + kib["Private_Dirty:"]) / 1024
    return dict(found)


def activity(processes):
    """(wake-ups, seconds of processor time) by thread and kind, since each began."""
    found = {}
    for folder, role in processes:
        with contextlib.suppress(OSError):
            for thread in (folder / "task").iterdir():
                with contextlib.suppress(OSError):
                    status = (thread / "status").read_text()
                    wakes = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
                    ns = int((thread / "schedstat").read_text().split()[0])
                    name = (thread / "comm").read_text().strip()
                    found[role, thread.name, name] = wakes, ns / 1e9
    return found


def idle(processes, seconds):
    """By kind: wake-ups a second, percent of a processor, and the same wake-ups by thread."""
    before, began = activity(processes), time.monotonic()
    time.sleep(seconds)
    after, took = activity(processes), time.monotonic() - began
    found = defaultdict(lambda: [0.0, 0.0])
    threads = defaultdict(float)
    for key, (wakes, cpu) in after.items():
        earlier = before.get(key, (0, 0.0))
        row = found[key[0]]
        row[0] += (wakes - earlier[0]) / took
        row[1] += 100 * (cpu - earlier[1]) / took
        threads[key[0], key[2]] += (wakes - earlier[0]) / took
    return dict(found), dict(threads)


def measure(models, seconds, by_thread):
    with tempfile.TemporaryDirectory(prefix="bench-idle-") as folder:
        server = RunningServer(_repository(models, Path(folder)))
        began = time.monotonic()
        try:
            server.start(wait_ready=False)
            server.wait_ready()
            ready_s = time.monotonic() - began
            time.sleep(SETTLE_S)
            titles = server.processes()
            processes = [(Path(f"/proc/{pid}"), role_of(title)) for pid, title in titles.items()]
            held = memory(processes)
            spent, threads = idle(processes, seconds)
        finally:
            server.stop()
    what = f"{models} models" if models else "the shipped workers"
    print(f"{what}: ready in {ready_s:.2f} s, load {os.getloadavg()[0]:.1f}")
    rows = [(role, *held[role], *spent.get(role, (0.0, 0.0))) for role in sorted(held)]
    rows.append(("all", *(sum(row[place] for row in rows) for place in range(1, 6))))
    for role, count, pss, private, wakes, percent in rows:
        print(
            f"  {role:12} {count:3} processes  PSS {pss:7.1f} MiB, private {private:7.1f}"
            f"  {wakes:7.1f} wake-ups/s  {percent:6.2f} % of a processor"
        )
    if by_thread:
        for (role, name), wakes in sorted(threads.items(), key=lambda item: -item[1])[:20]:
            print(f"    {wakes:7.1f}/s {role}: {name}")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=int, nargs="*", default=[0, 1, 60])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", action="store_true", help="show which threads were woken")
    arguments = parser.parse_args()
    for models in arguments.models:
        measure(models, arguments.seconds, arguments.threads)


if __name__ == "__main__":
    main()
