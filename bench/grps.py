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

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bench.caller import Caller
from bench.turns import closed_loops, in_turn, seconds
from tests.running_server import ROOT, RunningServer, free_port, wait_until

PREDICT = "/grps/v1/infer/predict"
JSON = {"Content-Type": "application/json"}
ELEMENTS = 150_528

Call = Callable[[], object]


def client(stack: ExitStack, port: int, model: str, body: bytes) -> Callable[[], bytes]:
    """Return a function that sends the body on a connection of its own."""
    caller = Caller(stack, SimpleNamespace(http_host="127.0.0.1", http_port=port))
    return partial(caller.post, f"{PREDICT}?model={model}" if model else PREDICT, body, JSON)


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


def http_caller(stack: ExitStack, port: int, model: str, body: bytes, values: np.ndarray) -> Call:
    call = client(stack, port, model, body)
    tensor = json.loads(call())["gtensors"]["tensors"][0]
    assert np.array_equal(np.array(tensor["flat_float32"], np.float32), values)
    return call


def rate(port: int, model: str, clients: int, lasting: float) -> float:
    """Requests per second of a short text."""
    with ExitStack() as stack:
        calls = [client(stack, port, model, b'{"str_data": "hello grps."}') for _ in range(clients)]
        return len(closed_loops(calls, lasting)) / lasting


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
        callers = {
            "flask": http_caller(stack, flask, "", body, values),
            "echo": http_caller(stack, ours, "your_model-1.0.0", body, values),
            "identity": http_caller(stack, ours, "identity-1.0.0", body, values),
            "grpc echo": grpc_caller(stack, rpc, "your_model-1.0.0", values),
            "grpc identity": grpc_caller(stack, rpc, "identity-1.0.0", values),
        }
        timed = {name: partial(seconds, call) for name, call in callers.items()}
        times = in_turn(options.rounds, timed, warm_up=0)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        for name, middle in medians.items():
            print(f"gtensors {name:14} {middle * 1e3:8.1f} ms {medians['flask'] / middle:6.1f}x")
        for clients in (1, 8):
            contestants = {"flask": (flask, ""), "echo": (ours, "your_model-1.0.0")}
            rated = {n: partial(rate, *c, clients, options.seconds) for n, c in contestants.items()}
            rates = in_turn(2, rated, warm_up=0)
            flask_rate, our_rate = (statistics.median(rates[name]) for name in ("flask", "echo"))
            print(
                f"str_data, {clients} clients: flask {flask_rate:.0f}/s, echo {our_rate:.0f}/s,"
                f" {our_rate / flask_rate:.1f}x"
            )


if __name__ == "__main__":
    main()
