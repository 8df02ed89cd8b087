"""What dynamic batching gives: `python -m bench.batching [SECONDS]`.

Two models with the same code, whose cost is per call (2 ms, as of a GPU that is hardly filled);
one has `dynamic_batching`. Clients send 256 bytes each over kept HTTP connections, one request
after the other, to both models in turn in the same run.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from shmserve.testing.running_server import RunningServer

CLIENTS = (1, 8, 32)
COST_S = 0.002
MODEL = f"""
import time
import numpy as np

class Model:
    def infer(self, request):
        x = request.input("X")
        time.sleep({COST_S})
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
    """The two models, `alone` and `batched`."""
    for name, more in (("alone", ""), ("batched", "dynamic_batching {}")):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(MODEL)
        (folder / name / "config.pbtxt").write_text(CONFIG + more)


def load(server: RunningServer, model: str, clients: int, seconds: float) -> list[float]:
    """The latencies, in seconds, of all requests that so many clients had answered in a time."""
    end = time.monotonic() + seconds
    latencies: list[float] = []
    header = json.dumps(
        {
            "inputs": [
                {
                    "name": "X",
                    "datatype": "FP32",
                    "shape": [1, 64],
                    "parameters": {"binary_data_size": 256},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    headers = {"Inference-Header-Content-Length": str(len(header))}

    def run() -> None:
        connection = http.client.HTTPConnection(server.http_host, server.http_port, 30)
        while (begun := time.monotonic()) < end:
            connection.request("POST", f"/v2/models/{model}/infer", header + bytes(256), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
            latencies.append(time.monotonic() - begun)
        connection.close()

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


def sizes(server: RunningServer, model: str) -> dict[int, int]:
    """How many executions there were of each number of elements."""
    _, document = server.get(f"/v2/models/{model}/stats")
    rows: list[dict[str, Any]] = document["model_stats"][0]["batch_stats"]
    return {row["batch_size"]: row["compute_infer"]["count"] for row in rows}


def main() -> None:
    """Print a row for each number of clients."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        with RunningServer(folder, grpc_processes=0) as server:
            for clients in CLIENTS:
                rates = {}
                before = sizes(server, "batched")
                for model in ("alone", "batched"):
                    load(server, model, clients, 0.3)
                    latencies = load(server, model, clients, seconds)
                    rates[model] = len(latencies) / seconds
                    p50, p99 = np.percentile(latencies, (50, 99)) * 1000
                    print(
                        f"{clients:3} clients {model:8} {rates[model]:8.0f}/s"
                        f"  p50 {p50:6.2f} ms  p99 {p99:6.2f} ms"
                    )
                after = sizes(server, "batched")
                met = {size: n - before.get(size, 0) for size, n in sorted(after.items())}
                print(f"    ratio {rates['batched'] / rates['alone']:.2f}, batch sizes {met}")


if __name__ == "__main__":
    main()
