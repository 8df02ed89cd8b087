"""gRPC: shmserve beside what a tutorial builds, in one run: ``python -m bench.rpc --help``.

    shmserve    ModelInfer of the server as shipped, one gRPC process, worker `identity`
    shmserve-2  the same with two gRPC processes
    pickle      a grpcio server with generated messages that hands the tensor to a model
                process through multiprocessing queues
    empty       a grpcio method that answers with nothing: the yardstick for small calls

Closed loop, each caller with a channel of its own; the client (`bench/load/rpc.py`) sends
bytes encoded beforehand and does not decode the answers. All servers run throughout. A round
measures every case once, the contestants of a case right after each other, every second round
backwards. Reported are medians over the rounds. Only ratios within one run mean anything.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench import cpu_time
from bench.run import machine
from tests.running_server import RunningServer, free_port

ROOT = Path(__file__).resolve().parents[1]
KIB, MIB = 1 << 10, 1 << 20
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
ALL = "shmserve", "shmserve-2", "pickle"
# tensor bytes, callers, contestants
CASES = [
    *[(64, callers, ("shmserve", "shmserve-2", "empty", "pickle")) for callers in (1, 8)],
    *[(size * MIB, callers, ALL) for size in (1, 16, 64) for callers in (1, 4)],
]


def start_rivals(stack, run_dir):
    """Start the rivals' process, marked with a run directory, and return the address."""
    address = f"127.0.0.1:{free_port()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.rivals.grpc_server", address],
        cwd=ROOT,
        env=os.environ | {"SHMSERVE_RUN_DIR": run_dir},
        stdout=subprocess.PIPE,
    )
    stack.callback(process.wait)
    stack.callback(process.terminate)
    assert process.stdout.readline() == b"ready\n"
    return address


def contestants(stack):
    """(address, method) and run directory by name."""
    run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-rpc-"))
    rivals = start_rivals(stack, run_dir)
    methods = {"pickle": "/bench/Pickle", "empty": "/bench/Empty"}
    servers = {name: ((rivals, method), run_dir) for name, method in methods.items()}
    for name, processes in (("shmserve", 1), ("shmserve-2", 2)):
        environ = {"SHMSERVE_GRPC_PROCESSES": str(processes)}
        server = stack.enter_context(RunningServer(environ=environ))
        servers[name] = (server.grpc_address, MODEL_INFER), server.run_dir
    return servers


def fire(target, run_dir, nbytes, callers, seconds):
    """Run one measurement in a separate process."""
    command = [sys.executable, "-m", "bench.load.rpc", *target, str(nbytes), str(callers)]
    before = cpu_time.seconds(run_dir)
    done = subprocess.run(
        [*command, str(seconds)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    told = json.loads(done.stdout)
    after = cpu_time.seconds(run_dir)
    return told | {"cpu_us": cpu_time.per_request(before, after, told["answers"])}


def summary(rounds, base):
    per_s = statistics.median(r["per_s"] for r in rounds)
    p50 = statistics.median(r["p50_us"] for r in rounds)
    low, high = min(r["per_s"] for r in rounds), max(r["per_s"] for r in rounds)
    ratio = ""
    if base is not None:
        of_base = statistics.median(r["per_s"] for r in base)
        base_p50 = statistics.median(r["p50_us"] for r in base)
        ratio = f"{per_s / of_base:7.2f} {p50 / base_p50:7.2f}"
    return f"{per_s:9.1f} ({low:8.1f} .. {high:8.1f}) {p50:10.0f} {ratio}"


def report(results):
    print(f"{'bytes':>9} {'callers':>7} {'server':11} {'per s':>9} {'(rounds)':>22}"
          f" {'p50 us':>10} {'per s':>7} {'p50':>7}  of empty / pickle; CPU; copied")  # fmt: skip
    for (nbytes, callers), servers in results.items():
        base = servers.get("empty", servers.get("pickle"))
        for name, rounds in servers.items():
            print(
                f"{nbytes:9} {callers:7} {name:11}",
                summary(rounds, None if rounds is base else base),
                cpu_time.shown(cpu_time.medians([r["cpu_us"] for r in rounds])),
                rounds[-1]["copied"] or "",
            )


def main():
    parser = argparse.ArgumentParser(prog="python -m bench.rpc", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=2.0, help="seconds a measurement")
    parser.add_argument("--largest", type=int, default=64 * MIB, help="bytes")
    parser.add_argument("--output", help="a file for every round's numbers (JSON)")
    options = parser.parse_args()
    results = {}
    description = machine()
    with contextlib.ExitStack() as stack:
        targets = contestants(stack)
        for number in range(options.rounds):
            for nbytes, callers, names in CASES:
                if nbytes > options.largest:
                    continue
                servers = results.setdefault((nbytes, callers), {name: [] for name in names})
                for name in names if number % 2 else reversed(names):
                    servers[name].append(fire(*targets[name], nbytes, callers, options.duration))
    print(json.dumps(description), f"load after {os.getloadavg()[0]:.1f}")
    report(results)
    if options.output:
        rows = [
            {"bytes": nbytes, "callers": callers, "servers": servers}
            for (nbytes, callers), servers in results.items()
        ]
        Path(options.output).write_text(
            json.dumps({"machine": description, "cases": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
