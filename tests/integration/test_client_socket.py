"""Input from hostile clients at the client socket, and the reactions."""

import contextlib
import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from shmserve.cli.operating.show import ask
from shmserve.client import connect
from shmserve.errors import UnreadableMessage
from shmserve.protocol.control import client_messages as wire
from shmserve.protocol.control.client_messages import (
    ClientHello,
    DescribeModel,
    Failed,
    LaneOpened,
    ListRegions,
    ModelDescribed,
    Ok,
    OpenLane,
    RegisterMemfd,
    ServerHello,
    Unregister,
)
from tests.integration.lane_client import Connection, connected
from tests.running_server import open_fds, wait_until
from tests.servers import SMALL, Server, python
from tests.stray_descriptors import lingering, pass_on

MODELS = Path("tests/repositories/basic")
SIZE = 1 << 16
HELLO = ServerHello(wire.VERSION, lanes=True, models=True)
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Raw(Connection):
    """A connection without manners."""

    def __init__(self, path: str, hello: bool = True) -> None:
        super().__init__(connected(path))
        if hello:
            assert self.ask(ClientHello(wire.VERSION)) == HELLO

    def ask(self, message: Any, fds: Sequence[int] = ()) -> Any:
        self.send(message, fds)
        return wire.decode_from_server(self.sock.recv(1 << 17))

    def closed(self) -> bool:
        try:
            return self.sock.recv(1 << 17) == b""
        except ConnectionError:
            return True


