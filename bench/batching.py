"""Benchmark of dynamic batching: `python -m bench.batching [SECONDS]`.

Two kinds of models: a cost of 2 ms per call (a GPU that is hardly filled), and a cost of 0.5 ms
per row (a filled GPU). Each kind has a model without `dynamic_batching`, a model with
`dynamic_batching`, and a model that also waits up to 2 ms for more requests. Clients send 256
bytes each over kept HTTP connections, one request after the other, to all models in turn in the
same run.
"""

import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.caller import Caller
from bench.turns import closed_loops
from tests.model_files import model_maker
from tests.running_server import RunningServer, binary_request

CLIENTS = (1, 8, 32)
PER_CALL_S, PER_ROW_S, DELAY_US = 0.002, 0.0005, 2000
COSTS = {"call": f"{PER_CALL_S}", "element": f"{PER_ROW_S} * len(x)"}
KINDS = {
    "alone": "",
    "batched": "dynamic_batching {}",
    "waiting": f"dynamic_batching {{ max_queue_delay_microseconds: {DELAY_US} }}",
}
MODEL = """
import time
import numpy as np

class Model:
    def infer(self, request):
        x = request.input("X")
        time.sleep(COST)
        np.add(x, 1, out=request.output("Y", x.shape))

    infer_batch = infer
"""
CONFIG = """
backend: "python"
max_batch_size: 32
input [ { name: "X" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 64 ] } ]
"""


def write_models(folder: Path) -> None:
    """A model for each cost and kind: `call-alone` and so on."""
    for cost, seconds in COSTS.items():
        for kind, more in KINDS.items():
            code = MODEL.replace("COST", seconds)
            model_maker(folder)(code, CONFIG + more, f"{cost}-{kind}")


def load(server: RunningServer, model: str, clients: int, seconds: float) -> list[float]:
    """Return the latencies, in seconds, of all requests that `clients` clients had answered in
    `seconds`."""
    body, headers = binary_request(np.zeros((1, 64), np.float32), name="X")
    with contextlib.ExitStack() as stack:
        callers = [Caller(stack, server) for _ in range(clients)]
        calls = [partial(c.post, f"/v2/models/{model}/infer", body, headers) for c in callers]
        return closed_loops(calls, seconds)


def sizes(server: RunningServer, model: str) -> dict[int, int]:
    """Return the number of executions by number of batched elements."""
    _, document = server.get(f"/v2/models/{model}/stats")
    rows: list[dict[str, Any]] = document["model_stats"][0]["batch_stats"]
    return {row["batch_size"]: row["compute_infer"]["count"] for row in rows}


def main() -> None:
    """Print a row for each number of clients."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        with RunningServer(folder, grpc_processes=0) as server:
            server.wait_instances()
            for cost in COSTS:
                for clients in CLIENTS:
                    compare(server, cost, clients, seconds)


def compare(server: RunningServer, cost: str, clients: int, seconds: float) -> None:
    """Print throughput and latencies of the models with the given cost under `clients` clients."""
    alone = 0.0
    for kind in KINDS:
        model = f"{cost}-{kind}"
        load(server, model, clients, 0.3)
        before = sizes(server, model)
        latencies = load(server, model, clients, seconds)
        rate = len(latencies) / seconds
        alone = alone or rate
        p50, p99 = np.percentile(latencies, (50, 99)) * 1000
        met = {n: count - before.get(n, 0) for n, count in sorted(sizes(server, model).items())}
        print(
            f"cost per {cost:7} {clients:3} clients {kind:8} {rate:8.0f}/s,"
            f" ratio {rate / alone:5.2f}, p50 {p50:6.2f} ms, p99 {p99:6.2f} ms, batches {met}",
            flush=True,
        )


if __name__ == "__main__":
    main()
