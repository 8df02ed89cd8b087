"""Many small requests over one way, and nothing grows: `python -m bench.long [WAY ...]`.

Ways: lane, http (both by `shmserve.client`, on the Unix socket) and grpc (ModelInfer by grpcio).
One caller sends 16 bytes again and again, `--requests` times. Before, after each quarter and at the
end: slots in use, and by kind of process descriptors and memory of its own, the caller's as well.
The exit status is 1 if at the end slots are in use, or a process has more descriptors than after
the first quarter, or more memory than an allocator may keep for itself, or has ended meanwhile: the
figures of the one in its place would say nothing.
"""

import argparse
import contextlib
import os
import sys
import time

import numpy as np

import shmserve.client
from tests.grpc_client import Client, request
from tests.running_server import RunningServer, free_port, open_fds, rss_bytes

MODEL, INPUT, OUTPUT = "identity", "INPUT0", "OUTPUT0"
ROLES = ("http worker", "grpc", "executor", "coordinator", "supervisor")
WAYS = ("lane", "http", "grpc")
QUARTERS = 4
GROWTH_MIB = 8.0
SETTLE_S = 10.0  # time until memory and descriptors no longer needed are given back
X = np.arange(4, dtype=np.float32)


@contextlib.contextmanager
def by_client(server, way):
    with shmserve.client.connect(f"unix:{server.unix_path}", lanes=way == "lane") as client:

        def ask():
            result = client.infer(MODEL, {INPUT: X})
            return result[OUTPUT].tobytes(), result.transport

        give_up = time.monotonic() + SETTLE_S
        while ask()[1] != way:
            if time.monotonic() > give_up:
                raise RuntimeError(f"requests do not go by {way}")
        yield lambda: ask() == (X.tobytes(), way)


@contextlib.contextmanager
def by_grpc(address):
    data = request(X, MODEL, name=INPUT).SerializeToString()
    with Client(address) as client:
        infer = client.method("ModelInfer")
        yield lambda: infer(data, timeout=60).raw_output_contents[0] == X.tobytes()


def sample(server):
    """(slots in use, {process: (pid, descriptors, MiB)})."""
    pids = {os.getpid(): "caller"}
    for role in ROLES:
        pids |= {pid: f"{role} {number}" for number, pid in enumerate(server.pids(role))}
    held = {name: (pid, open_fds(pid), rss_bytes(pid) / 2**20) for pid, name in pids.items()}
    return len(server.show("slots")), held


def show(label, taken):
    slots, held = taken
    each = "  ".join(f"{name} {fds} fds {mib:.1f} MiB" for name, (_, fds, mib) in held.items())
    print(f"{label:>10}: {slots} slots  {each}", flush=True)


def growth(early, late):
    """Return descriptions of growth between two samples, and of slots still in use."""
    slots, held = late
    found = [f"{slots} slots are in use"] if slots else []
    for name, (pid, fds, mib) in held.items():
        _, was_fds, was_mib = early[1].get(name, (pid, fds, mib))
        if fds > was_fds:
            found.append(f"{name}: {was_fds} -> {fds} descriptors")
        if mib > was_mib + GROWTH_MIB:
            found.append(f"{name}: {was_mib:.1f} -> {mib:.1f} MiB")
    return found


def ended(first, late):
    """Return the processes of the first sample that are missing in the last sample."""
    left = {pid for pid, _, _ in late[1].values()}
    return [f"{name}: it has ended" for name, (pid, _, _) in first[1].items() if pid not in left]


def run(server, way, address, requests):
    print(f"{way}: {requests} requests")
    with by_grpc(address) if way == "grpc" else by_client(server, way) as ask:
        show("before", first := sample(server))
        early, began = None, time.monotonic()
        for quarter in range(1, QUARTERS + 1):
            for _ in range(requests // QUARTERS):
                if not ask():
                    return [f"{way}: a wrong answer"]
            taken = sample(server)
            early = early or taken
            show(f"{requests // QUARTERS * quarter}", taken)
        took = time.monotonic() - began
    give_up = time.monotonic() + SETTLE_S
    while (found := growth(early, late := sample(server))) and time.monotonic() < give_up:
        time.sleep(0.2)
    found += ended(first, late)
    show("idle", late)
    print(f"{requests / took:.0f} requests a second; {'; '.join(found) or 'nothing has grown'}")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--requests", type=int, default=1_000_000)
    arguments = parser.parse_args()
    ways = arguments.ways or WAYS
    if unknown := set(ways) - set(WAYS):
        parser.error(f"{unknown.pop()}: the ways are {', '.join(WAYS)}")
    if arguments.requests < QUARTERS:
        parser.error(f"--requests {arguments.requests}: at least {QUARTERS}")
    address = f"127.0.0.1:{free_port()}"
    settings = {"model_control": "explicit", "load_models": MODEL, "grpc_bind": address}
    with RunningServer("workers", **settings) as server:
        found = [f for w in ways for f in run(server, w, address, arguments.requests)]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
