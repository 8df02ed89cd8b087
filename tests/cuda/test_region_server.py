"""CUDA regions in a real server: both protocols, deaths of the coordinator and of owners.

Nothing here uses the memory, so no executor needs a device.
"""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.cli import show
from shmserve.testing.server import RunningServer, wait_until
from tests.integration.region_client import Client, Memory

MODELS = Path(__file__).parents[1] / "region_models"
PROGRAM = Path(__file__).parent / "triton_region_program.py"
BASE = "/v2/cudasharedmemory"
HANDLE = bytes(range(64))
B64 = base64.b64encode(HANDLE).decode()


@pytest.fixture(scope="module")
def server(cuda_environment: dict[str, str]) -> Iterator[RunningServer]:
    settings: dict[str, Any] = {"model_control": "explicit", "load_models": "touch"}
    with RunningServer(MODELS, cuda_environment, **settings) as running:
        yield running
    assert running.leaks() == []
    log = running.log()
    for secret in (B64[:16], HANDLE.hex()[:16], repr(HANDLE)[2:18], str(list(HANDLE))[1:20]):
        assert secret not in log


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    client = Client(server.unix_path)
    yield client
    assert client.request("POST", f"{BASE}/unregister")[0] == 200
    client.close()


def register(client: Client, name: str, size: int = 64) -> tuple[int, Any]:
    document = {"raw_handle": {"b64": B64}, "device_id": 0, "byte_size": size}
    return client.request("POST", f"{BASE}/region/{name}/register", document)


def status(client: Client) -> list[str]:
    return [region["name"] for region in client.request("GET", f"{BASE}/status")[1]]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient(server: RunningServer, protocol: str) -> None:
    port = f"127.0.0.1:{server.http_port}"
    address = port if protocol == "http" else server.grpc_address
    with Memory(64) as memory:
        finished = subprocess.run(
            [sys.executable, str(PROGRAM), protocol, address, memory.name],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "PASS" in finished.stdout


def test_they_outlive_the_coordinator(client: Client, server: RunningServer) -> None:
    with Memory(4096) as memory:
        assert register(client, "kept", 4096)[0] == 200
        assert client.register("beside", memory.name, 4096)[0] == 200
        (victim,) = server.pids("coordinator")
        os.kill(victim, signal.SIGKILL)
        assert status(client) == ["kept"]
        assert register(client, "later")[0] == 200  # by the next one
        assert server.pids("coordinator") != [victim]
        assert register(client, "kept", 4096)[0] == 400
        assert client.status() == ["beside"]
        wait_until(lambda: client.infer("touch", ("beside", 0), None, 4)[0] == 200, "beside")
        assert status(client) == ["kept", "later"]
        assert client.unregister()[0] == 200


def test_they_end_with_their_owner(client: Client, server: RunningServer) -> None:
    script = (
        "from tests.integration.region_client import Client;"
        "from tests.cuda.test_region_server import register;"
        f"print(register(Client({server.unix_path!r}), 'mortal')[0], flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as child:  # type: ignore[call-overload]
        try:
            assert child.stdout.readline() == b"200\n"
            assert register(client, "immortal")[0] == 200
            assert status(client) == ["immortal", "mortal"]
        finally:
            child.kill()
    wait_until(lambda: status(client) == ["immortal"], "the region to go with its owner")


def test_show(client: Client, server: RunningServer) -> None:
    assert register(client, "shown", 4000)[0] == 200
    (row,) = show.ask(server.run_dir, "regions")
    told = [row[key] for key in ("region", "kind", "device", "key", "bytes", "uid", "pid")]
    assert told == ["shown", "cuda", "cuda:0", "", 4000, os.geteuid(), os.getpid()]
    assert B64[:16] not in show.table([row])
    metrics = server.request("GET", "/metrics")[2].decode()
    assert 'shmserve_region_bytes{kind="cuda"} 4000' in metrics
