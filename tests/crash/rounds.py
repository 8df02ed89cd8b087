"""Register, infer and unregister, over and over, through every frontend at once.

    python -m tests.crash.rounds [--rounds 50000]

Two client processes, one over HTTP and one over gRPC, use separate memory objects. Each round has
new names, new numbers in the memory, and an addition from region to region; afterwards the
region's name must be unknown. Prints a JSON line per sample. Exit status 1 if an answer was wrong,
or if descriptors, mappings or memory of a process grew.
"""

import argparse
import contextlib
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from shmserve._generated import grpc_service_pb2 as pb
from tests.integration.region_client import Client, Memory
from tests.running_server import RunningServer, free_port, open_fds, rss_bytes, wait_until

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "repositories" / "regions"
FLOATS = 1024
_SERVICE = "/inference.GRPCInferenceService/"
_GROWTH_MIB = 8.0  # an allocator may keep so much


class HttpRounds:
    """The calls of a round over HTTP; a new connection now and then meets all HTTP workers."""

    def __init__(self, address: str) -> None:
        self._port = int(address)
        self._client = Client(self._port)
        self._calls = itertools.count(1)

    def _next(self) -> Client:
        if not next(self._calls) % 50:
            self._client.close()
            self._client = Client(self._port)
        return self._client

    def register(self, name: str, key: str, size: int) -> bool:
        return self._next().register(name, key, size)[0] == 200

    def infer(self, source: str, target: str) -> bool:
        return self._next().infer("touch_pair", (source, 0), (target, 0), FLOATS)[0] == 200

    def unregister(self, name: str) -> bool:
        return self._next().unregister(name)[0] == 200


class GrpcRounds:
    """The calls of a round over gRPC."""

    def __init__(self, address: str) -> None:
        channel = grpc.insecure_channel(address)
        self._calls: dict[str, Callable[..., Any]] = {
            name: channel.unary_unary(
                _SERVICE + name, request_serializer=lambda message: message.SerializeToString()
            )
            for name in (
                *("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
                "ModelInfer",
            )
        }

    def _call(self, name: str, message: Any) -> bool:
        try:
            self._calls[name](message, timeout=30)
        except grpc.RpcError:
            return False
        return True

    def register(self, name: str, key: str, size: int) -> bool:
        message = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, byte_size=size)
        return self._call("SystemSharedMemoryRegister", message)

    def infer(self, source: str, target: str) -> bool:
        request = pb.ModelInferRequest(model_name="touch_pair")
        given = request.inputs.add(name="IN", datatype="FP32", shape=[FLOATS])
        wanted = request.outputs.add(name="OUT")
        for tensor, region in ((given, source), (wanted, target)):
            tensor.parameters["shared_memory_region"].string_param = region
            tensor.parameters["shared_memory_byte_size"].int64_param = FLOATS * 4
        return self._call("ModelInfer", request)

    def unregister(self, name: str) -> bool:
        return self._call(
            "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name)
        )


def client(kind: str, address: str, rounds: int) -> int:
    """Do the rounds; how many went wrong."""
    calls = HttpRounds(address) if kind == "http" else GrpcRounds(address)
    chance = random.Random(kind)
    wrong = 0
    with Memory(FLOATS * 4) as source, Memory(FLOATS * 4) as target:
        for number in range(rounds):
            a, b = f"{kind}-{number}-in", f"{kind}-{number}-out"
            numbers = np.full(FLOATS, chance.randrange(1 << 20), np.float32)
            source.put(numbers)
            good = (
                calls.register(a, source.name, FLOATS * 4)
                and calls.register(b, target.name, FLOATS * 4)
                and calls.infer(a, b)
                and np.array_equal(target.get(FLOATS), numbers + 1)
                and calls.unregister(a)
                and calls.unregister(b)
                and not calls.infer(a, b)
            )
            if not good:
                wrong += 1
                calls.unregister(a), calls.unregister(b)
    return wrong


def sample(server: RunningServer, label: str) -> dict[str, Any]:
    """Descriptors, mappings and private memory of every process of the service."""
    found: dict[str, Any] = {"after": label}
    for pid, title in sorted(server.processes().items()):
        if "master" in title:
            continue
        with open(f"/proc/{pid}/maps") as maps:
            mappings = sum(1 for _ in maps)
        rss = round(rss_bytes(pid) / 2**20, 1)
        found[f"{title.strip()} {pid}"] = (open_fds(pid), mappings, rss)
    return found


def run(server: RunningServer, grpc_address: str, rounds: int) -> int:
    """Run both clients for `rounds` each; return the number of failed rounds."""
    addresses = {"http": str(server.http_port), "grpc": grpc_address}
    clients = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.crash.rounds", "--client", *pair, f"--rounds={rounds}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for pair in addresses.items()
    ]
    told = [one.communicate(timeout=60 + rounds)[0] for one in clients]
    assert all(one.returncode == 0 for one in clients), told
    return sum(int(text) for text in told)


def drill(rounds: int) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Return the number of failed rounds, the samples, and the resources that grew or were left."""
    bind = f"127.0.0.1:{free_port()}"
    server = RunningServer(MODELS, http_workers=4, grpc_bind=bind)
    with server:
        server.wait_instances()
        wrong = run(server, bind, max(50, rounds // 10))
        samples = [sample(server, "warm-up")]
        for part in (1, 2):
            wrong += run(server, bind, rounds // 2)
            samples.append(sample(server, f"{rounds * part // 2} rounds each"))
        with contextlib.suppress(TimeoutError):  # processes and mappings take a moment to end
            wait_until(lambda: not grown([samples[-2], sample(server, "now")]), "it settles", 30)
        samples.append(sample(server, "settled"))
        del samples[-2]
    return wrong, samples, grown(samples) + server.leaks()


def grown(samples: list[dict[str, Any]]) -> list[str]:
    """Processes with more descriptors or mappings than after the first half, or other pids."""
    *_, middle, last = samples
    problems = [] if middle.keys() == last.keys() else ["processes were replaced"]
    for name in middle.keys() & last.keys() - {"after"}:
        (fds, maps, rss), (fds_then, maps_then, rss_then) = last[name], middle[name]
        # descriptors of the last regions are kept a while for requests on their way
        if fds > fds_then + 16 or maps > maps_then + 64 or rss > rss_then + _GROWTH_MIB:
            problems.append(f"{name}: {middle[name]} -> {last[name]} (fds, mappings, MiB)")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.rounds", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50_000)
    parser.add_argument("--client", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        kind, address = arguments.client
        print(client(kind, address, arguments.rounds))
        return 0
    wrong, samples, problems = drill(arguments.rounds)
    for one in samples:
        print(json.dumps(one))
    print(json.dumps({"wrong": wrong, "problems": problems}))
    return 1 if wrong or problems else 0


if __name__ == "__main__":
    sys.exit(main())
