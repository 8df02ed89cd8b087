"""Hostile clients with regions: against the server, its files, other users, and themselves.

The server never dies, never answers with the data of another user, and never gives away its own
names. (Triton 2.51 dies when an object is truncated, takes NUL in a key, and lets every caller
remove every region.)
"""

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.holding import Hold, in_flight
from tests.integration.region_client import BASE, OTHER_UID, Client, Memory, as_user
from tests.needs import own_address
from tests.running_server import WATCHDOG_S, folder_of, free_port, wait_until
from tests.servers import Server

MODELS = Path(__file__).parents[1] / "repositories" / "regions"


class Attacked(Server):
    """Server whose Unix socket every user can reach."""

    def __init__(self, **settings: Any) -> None:
        self.folder = folder_of(self)
        os.chmod(self.folder, 0o755)
        self.public = os.path.join(self.folder, "http.sock")
        port = free_port()
        bind = f"127.0.0.1:{port},unix:{self.public}"
        super().__init__(MODELS, http_bind=bind, http_workers=2, grpc_processes=0, **settings)
        self.http_port = port


@pytest.fixture(scope="module")
def server() -> Iterator[Attacked]:
    with Attacked() as running:
        running.wait_instances()
        yield running
        assert all(role in str(running.processes()) for role in ("coordinator", "supervisor"))


@pytest.fixture
def client(server: Attacked) -> Iterator[Client]:
    client = Client(server.http_port)
    yield client
    client.unregister()
    client.close()
    assert server.ready()


def refused(answer: tuple[int, Any], *statuses: int) -> str:
    status, body = answer
    assert status in (statuses or (400, 403)), body
    text: str = body["error"]
    assert "/dev/" not in text
    assert "Traceback" not in text
    return text


# ------------------------------------------------------------------ keys and objects


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "//", ".", "..", "/.", "/..", "../etc/passwd", "/../../etc/passwd", "a/b"),
        *("/a/b/", "x\0y", "\0", "k" * 300, "\u00e9" * 200, "shmserve.cafe.1234", "self/fd/0"),
        *("registry.page", "registry.msgpack", "coordinator.sock", "/proc/self/fd/3"),
    ],
)
def test_keys(key: str, client: Client) -> None:
    refused(client.register("bad", key, 16))
    assert client.status() == []