def memfd(size: int = SIZE, seals: int = SEALS, flags: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.fixture
def path(server: Server) -> Iterator[str]:
    path = os.path.join(server.run_dir, "client.sock")
    yield path
    with Raw(path) as raw:
        assert raw.ask(Unregister()) == Ok()
    assert ask(server.run_dir, "regions") == []


def refused(reply: Any, part: str) -> None:
    assert isinstance(reply, Failed), reply
    assert part in reply.text
    assert "/" not in reply.text.replace("and/or", "")


def test_a_region_and_its_life(server: Server, path: str) -> None:
    with Raw(path) as raw:
        fd = memfd()
        assert raw.ask(RegisterMemfd("a", 64, 100), [fd]) == Ok()
        assert raw.ask(RegisterMemfd("a", 64, 100), [fd]) == Ok(), "the same again"
        refused(raw.ask(RegisterMemfd("a", 64, 101), [fd]), "already in manager")
        refused(raw.ask(RegisterMemfd("a", 64, 100), [memfd()]), "already in manager")
        assert raw.ask(RegisterMemfd("b", 0, SIZE), [fd]) == Ok()
        status = raw.ask(ListRegions())
        assert [(r.name, r.key, r.offset, r.byte_size) for r in status.regions] == [
            ("a", "", 64, 100),
            ("b", "", 0, SIZE),
        ]
        assert [r.name for r in raw.ask(ListRegions("a")).regions] == ["b"]
        code, rows = server.get("/v2/systemsharedmemory/region/a/status")
        assert (code, rows[0]["byte_size"]) == (200, 100)
        assert server.request("POST", "/v2/systemsharedmemory/region/a/unregister")[0] == 200
        assert raw.ask(Unregister(("a", "b", "", "nope"))) == Ok()
        assert raw.ask(ListRegions()) == Ok()


def test_no_key_comes_in_here(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    with Server(
        **SMALL, model_control="explicit", keys_file=keys, keys_required_from="anyone"
    ) as server:
        path = f"{server.run_dir}/{wire.SOCKET_NAME}"
        for reply in replies(path):
            refused(reply, "registering memory needs a key, and the client socket takes no keys")
            assert reply.code == "UNAUTHENTICATED"
        with Raw(path) as client:
            for message in (OpenLane("echo"), DescribeModel("echo")):
                refused(client.ask(message), "using the service needs a key, and the client")


@pytest.mark.parametrize("setting", ["http_restricted_api", "grpc_restricted_protocol"])
def test_a_restricted_api_is_restricted_here(setting: str) -> None:
    restricted: dict[str, Any] = {setting: "trace, shared-memory:x-a=s"}
    with Server(str(MODELS), **SMALL, **restricted) as server:
        path = f"{server.run_dir}/{wire.SOCKET_NAME}"
        for reply in replies(path):
            refused(reply, "shared-memory is a restricted API")
            assert reply.code == "PERMISSION_DENIED"
        assert ask(server.run_dir, "regions") == []
        with Raw(path) as client:  # a lane is for inference, which is not restricted
            assert isinstance(client.ask(OpenLane("echo")), LaneOpened)
            assert isinstance(client.ask(DescribeModel("echo")), ModelDescribed)
        with pytest.warns(RuntimeWarning, match="takes no memory"):
            connect(server.base_url, path).close()


def test_metadata_may_be_restricted_here() -> None:
    restricted: dict[str, Any] = {"http_restricted_api": "metadata:x-a=s"}
    with (
        Server(str(MODELS), **SMALL, **restricted) as server,
        Raw(f"{server.run_dir}/{wire.SOCKET_NAME}") as client,
    ):
        assert server.get("/v2/models/echo")[0] == 403
        reply = client.ask(DescribeModel("echo"))
        refused(reply, "metadata is a restricted API")
        assert reply.code == "PERMISSION_DENIED"
        assert isinstance(client.ask(OpenLane("echo")), LaneOpened)


def test_models_are_described_as_over_http(server: Server, path: str) -> None:
    with Raw(path) as raw:
        for name, version in (("add_sub", ""), ("digits", "1"), ("identity_bytes", "")):
            code, document = server.get(_metadata(name, version))
            assert code == 200
            described = raw.ask(DescribeModel(name, version))
            assert described.version == document["versions"][-1]
            assert not described.decoupled
            for tensors, rows in (
                (described.inputs, document["inputs"]),
                (described.outputs, document["outputs"]),
            ):
                assert [[t.name, t.datatype, list(t.shape)] for t in tensors] == [
                    [row["name"], row["datatype"], row["shape"]] for row in rows
                ]
        for name, version in (("nope", ""), ("digits", "7")):
            code, document = server.get(_metadata(name, version))
            reply = raw.ask(DescribeModel(name, version))
            assert (code, reply) == (404, Failed("NOT_FOUND", document["error"]))


def _metadata(name: str, version: str) -> str:
    return f"/v2/models/{name}/versions/{version}" if version else f"/v2/models/{name}"


def replies(path: str) -> list[Any]:
    """Return the replies to all requests that concern memory."""
    fd = memfd()
    messages = [(RegisterMemfd("region", 0, SIZE), [fd]), (ListRegions(), [])]
    made = []
    for message, fds in [*messages, (Unregister(("region",)), []), (Unregister(), [])]:
        with Raw(path) as client:
            made.append(client.ask(message, fds))
    os.close(fd)
    return made


def test_many_regions_come_in_pages(path: str) -> None:
    with Raw(path) as raw:
        fd = memfd()
        names = [f"{n:03}" + "x" * 250 for n in range(150)]
        for name in names:
            assert raw.ask(RegisterMemfd(name, 0, 1), [fd]) == Ok()
        first = raw.ask(ListRegions())
        assert first.more
        second = raw.ask(ListRegions(first.regions[-1].name))
        assert not second.more
        assert [r.name for r in first.regions + second.regions] == names


def test_descriptors_that_are_refused(path: str) -> None:
    with Raw(path) as raw, tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        shm = os.open("/dev/shm/shmserve-test", os.O_RDWR | os.O_CREAT, 0o600)
        os.unlink("/dev/shm/shmserve-test")
        os.ftruncate(shm, SIZE)
        ends = os.pipe()
        good = memfd()
        for fd in (
            memfd(seals=0),
            memfd(seals=fcntl.F_SEAL_SHRINK),
            memfd(seals=fcntl.F_SEAL_GROW),
            shm,
            file.fileno(),
            ends[0],
            raw.sock.fileno(),
            os.open("/dev/shm", os.O_RDONLY),
            os.open("/dev/null", os.O_RDWR),
        ):
            refused(raw.ask(RegisterMemfd("a", 0, 1), [fd]), "memfd sealed with")
        refused(raw.ask(RegisterMemfd("a", 0, 1)), "exactly one")
        refused(raw.ask(RegisterMemfd("a", 0, 1), [good, good]), "exactly one")
        readonly = os.open(f"/proc/self/fd/{good}", os.O_RDONLY)
        for fd in (readonly, memfd(seals=SEALS | fcntl.F_SEAL_WRITE)):
            refused(raw.ask(RegisterMemfd("a", 0, 1), [fd]), "must be writable")
        assert raw.ask(RegisterMemfd("a", 0, 1), [good]) == Ok(), "the connection is as before"


@pytest.mark.needs("hugepages")
def test_huge_pages_are_refused(path: str) -> None:
    fd = memfd(2 << 20, flags=os.MFD_HUGETLB)
    with Raw(path) as raw:
        refused(raw.ask(RegisterMemfd("a", 0, 1), [fd]), "huge pages")


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (0, 0), (0, -1), (-1, 1), (0, SIZE + 1), (SIZE, 1), (1, SIZE), (0, 1 << 31),
        (1 << 63, 1), (0, (1 << 64) - 1), ((1 << 64) - 1, 1), ((1 << 63) - 1, (1 << 63) - 1),
    ],
)  # fmt: skip
def test_windows_that_are_refused(path: str, offset: int, size: int) -> None:
    with Raw(path) as raw:
        refused(raw.ask(RegisterMemfd("a", offset, size), [memfd()]), "must lie within")


