"""Costs of a chain of three models, by the party that chains them:
`python -m bench.pipelines [ROUNDS]`.

Each of three models adds one to 16 MiB of FP32, in an executor of its own. The chain runs in these
ways, in turn in one run, every second round backwards:

    ensemble           the three models as one ensemble, over HTTP
    Triton's calls     a model that calls the three with `InferenceRequest.exec`, over HTTP
    native calls       a model that calls the three with `request.call`, over HTTP
    one by one         a client that calls the three over HTTP, and sends each output back
    regions            a client with `shmserve.client`: each answer lies in shared memory, where the
                       next model reads it, and requests go over HTTP on the Unix socket
    lanes              as `regions`, over lanes
    ensemble, regions  the ensemble with input and output in regions

HTTP means one kept connection over TCP with binary tensors. The client receives the bytes into an
existing buffer, and sends them from there. Results are checked, off the clock.

`beyond` is the time outside of the three models, whose own time is `compute_infer` of their
statistics. `copied` counts bytes copied in user space, from the receipts of the client's requests.
An ensemble's receipt includes the steps; the receipt of a model that calls others does not include
the calls. Bytes copied by calls, `in calls`, are the remaining growth of the three models'
`shmserve_copied_bytes_total`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shmserve.client
from shmserve.client import Client
from shmserve.testing.running_server import RunningServer

COUNT = 4 << 20  # elements: 16 MiB
NBYTES = 4 * COUNT
STEPS = ("first", "second", "third")
WARM_UP = 5
BASE = "one by one"
STEP = """
import numpy as np

class Model:
    def infer(self, request):
        x = request.input("X")
        np.add(x, 1, out=request.output("Y", x.shape))
"""
NATIVE = f"""
class Model:
    def infer(self, request):
        y = request.input("X")
        for model in {STEPS}:
            y = request.call(model, {{"X": y}})["Y"]
        return {{"Y": y}}
"""
TRITON = f"""
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tensor = pb_utils.get_input_tensor_by_name(request, "X")
        for model in {STEPS}:
            response = pb_utils.InferenceRequest(
                model_name=model,
                requested_output_names=["Y"],
                inputs=[pb_utils.Tensor("X", tensor.as_numpy())],
            ).exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            tensor = pb_utils.get_output_tensor_by_name(response, "Y")
        return pb_utils.InferenceResponse([tensor])
