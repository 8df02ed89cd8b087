"""The delay of new HTTP connections beside clients that connect and close: `python -m
bench.new_connections [CLIENTS ...]`.

A client connects, asks one small GET and closes, every 10 ms. Meanwhile other clients, each in a
process, do the same without a pause ("asking"), or close without having asked ("silent"). The
bench also opens 1,000 lasting connections as fast as one client can, before and after these
clients, and counts how many each worker has got. With one worker, and two.
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import resource
import socket
import tempfile
import time
from pathlib import Path

from bench.idle_connections import ask, connect, usage, workers
from bench.servers import Server

SECONDS = 4.0
EVERY_S = 0.01
LASTING = 1000
SPREADS = 5
SETTLED_S = 2.0  # until the workers have closed earlier connections


def once(port, asks, sources):
    """Connect from the next of `sources`. A closed connection keeps its port for a minute, and
    with a single source address the kernel would search 28,000 ports for a free port."""
    source = (f"127.0.{next(sources)}.1", 0)
    with socket.create_connection(("127.0.0.1", port), 60, source) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if asks:
            ask(client)


def churn(port, asks, done, stop):
    """Connect and close until `stop` is set; `done` counts."""
    sources = itertools.cycle(range(1, 255))
    while not stop.is_set():
        with contextlib.suppress(OSError):
            once(port, asks, sources)
            done.value += 1


def delays(port):
    """p50, p99 and the maximum, in milliseconds, of connecting, asking and closing."""
    sources = itertools.cycle(range(1, 255))
    took, until = [], time.perf_counter() + SECONDS
    while (began := time.perf_counter()) < until:
        once(port, True, sources)
        took.append((time.perf_counter() - began) * 1e3)
        time.sleep(EVERY_S)
    took.sort()
    return took[len(took) // 2], took[len(took) * 99 // 100], took[-1]


def beside(port, folders, number, asks):
    """Print the delays beside `number` clients."""
    stop = multiprocessing.Event()
    counts = [multiprocessing.Value("L", lock=False) for _ in range(number)]
    clients = [
        multiprocessing.Process(target=churn, args=(port, asks, count, stop)) for count in counts
    ]
    for client in clients:
        client.start()
    try:
        time.sleep(1)
        before, cpu, began = sum(c.value for c in counts), usage(folders)[2], time.monotonic()
        p50, p99, longest = delays(port)
        lasted = time.monotonic() - began
        rate = (sum(c.value for c in counts) - before) / lasted
        busy = (usage(folders)[2] - cpu) / lasted * 100
    finally:
        stop.set()
        for client in clients:
            client.join()
    kind = f"{number} {'asking' if asks else 'silent'}"
    print(
        f"  {kind:9}: p50 {p50:7.2f} ms, p99 {p99:7.1f}, max {longest:7.1f}; "
        f"they close {rate:6.0f} a second; the workers take {busy:3.0f} % of a core",
        flush=True,
    )


def sockets(folder):
    """Return the number of sockets of a process."""
    found = 0
    for entry in (folder / "fd").iterdir():
        with contextlib.suppress(OSError):
            found += os.readlink(entry).startswith("socket:")
    return found


def spread(port, folders):
    """Return how many of the lasting connections each worker gets, in ascending order."""
    time.sleep(SETTLED_S)
    before = [sockets(folder) for folder in folders]
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(port)) for _ in range(LASTING)]
        for client in clients:
            ask(client)
        return sorted(sockets(f) - b for f, b in zip(folders, before, strict=True))


def measure(number_of_workers, numbers):
    with tempfile.TemporaryDirectory() as directory:
        server = Server("shmserve", number_of_workers, Path(directory))
        try:
            folders = list(workers(server))
            print(f"{number_of_workers} worker(s)")
            if number_of_workers > 1:
                spread(server.port, folders)  # by then both workers accept
                fresh = [spread(server.port, folders) for _ in range(SPREADS)]
                print(f"  {LASTING} that last: {fresh}")
            for asks in (False, True):
                for number in numbers if asks else filter(None, numbers):
                    beside(server.port, folders, number, asks)
            if number_of_workers > 1:
                used = [spread(server.port, folders) for _ in range(SPREADS)]
                print(f"  {LASTING} that last: {used}")
        finally:
            server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("numbers", type=int, nargs="*", default=[0, 1, 2, 8])
    numbers = parser.parse_args().numbers
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4 * LASTING, hard), hard))
    for number_of_workers in (1, 2):
        measure(number_of_workers, numbers)


if __name__ == "__main__":
    main()
