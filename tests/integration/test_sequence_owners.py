"""Owners of sequences and callers of slots at every entrance of a real server."""

import contextlib
import http.client
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from tests.grpc_client import Client, put, tensor
from tests.holding import in_flight
from tests.integration.region_client import OTHER_UID, as_user
from tests.integration.test_keys import make
from tests.running_server import ROOT, RunningServer, wait_until
from tests.servers import UnixConnection

TALLY = ROOT / "tests/repositories/sequences/tally"
# A model that has the model `tally` add up, in the sequence of the request
RELAY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(request) for request in requests]

    def one(self, request):
        call = pb_utils.InferenceRequest(
            model_name="tally", requested_output_names=["SUM"], inputs=request.inputs(),
            correlation_id=request.correlation_id(), flags=request.flags())
        answer = call.exec()
        if answer.has_error():
            return pb_utils.InferenceResponse(error=answer.error())
        return pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(answer, "SUM")])
"""
TENSORS = """
max_batch_size: 4
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "SUM" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
LINE = """
platform: "ensemble"
ensemble_scheduling { step [ { model_name: "tally" model_version: -1
    input_map { key: "IN" value: "IN" } output_map { key: "SUM" value: "SUM" } } ] }
"""
PROXIED = {"via": "1.1 proxy"}
UNKNOWN = "must specify the START flag on the first request of the sequence"


def write(folder: Path, name: str, config: str, code: str = "") -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "config.pbtxt").write_text(config + TENSORS)
    if code:
        (folder / name / "1" / "model.py").write_text(code)


class Owned(RunningServer):
    """Server with sequences, and with keys that nobody needs."""

    def __init__(self, folder: str, **settings: Any) -> None:
        models = Path(folder, "models")
        shutil.copytree(TALLY, models / "tally")
        write(models, "relay", 'backend: "python" dynamic_batching {}', RELAY)
        write(models, "line", LINE)
        keys = f"{folder}/keys.toml"
        self.fields = {
            "alice": PROXIED | {"shmserve-key": make("alice", ["use"], keys)},
            "bob": PROXIED | {"shmserve-key": make("bob", ["use"], keys)},
            "remote": PROXIED,
            "local": {},
            "other user": {},
        }
        super().__init__(
            models,
            keys_file=keys,
            keys_required_from="nobody",
            http_workers=2,
            grpc_processes=2,
            grpc_socket_mode="0666",
            **settings,
        )
        self.unix = f"{folder}/http"
        self.environ["SHMSERVE_HTTP_BIND"] = f"127.0.0.1:{self.http_port},unix:{self.unix}"
        self.environ["SHMSERVE_GRPC_BIND"] = f"{self.grpc_address},unix:{folder}/grpc"
        self.grpc_unix = f"unix:{folder}/grpc"


def started(**settings: Any) -> Iterator[Owned]:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with Owned(folder, **settings) as server:
            server.wait_instances()
            yield server
        assert server.leaks() == []


@pytest.fixture(scope="module")
def server() -> Iterator[Owned]:
    yield from started()


@pytest.fixture(scope="module")
def shared() -> Iterator[Owned]:
    yield from started(shared_sequences=True)


def user_of(who: str) -> contextlib.AbstractContextManager[None]:
    return as_user(OTHER_UID) if who == "other user" else contextlib.nullcontext()


def over_http(server: Owned, who: str, model: str, given: dict[str, Any], value: int) -> int | str:
    return _over_http(server, who, model, given, value, unix=False)


def over_unix(server: Owned, who: str, model: str, given: dict[str, Any], value: int) -> int | str:
    return _over_http(server, who, model, given, value, unix=True)


def _over_http(
    server: Owned, who: str, model: str, given: dict[str, Any], value: int, unix: bool
) -> int | str:
    document = {
        "inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [value]}],
        "outputs": [{"name": "SUM"}],
        "parameters": given,
    }
    connection = (
        UnixConnection(server.unix)
        if unix
        else http.client.HTTPConnection("127.0.0.1", server.http_port)
    )
    with user_of(who):
        connection.connect()
    connection.request(
        "POST", f"/v2/models/{model}/infer", json.dumps(document), server.fields[who]
    )
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        assert response.status == 400, answer
        return str(answer["error"])
    return int(answer["outputs"][0]["data"][0])


def asked(model: str, given: dict[str, Any], value: int) -> pb.ModelInferRequest:
    array = np.array([[value]], np.int32)
    made = pb.ModelInferRequest(model_name=model, inputs=[tensor(array, "IN", "INT32")])
    made.outputs.add(name="SUM")
    made.raw_input_contents.append(array.tobytes())
    put(made.parameters, given)
    return made


def number(answer: pb.ModelInferResponse) -> int:
    return int(np.frombuffer(answer.raw_output_contents[0], np.int32)[0])


def over_grpc(server: Owned, who: str, model: str, given: dict[str, Any], value: int) -> int | str:
    metadata = tuple(server.fields[who].items())
    with Client(server.grpc_address) as client:
        with user_of(who):
            grpc.channel_ready_future(client.channel).result(60)
        try:
            return number(client.infer(asked(model, given, value), metadata=metadata))
        except grpc.RpcError as ex:
            return str(ex.details())


