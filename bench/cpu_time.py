"""Processor time that a request costs each kind of process, in microseconds.

Unlike rates and latencies these figures hardly change with the machine's other load.
"""

import contextlib
import os
import statistics
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_OURS = "shmserve: "
_RESOLUTION_US = 0.05


def seconds(run_dir):
    """Return the processor seconds, user and kernel, that a server's processes have taken until
    now, by (pid, role). A server's processes carry the run directory in their environment."""
    mark = f"SHMSERVE_RUN_DIR={run_dir}".encode()
    taken = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        process = Path("/proc", entry)
        with contextlib.suppress(OSError):  # another user's process, or a process that has ended
            if mark in (process / "environ").read_bytes().split(b"\0"):
                title = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                taken[int(entry), role_of(title)] = (
                    int(fields[11]) + int(fields[12])
                ) / TICKS_PER_S
    return taken


def role_of(title):
    """Return `http worker`, `grpc`, `executor`, …; `server` for a process of another server."""
    if not title.startswith(_OURS):
        return "server"
    role = title.removeprefix(_OURS).split("/")[0].split()
    return "http worker" if role[0] == "http" else role[0]


def per_request(before, after, requests):
    """Microseconds by role between two looks, during which so many requests were answered."""
    taken = {}
    for (pid, role), until in after.items():
        spent = until - before.get((pid, role), 0.0)
        taken[role] = taken.get(role, 0.0) + spent * 1e6 / max(requests, 1)
    return {role: round(us, 1) for role, us in sorted(taken.items()) if us >= _RESOLUTION_US}


def medians(rounds):
    """Return the medians of several rounds' `per_request`, by role."""
    roles = sorted({role for costs in rounds for role in costs})
    return {r: statistics.median(costs.get(r, 0.0) for costs in rounds) for r in roles}


def shown(costs):
    """For a table: ``executor 75, http worker 110``."""
    return ", ".join(f"{role} {us:.0f}" for role, us in costs.items())