@pytest.mark.parametrize("name", ["", "a/b", "a\0", "a\n", "x" * 256, "ü" * 128, "x" * 60_000])
def test_names_that_are_refused(path: str, name: str) -> None:
    with Raw(path) as raw:
        reply = raw.ask(RegisterMemfd(name, 0, 1), [memfd()])
        assert isinstance(reply, Failed)
        assert len(reply.text) < 300
        assert raw.ask(ListRegions()) == Ok()


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1",
        b"hello",
        wire.encode(["RegisterMemfd", "a", 1.5, 2]),
        wire.encode(["RegisterMemfd", "a", 1 << 63, "2"]),
        wire.encode(["Hello", 1, "cli", "cli-1-aaaa", 1]),
        wire.encode(["Unregister", "abc"]),
        b"\x91\xa1\xa9",  # a tag that is not UTF-8
        b"\x93\xadRegisterMemfd\xa1\xff\x00\x01",
        b"\x92\xaaUnregister" + b"\x91" * 5000,
        wire.encode(ClientHello(wire.VERSION)),
        wire.encode(RegisterMemfd("x" * 70_000, 0, 1)),
    ],
)
@pytest.mark.parametrize("fds", [0, 1, 5])
def test_nonsense_costs_its_sender_the_connection(path: str, data: bytes, fds: int) -> None:
    with Raw(path) as other, Raw(path) as raw:
        raw.send(data, [memfd()] * fds)
        assert raw.closed()
        assert other.ask(ListRegions()) == Ok()


@pytest.mark.parametrize(
    "message", [ListRegions(), Unregister(), RegisterMemfd("a", 0, 1), DescribeModel("echo")]
)
@pytest.mark.parametrize("fds", [0, 1])
def test_hello_comes_first(path: str, message: Any, fds: int) -> None:
    with Raw(path, hello=False) as raw:
        try:
            raw.send(message, [memfd()] * fds)
        except PermissionError:  # since Linux 6.16 no descriptor is taken before the hello
            assert fds
            return
        assert raw.closed()
    with Raw(path, hello=False) as raw:
        assert raw.ask(ClientHello(99)) == HELLO
        assert raw.closed()


def test_bounds_on_connections(path: str) -> None:
    with contextlib.ExitStack() as stack:
        # Connect one by one: before the 64th, connections of earlier tests have been closed
        connections = (stack.enter_context(Raw(path, hello=False)) for _ in range(80))
        assert sum(_answered(raw) for raw in connections) == 64
    wait_until(lambda: _greets(path), "there is room again")