def over_stream(
    server: Owned, who: str, model: str, given: dict[str, Any], value: int
) -> int | str:
    """Send on a stream, over the Unix socket."""
    metadata = tuple(server.fields[who].items())
    with Client(server.grpc_unix) as client:
        with user_of(who):
            grpc.channel_ready_future(client.channel).result(60)
        method = client.method("ModelStreamInfer", stream=True)
        (answer,) = method(iter([asked(model, given, value)]), timeout=60, metadata=metadata)
    return str(answer.error_message) or number(answer.infer_response)


Ask = Callable[[Owned, str, str, dict[str, Any], int], int | str]
DOORS: list[tuple[Ask, str]] = [
    (over_http, "tally"),
    (over_unix, "tally"),
    (over_grpc, "tally"),
    (over_stream, "tally"),
    (over_http, "relay"),
    (over_grpc, "relay"),
    (over_http, "line"),
    (over_grpc, "line"),
]


def add(
    server: Owned, door: tuple[Ask, str], who: str, id: int, value: int, flags: str = ""
) -> Any:
    ask, model = door
    given = {"sequence_id": id, **{f"sequence_{flag}": True for flag in flags.split()}}
    return ask(server, who, model, given, value)


def test_an_owners_sequences_are_found_through_every_door_and_by_nobody_else(
    server: Owned,
) -> None:
    owners = list(server.fields)
    for id, (who, first) in enumerate(zip(owners, DOORS, strict=False), start=1):
        assert add(server, first, who, id, 100, "start") == 100
        for count, door in enumerate(DOORS, start=1):
            assert add(server, door, who, id, 1) == 100 + count, (who, door)
            for other in owners:
                if other != who:
                    flags = ("", "end")[count % 2]
                    assert UNKNOWN in add(server, door, other, id, 1, flags), (who, other, door)
        assert add(server, first, who, id, 0, "end") == 100 + len(DOORS)


@pytest.mark.parametrize("door", DOORS)
def test_equal_ids_of_several_owners_do_not_meet(server: Owned, door: tuple[Ask, str]) -> None:
    owners = list(server.fields)
    for count, who in enumerate(owners):
        assert add(server, door, who, 50, 100 * count, "start") == 100 * count
    for step in (1, 2):
        found = [add(server, door, who, 50, 1) for who in owners]
        assert found == [100 * count + step for count in range(len(owners))]
    assert add(server, door, "bob", 50, 0, "end") == 102
    assert add(server, door, "alice", 50, 0, "end") == 2
    for who in ("remote", "local", "other user"):
        assert add(server, door, who, 50, 0, "end") % 100 == 2


def test_shared_sequences_are_everybodys(shared: Owned) -> None:
    expected = 0
    for who in shared.fields:
        for door in DOORS:
            expected += 1
            assert add(shared, door, who, 7, 1, "" if expected > 1 else "start") == expected


def from_address(server: RunningServer, host: str, id: int, flags: str = "") -> tuple[int, Any]:
    """Send a request of a sequence from an address of this host."""
    connection = http.client.HTTPConnection(
        "127.0.0.1", server.http_port, timeout=60, source_address=(host, 0)
    )
    document = {
        "inputs": [{"name": "IN", "datatype": "INT32", "shape": [1, 1], "data": [1]}],
        "parameters": {"sequence_id": id, **{f"sequence_{flag}": True for flag in flags.split()}},
    }
    connection.request("POST", "/v2/models/tally/infer", json.dumps(document))
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    return response.status, answer.get("error") or answer["outputs"][0]["data"]


def test_200_starts_without_an_end_hold_up_no_other_caller(tmp_path: Path) -> None:
    """A caller that only begins sequences uses all slots while alone. Another caller's sequences
    get slots all the same, and only the first caller's idle sequences end."""
    shutil.copytree(TALLY, tmp_path / "tally")
    config = tmp_path / "tally" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 3", "count: 1"))
    server = RunningServer(tmp_path, http_workers=2, grpc_processes=0, request_timeout_s=15)
    with ThreadPoolExecutor(200) as threads, server:
        server.wait_instances()
        starts = {
            id: threads.submit(from_address, server, "127.0.0.1", id, "start")
            for id in range(1, 201)
        }
        wait_until(
            lambda: (
                sum(start.done() for start in starts.values()) == 32
                and in_flight(server, "tally/1/0") == 168
            ),
            "one caller does not use all slots",
        )
        begun = [id for id, start in starts.items() if start.done()]
        for step, flags in enumerate(("start", "", "end"), start=1):
            for id in range(1001, 1005):
                assert from_address(server, "127.0.0.2", id, flags) == (200, [step])
        results = [from_address(server, "127.0.0.1", id) for id in begun]
        gone = [text for status, text in results if status != 200]
        assert len(gone) == 4
        assert all(UNKNOWN in text for text in gone)
        assert {start.result()[0] for start in starts.values()} == {200, 504}
    assert server.leaks() == []
