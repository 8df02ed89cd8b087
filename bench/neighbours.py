"""Effect of a flooded model on other callers: `python -m bench.neighbours [SECONDS]`.

Two models with one instance each: `hot` sleeps 20 ms, `quiet` answers at once. One client asks one
request after the other; first alone, then while `FLOOD` clients ask `hot` without pause. The
client asks `quiet`; then `hot` as another caller than the flood (another address over HTTP, a Unix
socket over gRPC), which has its own turn; then `hot` as the same caller, which has to stand in
line. Over HTTP each client has a connection, over gRPC a channel, of one process each. `hot`
sleeps instead of computing, so waiting shows for places, threads and connections, not for the CPU.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import numpy as np

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.testing.running_server import RunningServer, free_port

FLOOD = 100
PARTS = 2  # processes of the flood
MODEL = """
import time
import numpy as np

class Model:
    def infer(self, request):
        time.sleep({0})
        return {{"Y": request.input("X")}}
"""
CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 64 ] } ]
"""
BODY = json.dumps(
    {"inputs": [{"name": "X", "datatype": "FP32", "shape": [64], "data": [1.0] * 64}]}
).encode()


def write_models(folder: Path) -> None:
    """The two models."""
    for name, seconds in (("hot", 0.02), ("quiet", 0)):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "1" / "model.py").write_text(MODEL.format(seconds))
        (folder / name / "config.pbtxt").write_text(CONFIG)


def ask_http(address: str, model: str, seconds: float) -> tuple[list[float], int]:
    """Return the latencies, in seconds, of requests sent one after the other, and how many were
    refused. `address`: host:port, perhaps followed by @ and the source address of the
    connection."""
    address, _, source = address.partition("@")
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), 60, (source, 0) if source else None)
    latencies, refused, end = [], 0, time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        connection.request("POST", f"/v2/models/{model}/infer", BODY)
        answer = connection.getresponse()
        answer.read()
        refused += answer.status != 200
        latencies.append(time.monotonic() - begun)
    connection.close()
    return latencies, refused


def ask_grpc(address: str, model: str, seconds: float) -> tuple[list[float], int]:
    """Ask over gRPC for a time, as `ask_http` does over HTTP."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="X", datatype="FP32", shape=[64])
    request = pb.ModelInferRequest(
        model_name=model, inputs=[tensor], raw_input_contents=[bytes(256)]
    ).SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1)]
    latencies, refused, end = [], 0, time.monotonic() + seconds
    with grpc.insecure_channel(address, options) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        while (begun := time.monotonic()) < end:
            try:
                infer(request, timeout=60)
            except grpc.RpcError:
                refused += 1
            latencies.append(time.monotonic() - begun)
    return latencies, refused


ASK = {"http": ask_http, "grpc": ask_grpc}


def flood(protocol: str, address: str, seconds: float, clients: int) -> None:
    """Flood `hot` with `clients` clients from this process, which does nothing else."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(clients) as threads:
        asked = [threads.submit(ASK[protocol], address, "hot", seconds) for _ in range(clients)]
    answers = [each.result() for each in asked]
    print(sum(len(a) for a, _ in answers), sum(refused for _, refused in answers))


def main() -> None:
    """Print, for each protocol, a row for `quiet` alone and rows beside the flood."""
    if len(sys.argv) == 5:
        flood(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
        return
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        port, unix = free_port(), f"unix:{folder}/grpc.sock"
        tcp = f"127.0.0.1:{port}"
        binds = f"{tcp},{unix}"
        with RunningServer(folder, http_workers=1, grpc_processes=1, grpc_bind=binds) as server:
            http = f"{server.http_host}:{server.http_port}"
            measure("http", http, f"{http}@127.0.0.2", seconds)
            measure("grpc", tcp, unix, seconds)


def measure(protocol: str, address: str, other: str, seconds: float) -> None:
    """All rows of a protocol; `other`: the address for another caller than the flood."""
    ask = ASK[protocol]
    cases = (
        ("another model", address, "quiet"),
        ("another caller", other, "hot"),
        ("the same caller", address, "hot"),
    )
    for what, where, model in cases[:2]:
        ask(where, model, 0.5)
        show(protocol, what, "alone", *ask(where, model, seconds))
    length = str(len(cases) * seconds + 6)
    command = [sys.executable, "-m", "bench.neighbours", protocol, address, length]
    command.append(str(FLOOD // PARTS))
    parts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PARTS)]
    time.sleep(3)  # until all clients of the flood ask
    for what, where, model in cases:
        show(protocol, what, "flooded", *ask(where, model, seconds))
    hot = [[int(n) for n in part.communicate()[0].split()] for part in parts]
    total, refused = (sum(column) for column in zip(*hot, strict=True))
    print(f"{protocol}  flood: {total} asked, {refused} refused")


def show(protocol: str, who: str, what: str, latencies: list[float], refused: int) -> None:
    p50, p99 = np.percentile(latencies, (50, 99)) * 1000
    print(
        f"{protocol}  {who:15} {what:8} {len(latencies):6} asked, {refused} refused,"
        f"  p50 {p50:7.2f} ms  p99 {p99:7.2f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