def test_those_who_say_nothing_or_read_nothing(server: Server, path: str) -> None:
    """Silent clients and clients that do not read must not delay the coordinator or cost memory."""
    with Raw(path, hello=False) as silent, Raw(path) as deaf, Raw(path) as other:
        fd = memfd()
        for number in range(128):
            name = f"{number:03}" + "x" * 250
            assert other.ask(RegisterMemfd(name, 0, 1), [fd]) == Ok()
        deaf.sock.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            for _ in range(10_000):
                deaf.send(ListRegions())
        for _ in range(100):
            assert isinstance(other.ask(ListRegions()), Ok)
        assert silent.closed(), "after some seconds"
        assert other.ask(Unregister()) == Ok()


def test_no_descriptor_is_left(server: Server, path: str) -> None:
    (pid,) = server.pids("coordinator")
    with Raw(path) as raw:
        before = open_fds(pid)
        for _ in range(30):
            refused(raw.ask(RegisterMemfd("a", 0, 1), [memfd(seals=0)]), "sealed")
            refused(raw.ask(RegisterMemfd("a/", 0, 1), [memfd()]), "forbidden")
            with Raw(path) as bad:
                bad.send(b"nonsense", [memfd(), memfd()])
                assert bad.closed()
        wait_until(lambda: open_fds(pid) <= before + 1, "descriptors are closed")


@pytest.mark.parametrize("count", [1, 2, 100])
def test_descriptors_that_are_slow_to_close(path: str, count: int) -> None:
    """A program cannot have the coordinator wait for the other end of a socket."""
    with Raw(path) as other, Raw(path) as raw, lingering(2 * count + 1) as strays:
        pass_on(raw.sock, wire.encode(RegisterMemfd("a", 0, 1)), strays[:count])
        reply = wire.decode_from_server(raw.sock.recv(1 << 17))
        refused(reply, "sealed" if count == 1 else "exactly one")
        pass_on(raw.sock, b"nonsense", strays[count : 2 * count])
        with contextlib.suppress(BrokenPipeError):  # else it stays unread
            pass_on(raw.sock, b"unread", strays[2 * count :])
        assert raw.closed()
        assert other.ask(ListRegions()) == Ok()


@pytest.mark.needs("passrights")
def test_other_sockets_take_no_descriptors(server: Server) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(server.unix_path)
        with lingering(1) as strays, pytest.raises(PermissionError):
            pass_on(client, b"GET /v2 HTTP/1.1\r\n", strays)


_STRANGER = """
import json, os, sys
from shmserve.errors import ShmserveError
from tests.integration.test_client_socket import Raw, memfd
from shmserve.protocol.control.client_messages import *
foreign = memfd()  # root's
os.setgroups([]); os.setgid(65534); os.setuid(65534)
told = []
try:
    raw = Raw(sys.argv[1])
except PermissionError:
    print(json.dumps(["no entry"])); sys.exit()
for message, fds in (
    (RegisterMemfd("a", 0, 1), [foreign]),
    (RegisterMemfd("a", 0, 1), [memfd()]),
    (Unregister(("root",)), []),
    (ListRegions(), []),
):
    reply = raw.ask(message, fds)
    told.append(reply.text if isinstance(reply, Failed) else [r.name for r in reply.regions])
print(json.dumps(told))
"""


@pytest.mark.needs("root")
def test_other_users(server: Server) -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        chosen = os.path.join(directory, "client.sock")
        with Server(MODELS, **SMALL, client_socket=chosen) as other:
            with Raw(chosen) as raw:
                assert raw.ask(RegisterMemfd("root", 0, 1), [memfd()]) == Ok()
                told = _stranger(chosen)
                assert "does not own" in told[0]
                assert told[1:] == [[], [], ["a"]]
                assert [r.name for r in raw.ask(ListRegions()).regions] == ["root"]
            wait_until(lambda: len(ask(other.run_dir, "regions")) == 1, "the stranger's vanish")
        assert not os.path.exists(chosen)
    assert _stranger(os.path.join(server.run_dir, "client.sock")) == ["no entry"]


def _stranger(path: str) -> Any:
    return json.loads(python("-c", _STRANGER, path))


def _answered(raw: Raw) -> bool:
    try:
        return bool(raw.ask(ClientHello(wire.VERSION)))
    except (OSError, UnreadableMessage):
        return False


def _greets(path: str) -> bool:
    with Raw(path, hello=False) as raw:
        return _answered(raw)
