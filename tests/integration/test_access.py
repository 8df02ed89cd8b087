"""Access rights at every entrance of a real server: for the server's user, another user,
relayed requests, and foreign pages."""

import base64
import fcntl
import http.client
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.observe import flight_recorder
from shmserve.protocol.control import client_messages as control
from tests.crash.reload import changed
from tests.integration.lane_client import Program, floats, in_region, request
from tests.running_server import ROOT, RunningServer
from tests.servers import Server, UnixConnection, only, python

MODELS = ROOT / "tests/repositories/basic"
SERVICE = "/inference.GRPCInferenceService"
# The model reports its loader
TELLS = """
class Model:
    def __init__(self, context):
        open("MARK", "w").close()

    def infer(self, request):
        return {"OUT": request.input("IN")}
"""
DOORS = ("tcp", "unix", "grpc", "grpc-unix")


def over_http(door: str, address: str, fields: dict[str, str], mark: str) -> dict[str, Any]:
    """Return the status that answers each action over HTTP."""
    code = base64.b64encode(TELLS.replace("MARK", mark).encode()).decode()
    sent = {"parameters": {"config": changed(1), "file:1/model.py": code}}
    asked: dict[str, tuple[str, str, Any]] = {
        "read": ("GET", "/v2/models/echo", None),
        "load": ("POST", "/v2/repository/models/echo/load", {}),
        "send": ("POST", "/v2/repository/models/echo/load", sent),
        "config": ("POST", "/v2/repository/models/echo/load", {"parameters": {"config": "{}"}}),
        "log": ("POST", "/v2/logging", {"log_verbose_level": 0}),
        "offline": ("GET", "/grps/v1/health/offline", None),
    }
    found = {}
    for action, (method, path, document) in asked.items():
        host, _, port = address.rpartition(":")
        connection = UnixConnection(address)
        if door != "unix":
            connection = http.client.HTTPConnection(host, int(port))  # type: ignore[assignment]
        body = None if document is None else json.dumps(document)
        connection.request(method, path, body, fields)
        found[action] = connection.getresponse().status
        connection.close()
    return found


def over_grpc(address: str, fields: dict[str, str], mark: str) -> dict[str, Any]:
    """Return the name of the status that answers each action over gRPC."""
    sent = pb.RepositoryModelLoadRequest(model_name="echo")
    sent.parameters["config"].string_param = changed(1)
    sent.parameters["file:1/model.py"].bytes_param = TELLS.replace("MARK", mark).encode()
    config = pb.RepositoryModelLoadRequest(model_name="echo")
    config.parameters["config"].string_param = "{}"
    log = pb.LogSettingsRequest()
    log.settings["log_verbose_level"].uint32_param = 0
    asked = {
        "read": (f"{SERVICE}/ModelMetadata", pb.ModelMetadataRequest(name="echo")),
        "load": (
            f"{SERVICE}/RepositoryModelLoad",
            pb.RepositoryModelLoadRequest(model_name="echo"),
        ),
        "send": (f"{SERVICE}/RepositoryModelLoad", sent),
        "config": (f"{SERVICE}/RepositoryModelLoad", config),
        "log": (f"{SERVICE}/LogSettings", log),
        "offline": ("/grps.protos.v1.GrpsService/Offline", None),
    }
    metadata = [(name.lower(), value) for name, value in fields.items()]
    found = {}
    with grpc.insecure_channel(address) as channel:
        for action, (path, message) in asked.items():
            call = channel.unary_unary(path)
            try:
                call(message.SerializeToString() if message else b"", 60, metadata)
                found[action] = "OK"
            except grpc.RpcError as ex:
                found[action] = ex.code().name
    return found


def ask(door: str, server: RunningServer, fields: dict[str, str], mark: str) -> dict[str, Any]:
    return ask_at(door, address_of(door, server), fields, mark)


def ask_at(door: str, address: str, fields: dict[str, str], mark: str) -> dict[str, Any]:
    if door.startswith("grpc"):
        return over_grpc(address, fields, mark)
    return over_http(door, address, fields, mark)


def address_of(door: str, server: RunningServer) -> str:
    binds = server.environ["SHMSERVE_GRPC_BIND"].split(",")
    return {
        "tcp": f"127.0.0.1:{server.http_port}",
        "unix": server.environ["SHMSERVE_HTTP_BIND"].split(",")[1].removeprefix("unix:"),
        "grpc": binds[0],
        "grpc-unix": binds[-1],
    }[door]


