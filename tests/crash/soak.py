"""Many requests, and nothing grows: slots, fds, memory.

    python -m tests.crash.soak [--small 100000] [--large 1000]

Prints one JSON line per sample; exit status 1 if slots are left or fds have grown.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.testing.running_server import RunningServer, open_fds, rss_bytes, wait_until
from tests.crash.load import outputs_of, request_of

MODELS = Path(__file__).parents[1] / "repositories" / "basic"
SETTLE_S = 20.0  # for what is not needed any more to be closed: what leaks stays
SPREAD = 12  # descriptors: lanes of a process that gets all 4 connections for once, to 3 instances


def sample(server: RunningServer, label: str) -> dict[str, Any]:
    """fds and private memory of every process of the service, and slots in use."""
    pids = [*server.pids("http worker"), *server.pids("executor"), *server.pids("coordinator")]
    return {
        "after": label,
        "fds": {server.processes().get(pid, ""): open_fds(pid) for pid in pids},
        "rss_mib": {
            server.processes().get(pid, ""): round(rss_bytes(pid) / 2**20, 1) for pid in pids
        },
        "slots": slots(server),
    }


def slots(server: RunningServer) -> int:
    """Slots in use in all processes."""
    return len(server.show("slots"))


def requests(server: RunningServer, count: int, floats: int, connections: int = 4) -> list[str]:
    """Send `count` requests of one size over a few connections; what went wrong."""
    wrong: list[str] = []

    def work(number: int) -> None:
        array = np.full(floats, number, np.float32)
        body, headers = request_of("echo", array)
        wanted = array.tobytes()
        connection = http.client.HTTPConnection(server.http_host, server.http_port, timeout=60)
        for _ in range(count // connections):
            connection.request("POST", "/v2/models/echo/infer", body, headers)
            answer = connection.getresponse()
            data = answer.read()
            length = int(answer.headers.get("Inference-Header-Content-Length", 0))
            if answer.status != 200 or outputs_of(data, length)["OUT"] != wanted:
                wrong.append(f"{answer.status}")
        connection.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong


def soak(server: RunningServer, small: int, large: int, rounds: int = 4) -> list[dict[str, Any]]:
    """Warm up, then samples after each round of small and of large requests."""
    assert requests(server, 400, 1024) == []
    assert requests(server, 16, 4 << 20) == []
    samples = [sample(server, "warm-up")]
    for turn in range(1, rounds + 1):
        assert requests(server, small // rounds, 1024) == []
        assert requests(server, large // rounds, 4 << 20) == []
        label = f"{small * turn // rounds} small, {large * turn // rounds} of 16 MiB"
        samples.append(sample(server, label))
    wait_until(lambda: slots(server) == 0, "slots are left")
    samples.append(sample(server, "idle"))
    give_up = time.monotonic() + SETTLE_S
    while grown(samples) and time.monotonic() < give_up:
        time.sleep(0.2)
        samples[-1] = sample(server, "idle")
    return samples


def grown(samples: list[dict[str, Any]]) -> list[str]:
    """Processes whose fds grew in the second half.

    In the first they may: each concurrent request has a lane and may need a segment of its
    own, which are kept, so their number settles at the greatest concurrency there was. How
    connections spread over the HTTP workers is the kernel's choice and changes: a few more
    may come late. What leaks, leaks with every request.
    """
    middle, last = samples[len(samples) // 2]["fds"], samples[-1]["fds"]
    return [
        f"{n}: {middle[n]} -> {last[n]} fds" for n in last if last[n] > middle.get(n, 0) + SPREAD
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", type=int, default=100_000)
    parser.add_argument("--large", type=int, default=1_000)
    arguments = parser.parse_args()
    server = RunningServer(MODELS)
    with server:
        samples = soak(server, arguments.small, arguments.large)
    for one in samples:
        print(json.dumps(one))
    problems = grown(samples) + server.leaks()
    print(json.dumps({"problems": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
