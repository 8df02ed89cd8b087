"""Command ``shmserve show top``: a live view of a running server, drawn by rich."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from shmserve import config
from shmserve.cli.operating.show import Row, ask
from shmserve.config import Settings
from shmserve.errors import ConfigError, ShmserveError
from shmserve.observe import usage
from shmserve.observe.usage import Usage

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_LOOKS = ("processes", "models", "stats", "queues")
_MIB = 1 << 20


class Look(Struct, frozen=True):
    """Observation at one time. `time`: time of the observation, in seconds (`time.monotonic`).
    `tables`: rows by table name. `usage`: use of resources by pid."""

    time: float
    tables: dict[str, list[Row]]
    usage: dict[int, Usage]


def main(arguments: argparse.Namespace) -> int:
    return run(config.load(), arguments.interval)


def run(settings: Settings, interval_s: float) -> int:
    """Draw until Ctrl-C, or once if the output is no terminal. Return the exit status. Raise
    ConfigError if rich is not installed, or the interval is out of range. Raise Unavailable if no
    server answers at the start."""
    if not 0.1 <= interval_s <= 3600:
        raise ConfigError("--interval: must be between 0.1 and 3600 seconds")
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise ConfigError("show top needs rich: pip install 'shmserve[cli]'") from None
    run_dir = config.run_dir(settings)
    before, console = look(run_dir), Console()
    if not console.is_terminal:
        time.sleep(interval_s)
        console.print(frame(before, look(run_dir)))
        return 0
    with Live(frame(before, before), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            try:
                now = look(run_dir)
            except ShmserveError as ex:  # e.g. while the coordinator is being replaced
                live.update(f"{ex.message}; looking again", refresh=True)
                continue
            live.update(frame(before, now), refresh=True)
            before = now


def look(run_dir: str) -> Look:
    """Read the server's tables, and usage of processes from /proc. Raises as `show.ask`."""
    tables = {name: ask(run_dir, name) for name in _LOOKS}
    used_by_pid = {
        row["pid"]: used for row in tables["processes"] if (used := usage.of_process(row["pid"]))
    }
    return Look(time.monotonic(), tables, used_by_pid)


def frame(before: Look, now: Look) -> Group:
    """Return the view of the time between two looks."""
    from rich.console import Group

    processes = _table("process", "role", "pid", "CPU %", "resident MiB", "shared MiB", "up s")
    for row in now.tables["processes"]:
        used = now.usage.get(row["pid"])
        processes.add_row(
            row.get("instance") or row["process"],
            row["role"],
            str(row["pid"]),
            _rate(before, now, row["pid"]),
            str(used.resident // _MIB) if used else "",
            str(row["held_bytes"] // _MIB),
            f"{row['up_s']:.0f}",
        )
    return Group(_models(before, now), processes)


def _models(before: Look, now: Look) -> Table:
    models = _table("model", "version", "state", "instances", "in flight", "per s", "failed", "ms")
    flight: dict[str, int] = {}
    for row in now.tables["queues"]:
        if "in_flight" in row and "instance" in row:
            flight[row["instance"]] = flight.get(row["instance"], 0) + int(row["in_flight"])
    past = {(r["model"], r["version"]): r for r in before.tables["stats"]}
    stats = {(r["model"], r["version"]): r for r in now.tables["stats"]}
    rows: dict[tuple[str, str], list[Row]] = {}
    for row in now.tables["models"]:
        rows.setdefault((row["model"], row["version"]), []).append(row)
    for key, instances in rows.items():
        own = stats.get(key, {})
        count = own.get("answered", 0) - past.get(key, {}).get("answered", 0)
        ready = [r for r in instances if r["instance_state"] == "READY"]
        waiting = sum(flight.get(r["instance"], 0) for r in instances)
        state = instances[0]["state"]
        models.add_row(
            *key,
            f"[{'green' if state == 'READY' else 'red'}]{state}",
            f"{len(ready)} of {len([r for r in instances if r['instance']])}",
            str(waiting),
            _per_second(count, before, now),
            str(own.get("failed", 0)),
            f"{own.get('request_ms', 0):.3f}",
        )
    return models


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(expand=True, box=None, header_style="bold")
    for number, column in enumerate(columns):
        justify: Any = "left" if number < 2 or column == "state" else "right"
        # In a narrow terminal, shorten the first column rather than the numbers.
        table.add_column(column, justify=justify, no_wrap=number > 0, overflow="ellipsis")
    return table


def _rate(before: Look, now: Look, pid: int) -> str:
    if pid not in before.usage or pid not in now.usage:
        return ""
    return _per_second(100 * (now.usage[pid].cpu_s - before.usage[pid].cpu_s), before, now)


def _per_second(count: float, before: Look, now: Look) -> str:
    elapsed = now.time - before.time
    return f"{max(0.0, count) / elapsed:.1f}" if elapsed > 0 else ""
