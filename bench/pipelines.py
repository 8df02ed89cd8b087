"""What an ensemble saves: `python -m bench.pipelines [ROUNDS]`.

Three models that add one to 16 MiB of FP32, each in an executor of its own: once as an ensemble of
three steps, asked once, and once by a client that asks the three one after the other and sends
back what it was given. Both over one kept HTTP connection with binary tensors, in turn in the
same run, so that both meet the same machine. The client does nothing with the bytes but receive
them into a buffer that is there already and send them; every result is checked, off the clock.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from shmserve.testing.running_server import RunningServer

COUNT = 4 << 20  # elements: 16 MiB
NBYTES = 4 * COUNT
STEPS = ("first", "second", "third")
MODEL = """
import numpy as np

class Model:
    def infer(self, request):
        x = request.input("X")
        np.add(x, 1, out=request.output("Y", x.shape))
"""
TENSORS = """
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""


def write_models(folder: Path) -> None:
    """The three models, and `all`, which is the ensemble of them."""
    names = ["X", "a", "b", "Y"]
    steps = ""
    for model, taken, given in zip(STEPS, names, names[1:], strict=False):
        (folder / model / "1").mkdir(parents=True)
        (folder / model / "1" / "model.py").write_text(MODEL)
        (folder / model / "config.pbtxt").write_text('backend: "python"' + TENSORS)
        steps += (
            f'step {{ model_name: "{model}" model_version: -1 '
            f'input_map {{ key: "X" value: "{taken}" }} '
            f'output_map {{ key: "Y" value: "{given}" }} }} '
        )
    (folder / "all" / "1").mkdir(parents=True)
    scheduling = f"ensemble_scheduling {{ {steps} }}"
    (folder / "all" / "config.pbtxt").write_text('platform: "ensemble"' + TENSORS + scheduling)


class Caller:
    """A client with one connection and one buffer, in which each answer's tensor is the next
    request's."""

    def __init__(self, server: RunningServer) -> None:
        self._connection = http.client.HTTPConnection(server.http_host, server.http_port, 60)
        self.buffer = bytearray(NBYTES)
        tensor = {"name": "X", "datatype": "FP32", "shape": [COUNT]}
        self._head = json.dumps(
            {
                "inputs": [{**tensor, "parameters": {"binary_data_size": NBYTES}}],
                "parameters": {"binary_data_output": True},
            }
        ).encode()

    def ask(self, model: str) -> None:
        connection = self._connection
        connection.putrequest("POST", f"/v2/models/{model}/infer")
        connection.putheader("Inference-Header-Content-Length", str(len(self._head)))
        connection.putheader("Content-Length", str(len(self._head) + NBYTES))
        connection.endheaders(self._head)
        connection.send(self.buffer)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read(int(answer.headers["Inference-Header-Content-Length"]))
        view = memoryview(self.buffer)
        while view:
            view = view[answer.readinto(view) :]
        answer.read()  # so that the connection can be used again

    def time(self, *models: str) -> float:
        """Seconds that these take, one after the other; each adds one per step."""
        array = np.frombuffer(self.buffer, np.float32)
        array[:] = 0
        begun = time.perf_counter()
        for model in models:
            self.ask(model)
        took = time.perf_counter() - begun
        assert (array == len(STEPS)).all()
        return took

    def close(self) -> None:
        self._connection.close()


def main() -> None:
    """Print the latencies of both ways and their ratio."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        with RunningServer(folder, grpc_processes=0, http_workers=1) as server:
            caller = Caller(server)
            taken: dict[str, list[float]] = {"ensemble": [], "one by one": []}
            for number in range(-5, rounds):  # the first ones warm up
                once, thrice = caller.time("all"), caller.time(*STEPS)
                if number >= 0:
                    taken["ensemble"].append(once)
                    taken["one by one"].append(thrice)
            caller.close()
    for way, seconds in taken.items():
        p50, p99 = np.percentile(seconds, (50, 99)) * 1000
        print(f"{way:10} p50 {p50:7.2f} ms  p99 {p99:7.2f} ms")
    medians = [float(np.median(seconds)) for seconds in taken.values()]
    print(f"    ratio {medians[1] / medians[0]:.2f}")


if __name__ == "__main__":
    main()
