"""Device arrays of `shmserve.client` through a real server, on the fake driver or a real driver."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cuda.conftest import MODELS
from tests.cuda.test_server import device_memory
from tests.running_server import wait_until
from tests.servers import SMALL, Server, only

PROGRAM = Path(__file__).parent / "client_program.py"
NBYTES = 4 * 50_000
NOTHING = {"in": 0, "batch": 0, "out": 0, "device": 0}


def start(server: Server, environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), f"unix:{server.unix_path}", *arguments],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(server: Server, environment: dict[str, str], *arguments: str) -> Any:
    with start(server, environment, *arguments) as process:
        out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error + server.log()
    return json.loads(out)


def test_nothing_is_copied(gpu_server: Server, cuda_environment: dict[str, str]) -> None:
    before = device_memory(gpu_server)
    told = run(gpu_server, cuda_environment, "rounds")
    assert told["receipts"][0]["device"] == NBYTES, "the output's size was not known"
    assert told["receipts"][1:] == [NOTHING] * 19
    assert told["regions"] <= 4, "regions are used again"
    assert not any(row["kind"] == "cuda" for row in gpu_server.show("regions"))
    wait_until(lambda: device_memory(gpu_server) <= before, "device memory is kept open")


def test_hosts_and_devices(gpu_server: Server, cuda_environment: dict[str, str]) -> None:
    moved = run(gpu_server, cuda_environment, "mixture")
    for name, nbytes in moved.items():
        model, source, device = name.split()
        on_host = (source == "host") + (device == "None")
        crossings = on_host if model == "plus_one" else 2 - on_host
        assert nbytes == crossings * NBYTES, name


def test_a_killed_program_leaves_nothing(
    gpu_server: Server, cuda_environment: dict[str, str]
) -> None:
    before = device_memory(gpu_server)
    with start(gpu_server, cuda_environment, "hold") as process:
        assert process.stdout is not None
        names = json.loads(process.stdout.readline())
        assert len(names) >= 2
        process.kill()
    wait_until(
        lambda: not {row["region"] for row in gpu_server.show("regions")} & set(names),
        "its regions are there",
    )
    wait_until(lambda: device_memory(gpu_server) <= before, "device memory is kept open")


def test_a_server_that_is_restarted(cuda_environment: dict[str, str]) -> None:
    with (
        Server(MODELS, cuda_environment, **only("plus_one"), **SMALL) as server,
        start(server, cuda_environment, "restart") as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        server.stop()
        server.start()
        out, error = process.communicate("\n", timeout=60)
        assert process.returncode == 0, error + server.log()
        assert json.loads(out) == NOTHING


def test_a_server_without_gpus(cuda_environment: dict[str, str]) -> None:
    with Server(
        environ={"CUDA_VISIBLE_DEVICES": ""}, **only("identity"), grpc_processes=0
    ) as server:
        assert run(server, cuda_environment, "without", "identity") == {"system regions": True}
