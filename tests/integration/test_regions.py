"""Client memory through a real server: reads, writes, keeping and unregistration."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmserve.cli.operating import show
from shmserve.testing.running_server import RunningServer, wait_until
from tests.integration.region_client import Client, Memory

MODELS = Path(__file__).parents[1] / "repositories" / "regions"
TRITON_CLIENT = Path(__file__).parent / "triton_shm_client.py"
NOTHING = {"in": 0, "batch": 0, "out": 0, "device": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(MODELS, http_workers=2, grpc_processes=0) as running:
        yield running
    assert running.leaks() == []


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    client = Client(server.http_port)
    yield client
    assert client.unregister()[0] == 200
    client.close()


def test_region_to_region_copies_nothing(client: Client) -> None:
    for size in (1 << 16, 1 << 20, 1 << 24):
        with Memory(size) as source, Memory(size) as target:
            values = np.arange(size // 4, dtype=np.float32)
            source.put(values)
            assert client.register("in", source.name, size)[0] == 200
            assert client.register("out", "//" + target.name, size)[0] == 200
            status, answer = client.infer("touch", ("in", 0), ("out", 0), size // 4)
            assert status == 200
            output = {"name": "OUT", "datatype": "FP32", "shape": [size // 4]}
            assert answer["outputs"] == [output]
            assert client.copied() == NOTHING
            np.testing.assert_array_equal(target.get(size // 4), values + 1)
            client.unregister()


def test_in_place(client: Client) -> None:
    with Memory(4096) as memory:
        memory.put(np.zeros(1024, np.float32))
        client.register("both", memory.name, 4096)
        for _ in range(3):
            assert client.infer("touch", ("both", 0), ("both", 0), 1024)[0] == 200
            assert client.copied() == NOTHING
        assert (memory.get(1024) == 3).all()


def test_windows_and_offsets_need_not_be_aligned(client: Client) -> None:
    with Memory(10000) as memory:
        memory.put(np.arange(4, dtype=np.float32), 4103)
        assert client.register("odd", memory.name, 5000, 4097)[0] == 200
        assert client.infer("touch", ("odd", 6), ("odd", 101), 4)[0] == 200
        assert list(memory.get(4, 4097 + 101)) == [1, 2, 3, 4]
        assert client.copied() == {**NOTHING, "in": 16, "out": 16}


def test_copy_mode_copies_and_says_so(client: Client) -> None:
    with Memory(8192) as memory:
        memory.put(np.arange(1024, dtype=np.float32))
        client.register("r", memory.name, 8192)
        assert client.infer("touch_copy", ("r", 0), ("r", 4096), 1024)[0] == 200
        assert client.copied() == {**NOTHING, "in": 4096, "out": 4096}
        np.testing.assert_array_equal(memory.get(1024, 4096), np.arange(1, 1025))


def test_words_are_copied_before_they_are_read(client: Client) -> None:
    with Memory(4096) as memory:
        os.pwrite(memory.fd, b"\2\0\0\0hi\3\0\0\0you", 0)
        client.register("r", memory.name, 4096)
        document = {
            "inputs": [
                {
                    "name": "IN",
                    "shape": [2],
                    "datatype": "BYTES",
                    "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 13},
                }
            ],
            "outputs": [
                {
                    "name": "OUT",
                    "parameters": {
                        "shared_memory_region": "r",
                        "shared_memory_offset": 100,
                        "shared_memory_byte_size": 13,
                    },
                }
            ],
        }
        assert client.request("POST", "/v2/models/words/infer", document)[0] == 200
        assert os.pread(memory.fd, 14, 100) == b"\2\0\0\0hi\3\0\0\0you\0"
        assert client.copied()["in"] == 13
        del document["outputs"]
        answer = client.request("POST", "/v2/models/words/infer", document)[1]
        assert answer["outputs"][0]["data"] == ["hi", "you"]


def test_registrations_are_seen_by_every_worker_at_once(server: RunningServer) -> None:
    clients = [Client(server.http_port) for _ in range(8)]  # on both workers
    try:
        with Memory(4096) as memory:
            for turn in range(20):
                a, b = clients[turn % 8], clients[(turn * 3 + 1) % 8]
                assert a.register("x", memory.name, 4096)[0] == 200
                assert b.infer("touch", ("x", 0), None, 4)[0] == 200
                assert b.unregister("x")[0] == 200
                assert a.infer("touch", ("x", 0), None, 4)[0] == 404
    finally:
        for client in clients:
            client.close()


def test_show_regions(client: Client, server: RunningServer) -> None:
    with Memory(4096) as memory:
        client.register("shown", memory.name, 4000, 8)
        rows = show.ask(server.run_dir, "regions")
        assert [(r["region"], r["offset"], r["bytes"], r["uid"]) for r in rows] == [
            ("shown", 8, 4000, os.geteuid())
        ]


def test_an_unlinked_object_stays_usable(client: Client) -> None:
    with Memory(4096) as memory:
        client.register("r", memory.name, 4096)
        os.unlink(memory.path)
        assert client.infer("touch", ("r", 0), ("r", 0), 4)[0] == 200
        assert list(memory.get(4)) == [1, 1, 1, 1]


def kill(server: RunningServer, *roles: str) -> None:
    """Kill one process of each role; wait until a replacement runs and is linked to all
    processes."""
    wait_until(lambda: all(server.pids(role) for role in roles), f"{roles}")
    victims = [server.pids(role)[0] for role in roles]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    wait_until(
        lambda: all(set(server.pids(role)) - set(victims) for role in roles), f"other {roles}"
    )
    server.wait_linked()


@pytest.mark.parametrize("role", ["coordinator", "executor touch/", "supervisor"])
def test_regions_survive(role: str, client: Client, server: RunningServer) -> None:
    with Memory(4096) as kept, Memory(4096) as fresh:
        client.register("kept", kept.name, 4096)
        os.unlink(kept.path)  # so the object is only reachable through a descriptor
        for turn in range(1, 3):
            kill(server, role)
            assert client.status() == ["kept"]
            wait_until(lambda: client.infer("touch", ("kept", 0), ("kept", 0), 4)[0] == 200, "kept")
            assert list(kept.get(4)) == [turn] * 4
            assert client.register("fresh", fresh.name, 4096)[0] == 200
            assert client.unregister("fresh")[0] == 200


def test_regions_survive_coordinator_and_supervisor(client: Client, server: RunningServer) -> None:
    with Memory(4096) as named, Memory(4096) as lost, Memory(4096) as replaced:
        for name, memory in (("named", named), ("lost", lost), ("replaced", replaced)):
            assert client.register(name, memory.name, 4096)[0] == 200
        os.unlink(lost.path)
        os.rename(replaced.path, replaced.path + "-old")
        with Memory(4096, replaced.name):  # not the registered object
            kill(server, "coordinator", "supervisor")
            wait_until(lambda: client.status() == ["named"], "what cannot be found to be dropped")
            wait_until(lambda: client.infer("touch", ("named", 0), None, 4)[0] == 200, "named")
            assert client.infer("touch", ("replaced", 0), None, 4)[0] == 404
        os.unlink(replaced.path + "-old")


def test_a_region_of_a_dead_process_is_reaped(server: RunningServer, client: Client) -> None:
    with Memory(4096) as memory:
        script = (
            "import sys; sys.path.insert(0, '.');"
            "from tests.integration.region_client import Client;"
            f"c = Client({server.unix_path!r});"
            f"print(c.register('mortal', {memory.name!r}, 4096)[0], flush=True); input()"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdin is not None
        try:
            assert child.stdout.readline() == b"200\n"
            assert "mortal" in client.status()
        finally:
            child.kill()
            child.wait()
            child.stdin.close()
            child.stdout.close()
        wait_until(lambda: "mortal" not in client.status(), "reaping")
        assert os.path.exists(memory.path)


def test_tritonclient_with_its_own_shared_memory(server: RunningServer) -> None:
    finished = subprocess.run(
        [sys.executable, str(TRITON_CLIENT), f"127.0.0.1:{server.http_port}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "PASS" in finished.stdout


def test_off_means_off(tmp_path: Path) -> None:
    with (
        RunningServer(MODELS, client_shm_mode="off", grpc_processes=0) as server,
        Memory(4096) as memory,
    ):
        client = Client(server.http_port)
        status, answer = client.register("r", memory.name, 4096)
        assert status == 501
        assert "client_shm_mode" in answer["error"]
        assert client.unregister()[0] == 501
        assert client.status() == []
        assert client.infer("touch", ("r", 0), None, 4)[0] == 404
        client.close()
