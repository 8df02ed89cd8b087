"""Cost of idle HTTP connections: `python -m bench.idle_connections [NUMBER ...]`.

One server with two workers. For each number of connections, each used once before: memory and
threads of the workers, processor time of the workers while nothing happens, and the latency of a
busy client's requests (GET of a model's state, one after the other) meanwhile.
"""

import argparse
import contextlib
import resource
import socket
import time
from pathlib import Path

from bench.turns import seconds
from tests.running_server import RunningServer

REQUEST = b"GET /v2/models/noop/ready HTTP/1.1\r\nHost: localhost\r\n\r\n"
ROUNDS = 3000
QUIET_S = 5.0
AT_ONCE = 200  # connections opened in one go: the listeners' backlog
TICKS = 100


def ask(client):
    client.sendall(REQUEST)
    answer = client.recv(4096)
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer[:80])


def connect(port):
    client = socket.create_connection(("127.0.0.1", port), 60)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def latencies(port):
    """p50 and p99 in microseconds."""
    with connect(port) as client:
        times = sorted(seconds(lambda: ask(client)) for _ in range(ROUNDS))
    return times[ROUNDS // 2] * 1e6, times[ROUNDS * 99 // 100] * 1e6


def workers(server):
    """Return the folders below /proc of the server's HTTP workers."""
    return [Path(f"/proc/{pid}") for pid in server.pids("http worker")]


def usage(folders):
    """Return resident MiB, threads, and seconds of processor time of all workers."""
    memory = threads = ticks = 0
    for folder in folders:
        fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        ticks += int(fields[11]) + int(fields[12])
        threads += int(fields[17])
        memory += int(fields[21]) * resource.getpagesize() >> 20
    return memory, threads, ticks / TICKS


def measure(port, number, folders):
    with contextlib.ExitStack() as stack:
        for start in range(0, number, AT_ONCE):
            count = min(AT_ONCE, number - start)
            clients = [stack.enter_context(connect(port)) for _ in range(count)]
            for client in clients:
                ask(client)
        memory, threads, before = usage(folders)
        time.sleep(QUIET_S)
        idle = (usage(folders)[2] - before) / QUIET_S * 100
        p50, p99 = latencies(port)
    held = f"{memory:5} MiB, {threads:6} threads, {idle:4.1f} % of a core"
    print(f"{number:6} connections: {held}; p50 {p50:5.0f} us, p99 {p99:5.0f} us", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("numbers", type=int, nargs="*", default=[0, 2000, 10_000])
    numbers = parser.parse_args().numbers
    wanted = max(numbers) + 100
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    with RunningServer(http_workers=2, grpc_processes=0) as server:
        folders = workers(server)
        latencies(server.http_port)
        for number in numbers:
            measure(server.http_port, number, folders)


if __name__ == "__main__":
    main()
