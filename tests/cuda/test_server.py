"""Clients' GPU memory through a real server with all processes, on the fake driver or a real
driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.testing.running_server import RunningServer, wait_until
from tests.cuda import standin
from tests.cuda.conftest import MODELS

EXPORTER = Path(__file__).parent / "exporter.py"
TRITON_CLIENT = Path(__file__).parent / "triton_client.py"
COUNT = 50_000
NBYTES = 4 * COUNT


@pytest.fixture(scope="module")
def server(gpu_server: RunningServer) -> RunningServer:
    return gpu_server


def environment(server: RunningServer) -> dict[str, str]:
    """Return the environment of a client: same devices as the server, but no settings of the
    server."""
    return {k: v for k, v in server.environ.items() if not k.startswith("SHMSERVE_")}


def command(server: RunningServer, model: str, *options: str) -> list[str]:
    address = f"{server.http_host}:{server.http_port}"
    if "--grpc" in options:
        address = server.grpc_address
    rule = ("--expect", "plus_one", "--elements", str(COUNT))
    return [sys.executable, str(EXPORTER), address, model, *rule, *options]


def export(server: RunningServer, model: str, *options: str) -> dict[str, Any]:
    """Run the exporter, which checks the values, and return its output."""
    done = subprocess.run(
        command(server, model, *options),
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr + server.log()
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@contextmanager
def holding(server: RunningServer, model: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Exporter that has registered memory and waits."""
    process = subprocess.Popen(
        command(server, model, "--hold", *options),
        env=environment(server),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


def device_memory(server: RunningServer) -> int:
    """Return the number of foreign fake device allocations that executors have mapped."""
    return sum(map(_foreign_memory, server.pids("executor")))


def _foreign_memory(pid: int) -> int:
    """Return the mappings without a descriptor. A process has descriptors of its own memory, which
    CuPy may keep."""
    mapped = Path(f"/proc/{pid}/maps").read_text().count("memfd:fakecuda")
    descriptors = Path(f"/proc/{pid}/fd").iterdir()
    return mapped - sum("memfd:fakecuda" in os.readlink(path) for path in descriptors)


def regions(server: RunningServer) -> list[str]:
    return [row["region"] for row in server.show("regions")]


@pytest.mark.parametrize("way", [(), ("--grpc",)], ids=["http", "grpc"])
@pytest.mark.parametrize(
    ("model", "moved"),
    [
        ("plus_one", 0),
        ("plus_one_host", 2 * NBYTES),
        ("plus_one_triton", 2 * NBYTES),
        pytest.param("plus_one_far", 2 * NBYTES, marks=pytest.mark.fake_cuda),
        ("plus_one_spread", 0),
    ],
)
def test_region_to_region(
    server: RunningServer,
    model: str,
    moved: int,
    way: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    told = export(server, model, *way, "--rounds", "1", "--prefix", f"{model}-{len(way)}-")
    copied = told["receipt"]["copied_bytes"]
    assert copied == {"in": 0, "batch": 0, "out": 0, "device": moved}
    if not request.config.getoption("--real-cuda"):  # kernels are loaded, and blocks are kept
        assert told["free_bytes"][0] == told["free_bytes"][1]


@pytest.mark.parametrize("model", ["plus_one", "plus_one_host"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclients_own_module(
    server: RunningServer, protocol: str, model: str, request: pytest.FixtureRequest
) -> None:
    http_address = f"{server.http_host}:{server.http_port}"
    address = http_address if protocol == "http" else server.grpc_address
    if request.config.getoption("--real-cuda"):
        pytest.importorskip("cuda.bindings", reason="the module needs cuda-python")
    done = subprocess.run(
        [sys.executable, str(TRITON_CLIENT), protocol, address, model],
        env=environment(server),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "PASS\n", done.stderr


def test_a_tensor_in_the_request_goes_to_the_device_and_back(server: RunningServer) -> None:
    values = np.arange(COUNT, dtype=np.float32)
    head = json.dumps(
        {
            "inputs": [
                {
                    "name": "IN",
                    "datatype": "FP32",
                    "shape": [COUNT],
                    "parameters": {"binary_data_size": NBYTES},
                }
            ],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    status, headers, body = server.request(
        "POST",
        "/v2/models/plus_one/infer",
        head + values.tobytes(),
        {"Inference-Header-Content-Length": str(len(head)), "shmserve-receipt": "1"},
    )
    assert status == 200, body
    length = int(headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(body[length:], np.float32), values + 1)
    copied = json.loads(headers["shmserve-receipt"])["copied_bytes"]
    assert copied == {"in": 0, "batch": 0, "out": 0, "device": 2 * NBYTES}


def test_rounds_leave_nothing_open(server: RunningServer) -> None:
    large = ("--elements", str(1 << 20))
    # the first export leaves lasting allocations
    export(server, "plus_one", "--rounds", "1", *large)
    before = device_memory(server)
    told = export(server, "plus_one", "--rounds", "30", *large)
    assert regions(server) == []
    wait_until(lambda: device_memory(server) <= before, "device memory is kept open")
    first, last = told["free_bytes"]
    assert first - last < 30 << 20  # of 240 MiB; a driver may keep some to itself


@pytest.mark.parametrize("way", [(), ("--grpc",)], ids=["http", "grpc"])
def test_the_death_of_an_exporter_gives_back_its_memory(
    server: RunningServer, way: tuple[str, ...]
) -> None:
    before = device_memory(server)
    once = ("--rounds", "1", "--prefix")
    with (
        holding(server, "plus_one", *once, "victim-", *way) as victim,
        holding(server, "plus_one", *once, "other-") as other,
    ):
        wait_until(lambda: len(regions(server)) == 4, "both")
        victim.kill()
        wait_until(lambda: len(regions(server)) == 2, "regions of a dead process are there")
        export(server, "plus_one", *once, "third-")
        answer = ask_for(server, "victim-IN")
        assert answer == (404, "Unable to find shared memory region: 'victim-IN'")
        other.communicate("")
        assert other.returncode == 0
    wait_until(lambda: device_memory(server) <= before, "device memory is kept open")


def ask_for(server: RunningServer, name: str) -> tuple[int, str]:
    parameters = {"shared_memory_region": name, "shared_memory_byte_size": NBYTES}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [COUNT], "parameters": parameters}
    status, answer = server.infer("plus_one", {"inputs": [tensor]})
    return status, answer["error"]


def test_cupy_is_imported_by_executors_on_gpus_alone(
    server: RunningServer, request: pytest.FixtureRequest
) -> None:
    export(server, "plus_one", "--rounds", "1")
    real = request.config.getoption("--real-cuda") or standin.active()
    mark = "/cupy/_core/" if real else "memfd:fakecupy"
    having = {
        title
        for pid, title in server.processes().items()
        if mark in Path(f"/proc/{pid}/maps").read_text()
    }
    assert having
    on_gpus = ("shmserve: executor plus_one", "shmserve: executor failing")
    assert all(title.startswith(on_gpus) for title in having)
    others = set(server.processes().values()) - having
    assert any("http worker" in title for title in others)


@pytest.mark.fake_cuda
def test_an_executor_whose_device_is_lost_is_replaced(
    cuda_environment: dict[str, str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    environment = cuda_environment | {"FAKE_CUDA_BROKEN": str(broken)}
    with RunningServer(
        MODELS, environment, model_control="explicit", load_models="plus_one"
    ) as own:
        (first,) = own.pids("executor")
        document = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        assert own.infer("plus_one", document)[0] == 200
        broken.touch()
        status, answer = own.infer("plus_one", document)
        assert status == 500
        assert "cudaErrorIllegalAddress" in answer["error"]
        broken.unlink()
        wait_until(lambda: own.pids("executor") not in ([], [first]), "no new executor")
        own.wait_instances()
        assert own.infer("plus_one", document)[0] == 200
    assert own.leaks() == []


def test_a_failing_model_keeps_no_memory_open(server: RunningServer) -> None:
    before = device_memory(server)
    for number in range(3):
        failed = subprocess.run(
            command(server, "failing", "--rounds", "1", "--prefix", f"failing-{number}-"),
            env=environment(server),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert "50000 elements are not what I like" in failed.stderr
    wait_until(lambda: not regions(server), "regions of a dead process are there")
    wait_until(lambda: device_memory(server) <= before, "device memory is kept open")
