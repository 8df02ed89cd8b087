"""CUDA regions in a real server: both protocols, deaths of the coordinator and of owners."""

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.cli.operating import show
from tests.cuda.exporting import exported
from tests.integration.region_client import Client, Memory
from tests.running_server import wait_until
from tests.servers import Server, beside, only, python

MODELS = Path(__file__).parents[1] / "repositories" / "regions"
TRITON = Path(__file__).parent / "triton_program.py"
BASE = "/v2/cudasharedmemory"


@pytest.fixture(scope="module")
def handle(cuda_environment: dict[str, str]) -> Iterator[bytes]:
    """Handle of 1024 numbers on device 0."""
    with exported(cuda_environment) as (handle, _):
        yield handle


@pytest.fixture(scope="module")
def server(cuda_environment: dict[str, str], handle: bytes) -> Iterator[Server]:
    with Server(MODELS, cuda_environment, **only("touch")) as running:
        wait_until(lambda: all_live(running), "an instance on every device")
        yield running
    log = running.log()
    for shown in (as_base64(handle), handle.hex(), repr(handle)[2:], repr(list(handle))[1:]):
        assert shown[:24] not in log


def all_live(server: Server) -> bool:
    """Return True if all instances run. Only an executor on device 0 refuses its handles."""
    rows = show.ask(server.run_dir, "models")
    return all(row["instance_state"] == "READY" for row in rows if row["model"] == "touch")


class CudaClient(Client):
    """Client over the Unix socket that registers the memory of `handle` on device 0."""

    def __init__(self, where: int | str, handle: bytes) -> None:
        super().__init__(where)
        self.handle = handle

    def register_cuda(self, name: str, size: int = 4096) -> tuple[int, Any]:
        told = {"raw_handle": {"b64": as_base64(self.handle)}, "device_id": 0, "byte_size": size}
        return self.request("POST", f"{BASE}/region/{name}/register", told)

    def cuda_status(self) -> list[str]:
        return [region["name"] for region in self.request("GET", f"{BASE}/status")[1]]


def as_base64(handle: bytes) -> str:
    return base64.b64encode(handle).decode()


@pytest.fixture
def client(server: Server, handle: bytes) -> Iterator[CudaClient]:
    client = CudaClient(server.unix_path, handle)
    yield client
    assert client.request("POST", f"{BASE}/unregister")[0] == 200
    client.close()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient(server: Server, handle: bytes, protocol: str) -> None:
    with Memory(64) as memory:
        words = (server.address(protocol), as_base64(handle), memory.name)
        python(TRITON, "regions", protocol, *words)


def test_they_outlive_the_coordinator(client: CudaClient, server: Server) -> None:
    with Memory(4096) as memory:
        assert client.register_cuda("kept")[0] == 200
        assert client.register("beside", memory.name, 4096)[0] == 200
        (victim,) = server.pids("coordinator")
        os.kill(victim, signal.SIGKILL)
        assert client.cuda_status() == ["kept"]
        wait_until(lambda: server.pids("coordinator") not in ([], [victim]), "another one")
        server.wait_linked()
        assert client.register_cuda("later")[0] == 200  # by the next coordinator
        assert server.pids("coordinator") != [victim]
        assert client.register_cuda("kept")[0] == 400
        wait_until(lambda: client.infer("touch", ("beside", 0), None, 4)[0] == 200, "beside")
        for name in ("kept", "later"):
            status, answer = client.infer("touch", (name, 16), None, 4)
            assert status == 200, answer
            assert answer["outputs"][0]["data"] == [5, 6, 7, 8]
        assert (client.cuda_status(), client.status()) == (["kept", "later"], ["beside"])
        assert client.unregister()[0] == 200


def test_they_end_with_their_owner(client: CudaClient, server: Server) -> None:
    assert client.register_cuda("immortal")[0] == 200
    script = (
        "import sys; from tests.cuda.test_region_server import CudaClient;"
        f"client = CudaClient({server.unix_path!r}, bytes.fromhex(sys.stdin.readline()));"
        "print(client.register_cuda('mortal')[0], flush=True); sys.stdin.readline()"
    )
    with beside("-c", script, given=f"{client.handle.hex()}\n") as (told, _):
        assert told == "200\n"
        assert client.infer("touch", ("mortal", 0), None, 4)[0] == 200
    wait_until(lambda: client.cuda_status() == ["immortal"], "the region to go with its owner")
    assert client.infer("touch", ("mortal", 0), None, 4)[0] == 404


def test_show(client: CudaClient, server: Server) -> None:
    assert client.register_cuda("shown", 4000)[0] == 200
    (row,) = show.ask(server.run_dir, "regions")
    told = [row[key] for key in ("region", "kind", "device", "key", "bytes", "uid", "pid")]
    assert told == ["shown", "cuda", "cuda:0", "", 4000, os.geteuid(), os.getpid()]
    metrics = server.request("GET", "/metrics")[2].decode()
    assert 'shmserve_region_bytes{kind="cuda"} 4000' in metrics
