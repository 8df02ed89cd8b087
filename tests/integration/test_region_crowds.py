"""Very many regions, and callers that only look local."""

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.region_client import Client, Memory
from tests.needs import ip
from tests.running_server import RunningServer, free_port, wait_until
from tests.servers import Server, output

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "repositories" / "regions"
CROWD, CALLERS, LIMBO = 10_000, 16, 256


def test_ten_thousand_regions() -> None:
    """Callers with the right to so many regions can use all, and no region is left at the end."""
    with (
        Server(MODELS, client_shm_max_regions=CROWD, grpc_processes=0) as server,
        Memory(1 << 16) as memory,
    ):
        client = Client(server.http_port)
        assert client.register("first", memory.name, 4096)[0] == 200
        assert client.infer("touch", ("first", 0), None, 4)[0] == 200
        assert client.unregister()[0] == 200
        before = _descriptors(server)

        def register(share: int) -> set[int]:
            caller = Client(server.http_port)
            answers = {
                caller.register(f"r{number}", memory.name, 4, number * 4 % 65536)[0]
                for number in range(share, CROWD, CALLERS)
            }
            caller.close()
            return answers

        with ThreadPoolExecutor(CALLERS) as callers:
            assert list(callers.map(register, range(CALLERS))) == [{200}] * CALLERS
        client.connection.close()  # idle for so long, it may have been closed by the server
        assert client.register("one-more", memory.name, 4)[0] == 503
        assert len(client.status()) == CROWD
        for number in (0, CROWD // 2, CROWD - 1):
            assert client.infer("touch", (f"r{number}", 0), None, 1)[0] == 200
        assert client.unregister()[0] == 200
        assert client.status() == []
        assert client.infer("touch", ("r0", 0), None, 1)[0] == 404
        # the coordinator keeps the last few regions for requests on their way
        at_most = {**before, "coordinator": before["coordinator"] + LIMBO}
        wait_until(
            lambda: all(at_most[role] >= count for role, count in _descriptors(server).items()),
            "the descriptors of unregistered regions are closed",
        )
        client.close()


def _descriptors(server: RunningServer) -> dict[str, int]:
    """Return the open descriptors of coordinator and supervisor, which keep one for each region."""
    found = {}
    for pid, title in server.processes().items():
        for role in ("coordinator", "supervisor"):
            if role in title:
                found[role] = len(os.listdir(f"/proc/{pid}/fd"))
    assert len(found) == 2
    return found


# ----------------------------------------------------- another network namespace


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """Network namespace with the address 10.213.7.2, which reaches this namespace at 10.213.7.1."""
    name = f"shmserve-{os.getpid()}"
    near, far = f"sn{os.getpid()}", f"sf{os.getpid()}"
    assert ip("netns", "add", name)
    try:
        assert ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        assert ip("address", "add", "10.213.7.1/24", "dev", near)
        assert ip("link", "set", near, "up")
        for words in (
            ("address", "add", "10.213.7.2/24", "dev", far),
            ("link", "set", far, "up"),
            ("link", "set", "lo", "up"),
        ):
            assert ip("-n", name, *words)
        yield name
    finally:
        ip("netns", "delete", name)
        ip("link", "delete", near)


_STRANGER = """
import json, sys
from tests.integration.region_client import Client
port, key = int(sys.argv[1]), sys.argv[2]
client = Client(port, "10.213.7.1")
print(json.dumps({
    "register": client.register("mine", key, 4096),
    "use": client.infer("touch", ("theirs", 0), None, 4),
    "unregister": client.unregister("theirs"),
    "unregister all": client.unregister(),
    "status": client.status(),
}))
"""


@pytest.mark.needs("netns")
def test_a_caller_from_another_network_namespace_is_remote(elsewhere: str) -> None:
    """The caller has the server's uid and files; only its address is of another namespace."""
    port = free_port()
    bind = f"127.0.0.1:{port},10.213.7.1:{port}"
    server = Server(MODELS, http_bind=bind, grpc_processes=0)
    server.http_port = port
    with server, Memory(4096) as memory:
        client = Client(port)
        assert client.register("theirs", memory.name, 4096)[0] == 200
        command = ["ip", "netns", "exec", elsewhere, sys.executable, "-c", _STRANGER]
        told = json.loads(output(*command, str(port), memory.name))
        assert told["register"][0] == 403
        assert memory.name not in told["register"][1]["error"]
        assert told["use"][0] == 404
        assert told["unregister"][0] == told["unregister all"][0] == 200  # for its own regions
        assert told["status"] == []
        assert client.status() == ["theirs"]
        client.close()