@pytest.fixture(scope="module")
def doors() -> Iterator[RunningServer]:
    """Server whose Unix sockets every user can reach."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(MODELS / "echo", f"{folder}/models/echo")
        server = Server(f"{folder}/models", **only("echo"))
        server.environ["SHMSERVE_HTTP_BIND"] = f"127.0.0.1:{server.http_port},unix:{folder}/http"
        server.environ["SHMSERVE_GRPC_BIND"] = f"{server.grpc_address},unix:{folder}/grpc"
        server.environ["SHMSERVE_GRPC_SOCKET_MODE"] = "0666"
        server.environ["SHMSERVE_HTTP_WORKERS"] = "1"
        server.environ["SHMSERVE_CLIENT_SOCKET"] = f"{folder}/client"
        with server:
            yield server


def expected(door: str, **refused: str) -> dict[str, Any]:
    """Return the expected answers: success, except for the refused actions."""
    told = {"400": "INVALID_ARGUMENT", "403": "PERMISSION_DENIED"}
    found: dict[str, Any] = dict.fromkeys(
        ("read", "load", "send", "config", "log", "offline"), "OK" if "grpc" in door else 200
    )
    for action, status in refused.items():
        found[action] = told[status] if "grpc" in door else int(status)
    return found


@pytest.mark.parametrize("door", DOORS)
def test_the_servers_own_user(doors: RunningServer, tmp_path: Path, door: str) -> None:
    mark = tmp_path / "mark"
    found = ask(door, doors, {}, str(mark))
    assert found == expected(door)
    assert mark.exists(), "the positive control: this is what others must not do"


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("field", ["X-Forwarded-For", "Forwarded", "Via"])
def test_relayed_for_somebody_else(
    doors: RunningServer, tmp_path: Path, door: str, field: str
) -> None:
    mark = tmp_path / "mark"
    found = ask(door, doors, {field: "for=192.0.2.1"}, str(mark))
    assert found == expected(door, send="403", config="403")
    assert not mark.exists()


def test_addresses_of_proxies_that_add_nothing(tmp_path: Path) -> None:
    server = Server(MODELS, **only("echo"), http_workers=1)
    own = f"unix:{tmp_path}/grpc"
    server.environ["SHMSERVE_GRPC_BIND"] = f"{server.grpc_address},{own}"
    server.environ["SHMSERVE_REMOTE_BINDS"] = f"127.0.0.1:{server.http_port},{own}"
    with server:
        for door in DOORS:
            mark = tmp_path / door
            found = ask(door, server, {}, str(mark))
            if door in ("tcp", "grpc-unix"):
                assert found == expected(door, send="403", config="403")
            assert mark.exists() is (door in ("unix", "grpc"))


_STRANGER = """
import json, os, sys
from tests.integration.test_access import ask_at
"localhost".encode("idna")  # imports what this user cannot read
os.setgroups([]); os.setgid(65534); os.setuid(65534)
door, address, mark = sys.argv[1:]
print(json.dumps(ask_at(door, address, {}, mark)))
"""


@pytest.mark.needs("root")
@pytest.mark.parametrize("door", DOORS)
def test_another_user_of_the_host(doors: RunningServer, tmp_path: Path, door: str) -> None:
    mark = tmp_path / "mark"
    printed = python("-c", _STRANGER, door, address_of(door, doors), mark)
    assert json.loads(printed) == expected(door, send="403", config="403")
    assert not mark.exists()


def at_the_client_socket(path: str) -> dict[str, str]:
    """Return the code that answers each action at the client socket and on a lane."""
    with Program("", path) as program:
        found = {"list": answer_to(program, control.ListRegions())}
        fd = os.memfd_create("mine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        found["register"] = answer_to(program, control.RegisterMemfd("mine", 0, 4), [fd])
        os.close(fd)
        found["lane"] = answer_to(program, control.OpenLane("echo"))
        if found["lane"] == "OK":
            with program.lane("echo") as lane:
                inputs = {
                    "use": floats(1.0),
                    "own region": in_region("mine", 1),
                    "the owner's region": in_region("owners", 1),
                }
                for number, (action, tensor) in enumerate(inputs.items()):
                    found[action] = lane.ask(request(number, tensor)).code or "OK"
    return found


def answer_to(program: Program, message: Any, fds: Sequence[int] = ()) -> str:
    reply, received = program.ask(message, fds)
    for fd in received:
        os.close(fd)
    return reply.code if isinstance(reply, control.Failed) else "OK"


_STRANGER_AT_THE_CLIENT_SOCKET = """
import json, os, sys
from tests.integration.test_access import at_the_client_socket
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(json.dumps(at_the_client_socket(sys.argv[1])))
"""


def stranger_at_the_client_socket(path: str) -> Any:
    """As another user of the host."""
    return json.loads(python("-c", _STRANGER_AT_THE_CLIENT_SOCKET, path))


EVERYTHING_THERE = ("list", "register", "lane", "use", "own region", "the owner's region")


@pytest.mark.needs("root")
def test_the_client_socket_and_lanes(doors: RunningServer) -> None:
    path = doors.environ["SHMSERVE_CLIENT_SOCKET"]
    with Program("", path) as owner:
        owner.region("owners", 4)
        assert at_the_client_socket(path) == dict.fromkeys(EVERYTHING_THERE, "OK")
        found = stranger_at_the_client_socket(path)
    assert found == dict.fromkeys(EVERYTHING_THERE, "OK") | {"the owner's region": "NOT_FOUND"}
    with Program("", path) as owner, owner.lane("echo") as lane:
        assert answer_to(owner, control.OpenLane("nobody's")) == "NOT_FOUND"
        lane.send(b"nonsense")
        assert lane.ended()
    doors.get("/v2/models/nobody%27s")
    doors.infer("nobody's", {"inputs": []})
    seen = {
        # the model has been loaded anew
        (row["event"], row["subject"], row["text"].partition("@")[0])
        for row in flight_recorder.rows(doors.run_dir, 1000)
    }
    assert seen >= {
        ("lane opened", "uid 0", "echo/1/0"),
        ("lane opened", "uid 65534", "echo/1/0"),
        ("lane refused", "uid 0", "NOT_FOUND"),
        ("lane violated", "uid 0", "echo"),
        ("request refused", "unknown model", ""),
    }
    assert not [row for row in seen if "nobody" in "".join(row)], "nothing that clients have sent"


@pytest.mark.parametrize("door", DOORS)
def test_a_page_of_another_origin(doors: RunningServer, tmp_path: Path, door: str) -> None:
    mark = tmp_path / "mark"
    everything = dict.fromkeys(("read", "load", "send", "config", "log", "offline"), "403")
    for fields in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert ask(door, doors, fields, str(mark)) == expected(door, **everything)
    assert not mark.exists()


def test_a_host_that_is_not_ours(doors: RunningServer) -> None:
    for fields, status in (
        ("Host: evil.example", 403),
        ("Host: localhost, evil.example", 400),
        ("Host: localhost\r\nHost: evil.example", 400),
        ("X-A: b", 400),
        ("Host: localhost:1", 200),
        ("Host: localhost\r\nSCRIPT_NAME: /elsewhere", 400),
    ):
        assert _get(doors, "/v2", fields).startswith(f"HTTP/1.1 {status} "), fields


def test_the_address_of_all_interfaces_is_ours_unless_something_changes(
    doors: RunningServer,
) -> None:
    """A browser sends such fields for an image of another page: no mark for such an address."""
    fields = "Host: 0.0.0.0:8000\r\nReferer: http://evil.example/\r\nAccept: image/*"
    for target, status in (
        ("/v2", 200),
        ("/v2/models/echo", 200),
        ("/grps/v1/health/offline", 403),
    ):
        assert _get(doors, target, fields).startswith(f"HTTP/1.1 {status} "), target
    named = "http://0.0.0.0:8000/grps/v1/health/offline"
    assert _get(doors, named, "Host: localhost").startswith("HTTP/1.1 403 ")


def test_the_host_of_a_target_counts_instead_of_the_field(doors: RunningServer) -> None:
    """RFC 9112, 3.2.2."""
    for target, host, status in (
        ("http://evil.example/v2", "localhost", 403),
        ("HTTP://evil.example:80/v2", "localhost", 403),
        ("http://localhost/v2", "evil.example", 200),
        ("http://localhost/v2", "localhost, evil.example", 400),
        ("http://localhost@evil.example/v2", "localhost", 400),
        ("http:///v2", "localhost", 400),
        ("/v2?a=http://evil.example", "localhost", 200),
    ):
        answer = _get(doors, target, f"Host: {host}")
        assert answer.startswith(f"HTTP/1.1 {status} "), (target, host, answer)
        if status == 403:
            assert "request target: 'evil.example" in answer


def _get(doors: RunningServer, target: str, fields: str) -> str:
    with socket.create_connection(("127.0.0.1", doors.http_port), 60) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\n{fields}\r\nConnection: close\r\n\r\n".encode())
        return sock.makefile("rb").read().decode()