def test_what_is_no_memory_object(client: Client, server: Attacked) -> None:
    names = [
        f"regions-test-{kind}-{os.getpid()}" for kind in ("dir", "fifo", "link", "dev", "sock")
    ]
    folder, fifo, link, device, sock = (Path("/dev/shm") / name for name in names)
    listener = socket.socket(socket.AF_UNIX)
    try:
        folder.mkdir()
        os.mkfifo(fifo)
        link.symlink_to("/etc/passwd")
        listener.bind(str(sock))
        try:
            os.mknod(device, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            device = link
        for path in (folder, fifo, link, device, sock):
            refused(client.register("bad", path.name, 16))
            refused(client.register("bad", f"{path.name}/x", 16))
    finally:
        listener.close()
        folder.rmdir()
        for path in {fifo, link, device, sock}:
            path.unlink(missing_ok=True)


def test_the_servers_own_files_under_another_name(client: Client, server: Attacked) -> None:
    name = f"regions-test-own-{os.getpid()}"
    for own in ("registry.page", "registry.msgpack", "master.lock"):
        try:
            os.link(os.path.join(server.run_dir, own), f"/dev/shm/{name}")
        except OSError:  # on another file system this attack is impossible
            os.symlink(os.path.join(server.run_dir, own), f"/dev/shm/{name}")
        try:
            refused(client.register("bad", name, 16))
        finally:
            os.unlink(f"/dev/shm/{name}")


def test_a_run_directory_in_dev_shm_cannot_be_linked_to() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        run_dir = os.path.join(parent, "run")
        with Server(MODELS, run_dir=run_dir, grpc_processes=0) as server:
            client = Client(server.http_port)
            name = f"regions-test-own-{os.getpid()}"
            os.link(os.path.join(run_dir, "registry.page"), f"/dev/shm/{name}")
            try:
                refused(client.register("bad", name, 16), 403)
            finally:
                os.unlink(f"/dev/shm/{name}")
                client.close()


@pytest.mark.parametrize(
    "value", [-1, -8, 1 << 63, (1 << 64) - 8, 1 << 64, 1.0, "16", None, True, []]
)
@pytest.mark.parametrize("field", ["offset", "byte_size"])
def test_sizes_of_every_kind(field: str, value: Any, client: Client) -> None:
    with Memory(8192) as memory:
        body = {"key": memory.name, "offset": 0, "byte_size": 16, field: value}
        refused(client.request("POST", f"{BASE}/region/r/register", body))
        assert client.status() == []


def test_sizes_around_the_object(client: Client) -> None:
    with Memory(8192) as memory:
        for offset, size, good in [
            *((0, 8192, True), (8191, 1, True), (4096, 4096, True), (1, 8191, True)),
            *((0, 8193, False), (8192, 1, False), (8192, 0, False), (4097, 4096, False)),
            *((0, 0, False), (1 << 31, 1, False), ((1 << 63) - 1, 1, False), (1, 1 << 62, False)),
        ]:
            status, _ = client.register("r", memory.name, size, offset)
            assert status == (200 if good else 400), (offset, size)
            client.unregister("r")


def test_windows_around_the_region(client: Client) -> None:
    with Memory(8192) as memory:
        client.register("r", memory.name, 4096, 4096)
        for offset in (4093, 4096, 1 << 31, (1 << 63) - 1):
            refused(client.infer("touch", ("r", offset), None, 1), 400)
            refused(client.infer("touch", ("r", 0), ("r", offset), 1), 400)
        refused(client.infer("touch", ("r", -4), None, 1), 400)
        assert os.pread(memory.fd, 8192, 0) == bytes(8192)


def test_names_of_every_byte(client: Client) -> None:
    with Memory(4096) as memory:
        for byte in range(256):
            path = f"{BASE}/region/n%{byte:02x}m/register"
            status, _ = client.request("POST", path, {"key": memory.name, "byte_size": 4})
            assert status in (200, 400, 404), byte
        names = client.status()
        assert len(names) == len(set(names))
        assert not any(ord(c) < 32 for name in names for c in name)
        assert client.register("n" * 256, memory.name, 4)[0] == 400
        client.unregister()
        assert client.status() == []


def test_another_size_does_not_replace_a_region(client: Client) -> None:
    with Memory(8192) as memory:
        assert client.register("r", memory.name, 4096)[0] == 200
        refused(client.register("r", memory.name, 8192), 400)
        refused(client.infer("touch", ("r", 4096), None, 1), 400)


def test_quotas(client: Client) -> None:
    with Memory(4096) as memory:
        answers = [client.register(f"r{i}", memory.name, 4096)[0] for i in range(1030)]
        assert answers == [200] * 1024 + [503] * 6
        assert client.infer("touch", ("r1023", 0), None, 4)[0] == 200
        assert client.unregister()[0] == 200
        assert client.register("again", memory.name, 4096)[0] == 200


# ------------------------------------------------------------------ pulling memory away


@pytest.mark.parametrize("size", [0, 100, 4096])
@pytest.mark.parametrize("model", ["touch", "touch_copy"])
def test_truncated_before(model: str, size: int, client: Client, server: Attacked) -> None:
    before = server.pids("executor")
    with Memory(8192) as memory, Memory(8192) as other:
        client.register("cut", memory.name, 8192)
        client.register("out", other.name, 8192)
        os.truncate(memory.path, size)
        assert "truncated" in refused(client.infer(model, ("cut", 0), ("out", 0), 4), 400)
        refused(client.infer(model, ("out", 0), ("cut", 0), 4), 400)
        os.truncate(memory.path, 8192)
        wait_until(
            lambda: "out of use" in client.infer(model, ("cut", 0), None, 4)[1].get("error", ""),
            "quarantine",
        )
        client.unregister("cut")
        client.register("cut", memory.name, 8192)
        assert client.infer(model, ("cut", 0), ("out", 0), 4)[0] == 200
    assert server.pids("executor") == before


def test_grown_unlinked_and_replaced(client: Client) -> None:
    with Memory(4096) as memory:
        memory.put(np.full(4, 5, np.float32))
        client.register("r", memory.name, 4096)
        os.truncate(memory.path, 1 << 20)
        refused(client.infer("touch", ("r", 4096), None, 4), 400)
        os.unlink(memory.path)
        with Memory(4096, memory.name):  # another object, not the registered object
            answer = client.infer("touch", ("r", 0), None, 4)[1]
            assert answer["outputs"][0]["data"] == [6, 6, 6, 6]


def test_unregistered_during_a_request(client: Client, server: Attacked, tmp_path: Path) -> None:
    with Memory(4096) as memory:
        client.register("r", memory.name, 4096)
        answers: list[int] = []
        with Hold(tmp_path) as hold:
            queued = [in_background(server, answers, "touch", "r", hold) for _ in range(3)]
            wait_until(lambda: in_flight(server, "touch/1/0") == 3, "all are on their way")
            hold.wait_begun()
            assert client.unregister("r")[0] == 200
            assert client.infer("touch", ("r", 0), None, 4)[0] == 404
        for thread in queued:
            thread.join(WATCHDOG_S)
        assert answers == [200, 200, 200]


def in_background(
    server: Attacked, answers: list[int], model: str, region: str, hold: Hold
) -> threading.Thread:
    def run() -> None:
        client = Client(server.http_port)
        place = (region, 0)
        answers.append(client.infer(model, place, place, 1024, hold=str(hold.path))[0])
        client.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def cut_meanwhile(server: Attacked, folder: Path, model: str, region: str, memory: Memory) -> int:
    """Truncate a region's memory while a model works on the region; return the answer's status."""
    answers: list[int] = []
    with Hold(folder) as hold:
        victim = in_background(server, answers, model, region, hold)
        hold.wait_begun()
        os.truncate(memory.path, 0)
    victim.join(WATCHDOG_S)
    (folder / "hold.begun").unlink()
    (status,) = answers
    return status


def test_sigbus_costs_only_the_one_who_caused_it(
    tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    with Attacked() as server, Memory(8192) as memory, Memory(8192) as good:
        server.wait_instances()
        client = Client(server.http_port)
        client.register("cut", memory.name, 8192)
        client.register("good", good.name, 8192)
        for model in ("touch", "touch_pair", "touch_copy"):
            assert client.infer(model, ("good", 0), ("good", 0), 4)[0] == 200
        errors: list[Any] = []
        done = threading.Event()

        def innocent() -> None:
            own = Client(server.http_port)
            document = {
                "inputs": [{"name": "IN", "shape": [2], "datatype": "FP32", "data": [1, 2]}]
            }
            while not done.is_set():
                status, answer = own.request("POST", "/v2/models/touch_pair/infer", document)
                if status != 200 or answer["outputs"][0]["data"] != [2, 3]:
                    errors.append(answer)
                time.sleep(0.01)
            own.close()

        asking = [threads.submit(innocent) for _ in range(8)]
        assert cut_meanwhile(server, tmp_path, "touch_pair", "cut", memory) == 400
        server.wait_log("SIGBUS")
        server.wait_instances()
        time.sleep(0.3)
        done.set()
        for one in asking:
            one.result()
        assert errors == []
        server.wait_log("region quarantined name=cut uid=")
        # From now on the server copies for a user who has truncated once.
        os.truncate(memory.path, 8192)
        client.unregister("cut")
        client.register("cut", memory.name, 8192)
        assert client.infer("touch_pair", ("cut", 0), ("cut", 0), 4)[0] == 200
        assert client.copied()["in"] == 16
        client.close()


def test_one_death_has_all_regions_of_its_owner_copied(tmp_path: Path) -> None:
    """Regions that were registered and mapped before are copied, too, so the next truncation only
    causes an error."""
    with Attacked() as server, Memory(8192) as memory, Memory(8192) as other:
        server.wait_instances()
        client = Client(server.http_port)
        client.register("cut", memory.name, 8192)
        client.register("other", other.name, 8192)
        for _ in range(4):  # mapped by both instances
            assert client.infer("touch_pair", ("other", 0), ("other", 0), 4)[0] == 200
        assert client.copied()["in"] == 0
        assert cut_meanwhile(server, tmp_path, "touch_pair", "cut", memory) == 400
        server.wait_log("its owner's regions are copied")
        server.wait_instances()
        before = server.pids("executor")
        for _ in range(4):
            assert client.infer("touch_pair", ("other", 0), ("other", 0), 4)[0] == 200
            assert client.copied()["in"] == 16
        assert cut_meanwhile(server, tmp_path, "touch_pair", "other", other) == 400
        assert server.pids("executor") == before
        client.unregister()
        client.close()


def test_in_copy_mode_nobody_notices(client: Client, server: Attacked, tmp_path: Path) -> None:
    before = server.pids("executor")
    with Memory(8192) as memory:
        client.register("cut", memory.name, 8192)
        assert cut_meanwhile(server, tmp_path, "touch_copy", "cut", memory) == 400
        assert os.fstat(memory.fd).st_size == 0  # nor has the server made the object grow again
    assert server.pids("executor") == before


# ------------------------------------------------------------------ other users


@pytest.mark.needs("root")
@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_another_user_finds_nothing_of_ours(way: str, client: Client, server: Attacked) -> None:
    where: int | str = server.http_port if way == "tcp" else server.public
    with Memory(4096) as memory:
        assert client.register("secret", memory.name, 4096)[0] == 200
        with as_user(OTHER_UID):
            other = Client(where)
        try:
            assert other.status() == []
            assert other.request("GET", f"{BASE}/region/secret/status")[0] == 404
            refused(other.infer("touch", ("secret", 0), None, 4), 404)
            assert other.unregister("secret")[0] == 200
            assert other.unregister()[0] == 200
            refused(other.register("mine", memory.name, 4096), 403)
            with as_user(OTHER_UID):
                theirs = Memory(4096)
            theirs.put(np.full(4, 8, np.float32))
            # a name of the other user
            assert other.register("secret", theirs.name, 4096)[0] == 200
            assert other.infer("touch", ("secret", 0), None, 2)[1]["outputs"][0]["data"] == [9, 9]
            assert client.infer("touch", ("secret", 0), None, 2)[1]["outputs"][0]["data"] == [1, 1]
            alternate(where)
            assert client.unregister()[0] == 200
            assert other.status() == ["secret"]
            assert other.unregister()[0] == 200
            theirs.close()
        finally:
            other.close()


def alternate(where: int | str) -> None:
    """Send the same bytes from both users in turn, so often that workers remember the request.

    There are enough connections that users share workers.
    """
    with contextlib.ExitStack() as stack:
        clients: list[tuple[Client, list[float]]] = []
        for _ in range(4):
            with as_user(OTHER_UID):
                clients.append((Client(where), [9, 9]))
            clients.append((Client(where), [1, 1]))
        for client, _ in clients:
            stack.callback(client.close)
        for client, expected in clients * 4:
            status, body = client.infer("touch", ("secret", 0), None, 2)
            assert (status, body["outputs"][0]["data"]) == (200, expected)


@pytest.mark.needs("root")
def test_a_closed_connection_is_not_taken_for_root(server: Attacked) -> None:
    with Memory(4096) as memory:
        body = json.dumps({"key": memory.name, "byte_size": 4096}).encode()
        head = (
            f"POST {BASE}/region/evil/register HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}"
        )
        for _ in range(20):
            with as_user(OTHER_UID):
                sock = socket.create_connection(("127.0.0.1", server.http_port))
            sock.sendall(head.encode() + b"\r\n\r\n" + body)
            sock.close()  # the socket's entry in the kernel's table now says uid 0
        client = Client(server.http_port)
        time.sleep(0.3)
        assert client.status() == []
        client.close()


@pytest.mark.needs("network")
@pytest.mark.parametrize("allowed", [False, True])
def test_remote_callers_register_nothing_unless_allowed(allowed: bool) -> None:
    class Open(Server):
        def __init__(self) -> None:
            port = free_port()
            settings: dict[str, Any] = {
                "client_shm_allow_remote": str(allowed).lower(),
                "grpc_processes": 0,
            }
            super().__init__(MODELS, http_bind=f"0.0.0.0:{port}", **settings)
            self.http_port = port

    with Open() as server, Memory(4096) as memory:
        remote = Client(server.http_port, own_address())
        assert remote.register("r", memory.name, 4096)[0] == (200 if allowed else 403)
        assert remote.infer("touch", ("r", 0), None, 4)[0] == (200 if allowed else 404)
        assert remote.unregister()[0] == 200
        remote.close()


@pytest.mark.needs("root")
def test_shared_isolation_is_tritons_way() -> None:
    with Attacked(client_shm_isolation="shared") as server, Memory(4096) as memory:
        client = Client(server.http_port)
        assert client.register("ours", memory.name, 4096)[0] == 200
        with as_user(OTHER_UID):
            other = Client(server.http_port)
        assert other.status() == ["ours"]
        assert other.infer("touch", ("ours", 0), None, 4)[0] == 200
        refused(other.register("mine", memory.name, 4096), 403)
        assert other.unregister()[0] == 200
        assert client.status() == []
        client.close()
        other.close()
