"""Measures shmserve against the floors and the rivals: ``python -m bench --help``."""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import cpu_time, load, report
from bench.floors import FLOORS
from bench.servers import NAMES, Server

HERE = Path(__file__).parent
KIB, MIB = 1 << 10, 1 << 20
ALL = "shmserve", "trivial", "queue", "dirty"
SMALL = "shmserve", "trivial", "trivial-gthread", "queue", "dirty"

# model, tensor bytes, contestants
SCENARIOS = [
    ("noop", 4 * KIB, SMALL),
    ("identity", 4 * KIB, ALL),
    ("identity", 64 * KIB, ALL),
    ("identity", 1 * MIB, ALL),
    ("identity", 16 * MIB, ALL),
    ("identity", 64 * MIB, ALL),
    ("identity", 256 * MIB, ALL),
]


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, two short rounds")
    parser.add_argument("--servers", default=",".join(NAMES), help="comma-separated names")
    parser.add_argument("--models", default="noop,identity")
    parser.add_argument("--sizes", default="", help="comma-separated bytes; default: all")
    parser.add_argument("--connections", default="1,8")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--duration", type=float, default=0, help="seconds a measurement")
    parser.add_argument("--workers", type=int, default=1, help="HTTP workers of each server")
    parser.add_argument("--output", default=str(HERE / "results" / "latest.json"))
    parser.add_argument("--plot", action="store_true", help="also draw OUTPUT as SVG")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.duration = options.duration or (1.0 if options.quick else 4.0)
    if options.quick and not options.sizes:
        options.sizes = f"{4 * KIB},{1 * MIB},{16 * MIB}"
    options.sizes = [int(size) for size in options.sizes.split(",") if size]
    options.connections = [int(number) for number in options.connections.split(",")]
    options.servers = options.servers.split(",")
    options.models = options.models.split(",")
    if unknown := set(options.servers) - set(NAMES):
        parser.error(f"unknown servers: {', '.join(sorted(unknown))}")
    return options


def machine():
    """Return a line that describes the machine of the measurement."""
    cpu = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def commit():
    """Return the commit; an empty text without git or outside a repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def available_bytes():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def cases(options):
    """Yield an entry for each scenario, number of connections and server."""
    for model, nbytes, servers in SCENARIOS:
        if model not in options.models or (options.sizes and nbytes not in options.sizes):
            continue
        for connections in options.connections:
            for server in servers:
                if server in options.servers:
                    yield {
                        "model": model,
                        "bytes": nbytes,
                        "connections": connections,
                        "server": server,
                        "rounds": [],
                        "refused": "",
                    }


def probe(case, server, directory):
    """Send one request, and return the reason why the case cannot be measured, or an empty
    text."""
    if case["bytes"] * case["connections"] * 8 > available_bytes():
        return "not enough memory for a fair run"
    request, tensor = load.write_request(directory, case["model"], case["bytes"])
    outcome = load.fire(server.address, request, tensor, 1, 0, 0, 1)
    return outcome["first_error"] if outcome["errors"] else ""


def measure(options, directory):
    planned = list(cases(options))
    floors = {name: [] for name in FLOORS}
    servers = {}
    try:
        for name in dict.fromkeys(case["server"] for case in planned):
            print(f"starting {name}", file=sys.stderr)
            servers[name] = Server(name, options.workers, directory)
        for case in planned:
            case["refused"] = probe(case, servers[case["server"]], directory)
        for number in range(options.rounds):
            for name, floor in FLOORS.items():
                floors[name].append(floor())
            # The servers of one scenario are measured next to each other; the first place rotates.
            ordered = planned[:]
            if number % 2:
                ordered.reverse()
            for case in ordered:
                if not case["refused"]:
                    measure_one(case, servers[case["server"]], options, directory)
            print(f"round {number + 1} of {options.rounds} done", file=sys.stderr)
    finally:
        for server in servers.values():
            server.stop()
    return floors, planned


def measure_one(case, server, options, directory):
    request, tensor = load.write_request(directory, case["model"], case["bytes"])
    # Eight requests of 256 MiB take longer than a round of small requests.
    duration = max(options.duration, 2.0 * case["bytes"] / (64 * MIB))
    warmup = min(1.0, duration / 4)
    connections = case["connections"]
    before = cpu_time.seconds(server.run_dir)
    outcome = load.fire(server.address, request, tensor, connections, warmup, duration)
    after = cpu_time.seconds(server.run_dir)
    outcome["cpu_us"] = cpu_time.per_request(before, after, outcome.get("answers", 0))
    case["rounds"].append(outcome)
    if outcome["errors"]:
        where = f"{case['server']} {case['model']} {case['bytes']} x{connections}"
        print(f"errors: {where}: {outcome['first_error']}", file=sys.stderr)


def summarise(case):
    good = [outcome for outcome in case["rounds"] if outcome["requests"] and not outcome["errors"]]
    case["failed_rounds"] = len(case["rounds"]) - len(good)
    for key in ("per_s", "p50_us", "p90_us", "p99_us"):
        values = [outcome[key] for outcome in good]
        if values:
            case[key] = {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
            }
    case["cpu_us"] = cpu_time.medians([outcome["cpu_us"] for outcome in good])


def main(arguments=None):
    options = parse(arguments)
    load.build()
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="bench-requests-") as directory:
        floors, measured = measure(options, Path(directory))
    for case in measured:
        summarise(case)
    result = {
        "machine": machine(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(started)),
        "options": {k: v for k, v in vars(options).items() if k not in ("output", "plot")},
        "floors_us": {
            name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
            for name, v in floors.items()
        },
        "cases": measured,
    }
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(report.table(result))
    if options.plot:
        report.plot(result, output.with_suffix(".svg"))
    broken = [case for case in measured if case.get("failed_rounds")]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
