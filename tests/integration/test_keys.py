"""Keys, over every door of a real server."""

import contextlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.cli.serving import key as command
from shmserve.config import Settings
from tests.grpc_client import Client
from tests.integration.lane_client import Program
from tests.integration.region_client import Memory
from tests.integration.test_access import (
    EVERYTHING_THERE,
    MODELS,
    address_of,
    ask_at,
    at_the_client_socket,
    stranger_at_the_client_socket,
)
from tests.integration.test_grpc import echo, out
from tests.running_server import wait_until
from tests.servers import Server, only

ACTIONS = ("read", "load", "send", "config", "log", "offline")
DOORS = ("tcp", "unix", "grpc", "grpc-unix")
ELSEWHERE = {"Via": "1.1 proxy"}


def expected(door: str, *may: str, other: str) -> dict[str, Any]:
    names = {"401": "UNAUTHENTICATED", "403": "PERMISSION_DENIED", "200": "OK"}
    statuses = {action: "200" if action in may else other for action in ACTIONS}
    over_grpc = door.startswith("grpc")
    return {a: names[status] if over_grpc else int(status) for a, status in statuses.items()}


def make(name: str, scopes: list[str], path: str) -> str:
    """Make a key and return the line that the command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        command.new(Settings(), path, name, scopes, None)
    return printed.getvalue().strip()


class Keyed(Server):
    """Server with keys, which are named after their use."""

    def __init__(self, folder: str, required_from: str) -> None:
        self.keys_file = f"{folder}/keys.toml"
        self.keys: dict[str, str] = {}
        for name, scopes in (
            ("user", ["use"]),
            ("operator", ["use", "change"]),
            ("admin", ["use", "register", "change", "send-models"]),
            ("changer", ["change"]),
        ):
            self.keys[name] = make(name, scopes, self.keys_file)
        super().__init__(
            f"{folder}/models",
            **only("echo"),
            keys_file=self.keys_file,
            keys_required_from=required_from,
            client_socket=f"{folder}/client",
            http_workers=1,
            grpc_socket_mode="0600",
        )
        self.environ["SHMSERVE_HTTP_BIND"] = f"127.0.0.1:{self.http_port},unix:{folder}/http"
        self.environ["SHMSERVE_GRPC_BIND"] = f"{self.grpc_address},unix:{folder}/grpc"


@pytest.fixture(scope="module", params=["remote", "local"])
def server(request: pytest.FixtureRequest) -> Iterator[Keyed]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        shutil.copytree(MODELS / "echo", f"{folder}/models/echo")
        with Keyed(folder, request.param) as server:
            yield server
            log = server.log()
        assert not [name for name, key in server.keys.items() if key in log]
        assert "key admin: " in log, "who has changed something is told"


@pytest.mark.parametrize("door", DOORS)
def test_callers_and_actions(server: Keyed, tmp_path: Path, door: str) -> None:
    mark = tmp_path / "mark"
    address = address_of(door, server)
    table: list[tuple[dict[str, str], dict[str, Any]]] = [
        ({}, expected(door, *ACTIONS, other="")),  # the server's own user, here
        (ELSEWHERE, expected(door, other="401")),
        ({**ELSEWHERE, "shmserve-key": "wrong"}, expected(door, other="401")),
        ({**ELSEWHERE, "shmserve-key": server.keys["user"]}, expected(door, "read", other="403")),
        (
            {**ELSEWHERE, "Authorization": f"Bearer {server.keys['operator']}"},
            expected(door, "read", "load", "log", "offline", other="403"),
        ),
        (
            {**ELSEWHERE, "shmserve-key": server.keys["changer"]},
            expected(door, "load", "log", "offline", other="403"),
        ),
        (
            {**ELSEWHERE, "Authorization": f"Bearer {server.keys['admin']}"},
            expected(door, *ACTIONS, other=""),
        ),
        (  # a foreign web page, whichever key it has
            {"Sec-Fetch-Site": "cross-site", "shmserve-key": server.keys["admin"]},
            expected(door, other="403"),
        ),
    ]
    for fields, statuses in table:
        mark.unlink(missing_ok=True)
        assert ask_at(door, address, fields, str(mark)) == statuses, fields
        assert mark.exists() == (statuses["send"] in (200, "OK"))


def test_probes_need_no_key_and_answers_tell_how(server: Keyed) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/echo/ready"):
        assert server.request("GET", path, headers=ELSEWHERE)[0] == 200
    status, headers, body = server.request("GET", "/v2", headers=ELSEWHERE)
    assert (status, headers["www-authenticate"]) == (401, 'Bearer realm="shmserve"')
    assert b"a key with the scope 'use'; no key was sent: send a key as" in body


@pytest.mark.parametrize("field", ["shmserve-key", "authorization"])
def test_a_wrong_key_is_told_from_a_missing_one(server: Keyed, field: str) -> None:
    """No answer shows the key or names a right one."""
    wrong = server.keys["operator"][:-1]
    value = wrong if field == "shmserve-key" else f"Bearer {wrong}"
    status, headers, body = server.request("GET", "/v2", headers={**ELSEWHERE, field: value})
    assert (status, "www-authenticate" in headers) == (401, True)
    metadata = (("via", "1.1 proxy"), (field, value))
    with Client(server.grpc_address) as client, pytest.raises(grpc.RpcError) as ended:
        client.infer(echo(np.arange(3, dtype=np.float32)), metadata=metadata)
    assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
    for text in (body.decode(), ended.value.details()):
        assert "; the key sent is unknown or expired: send a key as" in text
        assert wrong not in text
        assert "operator" not in text


def test_inferences_are_counted_by_the_names_of_keys(server: Keyed) -> None:
    key, before = server.keys["user"], counted(server)
    array = np.arange(3, dtype=np.float32)
    metadata = (("via", "1.1 proxy"), ("authorization", f"Bearer {key}"))
    with Client(server.grpc_address) as client:
        assert out(client.infer(echo(array), metadata=metadata)).tolist() == [0, 1, 2]
    for wrong in ("x", key[:-1]):
        fields = {**ELSEWHERE, "shmserve-key": wrong}
        status, _, body = server.request("GET", "/v2", headers=fields)
        assert status == 401
        assert key[:-1].encode() not in body
    wait_until(lambda: counted(server).get("user", 0) > before.get("user", 0), "it is counted")
    now = counted(server)
    assert now["user"] == before.get("user", 0) + 1
    assert now["(unknown)"] == before.get("(unknown)", 0) + 2


def counted(server: Keyed) -> dict[str, float]:
    """Requests by the names of keys."""
    text = server.request("GET", "/metrics")[2].decode()
    assert not [key for key in server.keys.values() if key in text]
    found = re.findall(r'^shmserve_key_requests_total\{key="(.+)"\} (.+)$', text, re.M)
    return {name: float(count) for name, count in found}


def test_memory_of_a_holder(server: Keyed) -> None:
    path = "/v2/systemsharedmemory/region/keyed"
    with Memory(4096) as memory:
        body = json.dumps({"key": f"/{memory.name}", "byte_size": 4096}).encode()
        for name, status in ((None, 401), ("user", 403), ("admin", 200)):
            fields = {**ELSEWHERE, **({"shmserve-key": server.keys[name]} if name else {})}
            assert server.request("POST", f"{path}/register", body, fields)[0] == status
        fields = {**ELSEWHERE, "shmserve-key": server.keys["user"]}
        assert server.request("GET", f"{path}/status", None, fields)[0] == 404
        # the caller is the server's user
        assert server.request("GET", f"{path}/status", None)[0] == 200
        fields["shmserve-key"] = server.keys["admin"]
        assert server.request("POST", f"{path}/unregister", b"", fields)[0] == 200


@pytest.mark.needs("root")
def test_lanes_are_for_those_of_whom_no_key_is_required(server: Keyed) -> None:
    path = server.environ["SHMSERVE_CLIENT_SOCKET"]
    with Program("", path) as owner:
        owner.region("owners", 4)
        assert at_the_client_socket(path) == dict.fromkeys(EVERYTHING_THERE, "OK")
        found = stranger_at_the_client_socket(path)
    if server.environ["SHMSERVE_KEYS_REQUIRED_FROM"] == "local":
        assert found == dict.fromkeys(("list", "register", "lane"), "UNAUTHENTICATED")
    else:
        assert found["lane"] == found["use"] == "OK"


def test_keys_come_and_go_while_it_serves(server: Keyed) -> None:
    def status(key: str) -> int:
        fields = {**ELSEWHERE, "shmserve-key": key}
        return server.request("GET", "/v2/models/echo", headers=fields)[0]

    def over_grpc(key: str) -> str:
        metadata = (("via", "1.1 proxy"), ("shmserve-key", key))
        with Client(server.grpc_address) as client:
            try:
                client.call(
                    "ModelMetadata", pb.ModelMetadataRequest(name="echo"), metadata=metadata
                )
            except grpc.RpcError as ex:
                return ex.code().name
        return "OK"

    path = Path(server.keys_file)
    before = path.read_text()
    server.keys["late"] = late = make("late", ["use"], server.keys_file)
    wait_until(lambda: status(late) == 200 and over_grpc(late) == "OK", "the key is known")
    path.write_text("[late")

    def told() -> bool:
        assert (status(late), over_grpc(late)) == (200, "OK")
        return server.log().count("the old keys stay valid: 5") == 2

    wait_until(told, "both processes say that the file is broken")
    path.write_text(before)
    wait_until(
        lambda: status(late) == 401 and over_grpc(late) == "UNAUTHENTICATED", "the key is gone"
    )
    assert status(server.keys["user"]) == 200
