"""Clients' GPU memory through a real server with all processes, on the fake or a real driver."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.crash.faults import stopped
from tests.cuda import standin
from tests.cuda.conftest import MODELS
from tests.running_server import wait_until
from tests.servers import Server, beside, completed, only, output, python

EXPORTER = Path(__file__).parent / "exporter.py"
TRITON = Path(__file__).parent / "triton_program.py"
COUNT = 50_000
NBYTES = 4 * COUNT


@pytest.fixture(scope="module")
def server(gpu_server: Server) -> Server:
    return gpu_server


def environment(server: Server) -> dict[str, str]:
    """Return a client's environment: devices as the server's, but no settings of the server."""
    return {k: v for k, v in server.environ.items() if not k.startswith("SHMSERVE_")}


def command(server: Server, model: str, *options: str) -> list[str]:
    address = f"{server.http_host}:{server.http_port}"
    if "--grpc" in options:
        address = server.grpc_address
    rule = ("--expect", "plus_one", "--elements", str(COUNT))
    return [sys.executable, str(EXPORTER), address, model, *rule, *options]


def export(server: Server, model: str, *options: str) -> dict[str, Any]:
    """Run the exporter, which checks the values, and return its output."""
    told: dict[str, Any] = json.loads(
        output(*command(server, model, *options), environ=environment(server)).splitlines()[-1]
    )
    return told


@contextmanager
def holding(server: Server, model: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Exporter that has registered memory and waits."""
    words = command(server, model, "--hold", *options)[1:]
    with beside(*words, environ=environment(server)) as (told, process):
        assert told
        yield process


def device_memory(server: Server) -> int:
    """Return the number of foreign fake device allocations that executors have mapped."""
    return sum(map(_foreign_memory, server.pids("executor")))


def _foreign_memory(pid: int) -> int:
    """Return the mapped memory without a descriptor. A process has descriptors of its own memory,
    which CuPy may keep."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    mapped = {line.split()[4] for line in maps if "memfd:fakecuda" in line}  # inodes
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            mapped.discard(str(path.stat().st_ino))
    return len(mapped)


def regions(server: Server) -> list[str]:
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
    server: Server, model: str, moved: int, way: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    told = export(server, model, *way, "--rounds", "1", "--prefix", f"{model}-{len(way)}-")
    copied = told["receipt"]["copied_bytes"]
    assert copied == {"in": 0, "batch": 0, "out": 0, "device": moved}
    if not request.config.getoption("--real-cuda"):  # kernels are loaded, and blocks are kept
        assert told["free_bytes"][0] == told["free_bytes"][1]


@pytest.mark.parametrize("model", ["plus_one", "plus_one_host"])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclients_own_module(
    server: Server, protocol: str, model: str, request: pytest.FixtureRequest
) -> None:
    if request.config.getoption("--real-cuda"):
        pytest.importorskip("cuda.bindings", reason="the module needs cuda-python")
    words = ("handles", protocol, server.address(protocol), model)
    python(TRITON, *words, environ=environment(server))


def test_a_tensor_in_the_request_goes_to_the_device_and_back(server: Server) -> None:
    values = np.arange(COUNT, dtype=np.float32)
    body, receipt = server.infer_binary("plus_one", values)
    np.testing.assert_array_equal(np.frombuffer(body, np.float32), values + 1)
    assert receipt["copied_bytes"] == {"in": 0, "batch": 0, "out": 0, "device": 2 * NBYTES}


def test_rounds_leave_nothing_open(server: Server) -> None:
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
    server: Server, way: tuple[str, ...]
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


def ask_for(server: Server, name: str) -> tuple[int, str]:
    parameters = {"shared_memory_region": name, "shared_memory_byte_size": NBYTES}
    tensor = {"name": "IN", "datatype": "FP32", "shape": [COUNT], "parameters": parameters}
    status, answer = server.infer("plus_one", {"inputs": [tensor]})
    return status, answer["error"]


def test_cupy_is_imported_by_executors_on_gpus_alone(
    server: Server, request: pytest.FixtureRequest
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
    with Server(MODELS, environment, **only("plus_one")) as own:
        (first,) = own.pids("executor")
        document = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        assert own.infer("plus_one", document)[0] == 200
        broken.touch()
        with stopped(*own.pids("supervisor")):  # the next executor must find a sound device
            status, answer = own.infer("plus_one", document)
            broken.unlink()
        assert status == 500
        assert "cudaErrorIllegalAddress" in answer["error"]
        wait_until(lambda: own.pids("executor") not in ([], [first]), "no new executor")
        own.wait_instances()
        assert own.infer("plus_one", document)[0] == 200


def test_a_failing_model_keeps_no_memory_open(server: Server) -> None:
    before = device_memory(server)
    for number in range(3):
        failed = completed(
            *command(server, "failing", "--rounds", "1", "--prefix", f"failing-{number}-"),
            environ=environment(server),
        )
        assert "50000 elements are not what I like" in failed.stderr
    wait_until(lambda: not regions(server), "regions of a dead process are there")
    wait_until(lambda: device_memory(server) <= before, "device memory is kept open")