"""
TENSORS = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


Way = Callable[[], tuple[np.ndarray[Any, Any], int]]  # the chain's result, and bytes copied


def write_models(folder: Path) -> None:
    """Write the three models, and three models that chain the three."""
    names = ["X", "a", "b", "Y"]
    steps = ""
    for model, taken, given in zip(STEPS, names, names[1:], strict=False):
        steps += (
            f'step {{ model_name: "{model}" model_version: -1 '
            f'input_map {{ key: "X" value: "{taken}" }} '
            f'output_map {{ key: "Y" value: "{given}" }} }} '
        )
    sources = dict.fromkeys(STEPS, STEP) | {"native": NATIVE, "triton": TRITON}
    for model, source in sources.items():
        (folder / model / "1").mkdir(parents=True)
        (folder / model / "1" / "model.py").write_text(source)
        (folder / model / "config.pbtxt").write_text('backend: "python"' + TENSORS)
    (folder / "all" / "1").mkdir(parents=True)
    ensemble = f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {steps} }}'
    (folder / "all" / "config.pbtxt").write_text(ensemble)


class HttpCaller:
    """A client with one connection and one buffer; the tensor of each answer is the tensor of the
    next request."""

    def __init__(self, server: RunningServer) -> None:
        self._connection = http.client.HTTPConnection(server.http_host, server.http_port, 60)
        self._buffer = bytearray(NBYTES)
        self._array = np.frombuffer(self._buffer, np.float32)
        tensor = {"name": "X", "datatype": "FP32", "shape": [COUNT]}
        inputs = [{**tensor, "parameters": {"binary_data_size": NBYTES}}]
        document = {"inputs": inputs, "parameters": {"binary_data_output": True}}
        self._head = json.dumps(document).encode()

    def way(self, *models: str) -> Way:
        """Return a function that asks `models` one after the other; each answer's output is the
        next input."""

        return lambda: (self._array, sum([self._ask(model) for model in models]))

    def clear(self) -> None:
        """Set the next input to zeros."""
        self._array[:] = 0

    def _ask(self, model: str) -> int:
        connection = self._connection
        connection.putrequest("POST", f"/v2/models/{model}/infer")
        connection.putheader("Inference-Header-Content-Length", str(len(self._head)))
        connection.putheader("Content-Length", str(len(self._head) + NBYTES))
        connection.putheader("shmserve-receipt", "1")
        connection.endheaders(self._head)
        connection.send(self._buffer)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read(int(answer.headers["Inference-Header-Content-Length"]))
        view = memoryview(self._buffer)
        while view:
            view = view[answer.readinto(view) :]
        answer.read()  # read to the end, so that the connection can be used again
        return copied_bytes(json.loads(answer.headers["shmserve-receipt"]))

    def close(self) -> None:
        self._connection.close()


def shared_way(client: Client, transport: str, *models: str) -> Way:
    """Return a function as `HttpCaller.way` does, for zeros in shared memory. `transport`: expected
    way of the requests, "http" or "lane"."""
    zeros = client.empty(COUNT, np.float32)
    zeros[:] = 0
    for model in models:  # from then on the sizes of outputs are known
        client.infer(model, {"X": zeros})

    def ask() -> tuple[np.ndarray[Any, Any], int]:
        y, copied = zeros, 0
        for model in models:
            result = client.infer(model, {"X": y}, receipt=True)
            y, copied = result["Y"], copied + copied_bytes(result.receipt)
            assert result.transport == transport
        return y, copied

    return ask


def copied_bytes(receipt: Any) -> int:
    return sum(receipt["copied_bytes"].values())


def own_s(server: RunningServer) -> float:
    """Return the seconds that the three models have computed since they were loaded."""
    stats = server.get("/v2/models/stats")[1]["model_stats"]
    own = [s["inference_stats"]["compute_infer"]["ns"] for s in stats if s["name"] in STEPS]
    return sum(own) / 1e9


def copied_by_steps(server: RunningServer) -> int:
    """Return the bytes that requests to the three models have copied since the models were
    loaded."""
    _, _, text = server.request("GET", "/metrics")
    sample = rf'^shmserve_copied_bytes_total\{{[^}}]*model="(?:{"|".join(STEPS)})"[^}}]*\}} (\S+)'
    return sum(int(float(value)) for value in re.findall(sample, text.decode(), re.M))


def measure(
    server: RunningServer, ways: dict[str, Way], clear: Callable[[], None], rounds: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Return three rows by way: total seconds, seconds computed by the models, and bytes
    copied."""
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for number in range(-WARM_UP, rounds):
        for name, way in list(ways.items())[:: -1 if number % 2 else 1]:
            clear()
            before = own_s(server)
            begun = time.perf_counter()
            y, copied = way()
            took = time.perf_counter() - begun
            assert (y == len(STEPS)).all(), name
            if number >= 0:
                taken[name].append((took, own_s(server) - before, copied))
    return {name: np.array(rows).T for name, rows in taken.items()}


def main() -> None:
    """Print times and copied bytes of each way."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        write_models(Path(folder))
        server = stack.enter_context(RunningServer(folder, grpc_processes=0, http_workers=1))
        caller = stack.enter_context(contextlib.closing(HttpCaller(server)))
        url = f"unix:{server.unix_path}"
        regions = stack.enter_context(shmserve.client.connect(url, lanes=False))
        lanes = stack.enter_context(shmserve.client.connect(url))
        ways = {
            "ensemble": caller.way("all"),
            "Triton's calls": caller.way("triton"),
            "native calls": caller.way("native"),
            BASE: caller.way(*STEPS),
            "regions": shared_way(regions, "http", *STEPS),
            "lanes": shared_way(lanes, "lane", *STEPS),
            "ensemble, regions": shared_way(regions, "http", "all"),
        }
        taken = measure(server, ways, caller.clear, rounds)
        in_calls = dict.fromkeys(ways, 0)
        for name in ("Triton's calls", "native calls"):
            before = copied_by_steps(server)
            ways[name]()
            in_calls[name] = copied_by_steps(server) - before
    print(f"{rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'':17} p50 ms p99 ms beyond ms of {BASE} copied MiB in calls")
    base = np.median(taken[BASE][0])
    for name, (took, own, copied) in taken.items():
        p50, p99 = np.percentile(took, (50, 99))
        print(
            f"{name:17} {p50 * 1e3:6.1f} {p99 * 1e3:6.1f} {np.median(took - own) * 1e3:9.1f}"
            f" {p50 / base:13.2f} {np.median(copied) / 2**20:10.2f}"
            f" {in_calls[name] / 2**20:8.2f}"
        )


if __name__ == "__main__":
    main()
