"""GRPS requests beside Flask and json_format, in one run: ``python -m bench.grps``.

Needs Flask (extra: bench). Every server echoes.

    gtensors      150,528 FP32 elements (an image of 224x224x3) as JSON
    gtensors-grpc the same over gRPC, sent and received as bytes of the message
    str_data      a short text as JSON, at 1 and 8 clients
    echo          a worker that takes the GRPS message and answers with it
    identity      a worker with an FP32 input: the elements become a tensor and back
    flask         Flask's threaded server, protobuf's json_format, no model

Clients are threads of this process that keep their connections and neither write nor parse
JSON; Flask's server closes each connection, as it does by default. The contestants take turns
within a round, every second round backwards. Reported are medians of all calls (gtensors) and of
the rounds' requests per second (str_data); only ratios within one run mean anything.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tests.running_server import ROOT, RunningServer, free_port, wait_until

PREDICT = "/grps/v1/infer/predict"
JSON = {"Content-Type": "application/json"}
ELEMENTS = 150_528

Call = Callable[[], object]


class Client:
    """Client with one connection."""

    def __init__(self, port: int, model: str) -> None:
        self._path = f"{PREDICT}?model={model}" if model else PREDICT
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.connect()
        self._no_delay()

    def _no_delay(self) -> None:
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, body: bytes) -> bytes:
        self._connection.request("POST", self._path, body, JSON)
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {data[:300]!r}")
        return data


def start_flask(stack: ExitStack) -> int:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.rivals.flask_app", str(port)],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)

    def listens() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens, "Flask does not listen")
    return port


def start_server(stack: ExitStack) -> tuple[int, str]:
    repository = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    shutil.copytree(ROOT / "workers" / "identity", repository / "identity")
    echo = ROOT / "tests" / "repositories" / "grps_project" / "your_model"
    shutil.copytree(echo, repository / "your_model")
    bind = f"127.0.0.1:{free_port()}"
    server = stack.enter_context(RunningServer(repository, grpc_bind=bind, http_workers=1))
    return server.http_port, bind


def grpc_caller(stack: ExitStack, address: str, model: str, values: np.ndarray) -> Call:
    import grpc

    from shmserve.grps.protocol import message_wire
    from shmserve.grps.protocol.grps_message import GenericTensor, GrpsMessage

    channel = stack.enter_context(
        grpc.insecure_channel(address, [("grpc.max_receive_message_length", -1)])
    )
    method = channel.unary_unary("/grps.protos.v1.GrpsService/Predict")
    tensor = GenericTensor.of("INPUT0", values)
    data = message_wire.encode(GrpsMessage(model=model, gtensors=[tensor]))

    def call() -> object:
        answer = message_wire.parse(method(data, timeout=60))
        assert np.array_equal(answer.tensor().array, values)
        return answer

    return call


def http_caller(port: int, model: str, body: bytes, values: np.ndarray) -> Call:
    client = Client(port, model)
    tensor = json.loads(client.post(body))["gtensors"]["tensors"][0]
    assert np.array_equal(np.array(tensor["flat_float32"], np.float32), values)
    return lambda: client.post(body)


def measure_tensors(callers: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median seconds of a call."""
    times: dict[str, list[float]] = {name: [] for name in callers}
    for number in range(rounds):
        names = list(callers) if number % 2 == 0 else list(callers)[::-1]
        for name in names:
            begun = time.perf_counter()
            callers[name]()
            times[name].append(time.perf_counter() - begun)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def rate(port: int, model: str, clients: int, seconds: float) -> float:
    """Requests per second of a short text."""
    body = b'{"str_data": "hello grps."}'
    counts = [0] * clients
    stop = time.perf_counter() + seconds

    def run(index: int) -> None:
        client = Client(port, model)
        while time.perf_counter() < stop:
            client.post(body)
            counts[index] += 1

    threads = [threading.Thread(target=run, args=(index,)) for index in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each rate")
    options = parser.parse_args()
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    values = np.random.default_rng(0).standard_normal(ELEMENTS).astype(np.float32)
    tensor = {
        "name": "INPUT0",
        "dtype": "DT_FLOAT32",
        "shape": [ELEMENTS],
        "flat_float32": [float(str(value)) for value in values],
    }
    body = json.dumps({"gtensors": {"tensors": [tensor]}}).encode()
    with ExitStack() as stack:
        flask = start_flask(stack)
        ours, rpc = start_server(stack)
        medians = measure_tensors(
            {
                "flask": http_caller(flask, "", body, values),
                "echo": http_caller(ours, "your_model-1.0.0", body, values),
                "identity": http_caller(ours, "identity-1.0.0", body, values),
                "grpc echo": grpc_caller(stack, rpc, "your_model-1.0.0", values),
                "grpc identity": grpc_caller(stack, rpc, "identity-1.0.0", values),
            },
            options.rounds,
        )
        for name, seconds in medians.items():
            print(f"gtensors {name:14} {seconds * 1e3:8.1f} ms {medians['flask'] / seconds:6.1f}x")
        for clients in (1, 8):
            rates: dict[str, list[float]] = {"flask": [], "echo": []}
            for number in range(2):
                contestants = [("flask", flask, ""), ("echo", ours, "your_model-1.0.0")]
                for name, port, model in contestants[:: 1 if number % 2 == 0 else -1]:
                    rates[name].append(rate(port, model, clients, options.seconds))
            flask_rate, our_rate = (statistics.median(rates[name]) for name in ("flask", "echo"))
            print(
                f"str_data, {clients} clients: flask {flask_rate:.0f}/s, echo {our_rate:.0f}/s,"
                f" {our_rate / flask_rate:.1f}x"
            )


if __name__ == "__main__":
    main()
