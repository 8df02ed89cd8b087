"""Service with models in an S3 store: start, changes, and absence of the store."""

import contextlib
import os
import resource
import signal
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_store import KEYS, SECRET, Faulty, Moto
from tests.holding import replace
from tests.running_server import RunningServer, wait_until
from tests.servers import SMALL, Server, Starting, only
from tests.store_stand_in import Answer, StandIn, begin

pytestmark = pytest.mark.needs("remote")

CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
MODEL = """
class Model:
    def __init__(self, context):
        self.added = %s
    def infer(self, request):
        return {"OUT": request.input("IN") + self.added}
"""
ONE = {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [1], "data": [1]}]}


def put(moto: Moto, model: str, version: int, added: str) -> None:
    moto.put(f"models/prod/{model}/config.pbtxt", CONFIG.encode())
    moto.put(f"models/prod/{model}/{version}/model.py", (MODEL % added).encode())


def result(server: RunningServer, model: str) -> Any:
    status, document = server.infer(model, ONE)
    return document["outputs"][0]["data"][0] if status == 200 else (status, document)


def index(server: RunningServer) -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in server.index() if row.get("state") != "UNAVAILABLE"}


def service(store: Faulty, folder: Path, kind: type[Server] = Server, **settings: Any) -> Server:
    return kind(
        "s3://models/prod",
        {**KEYS, "AWS_ENDPOINT_URL": store.url},
        repository_cache_dir=folder / "cache",
        repository_silence_s=3,
        poll_interval_s=0.3,
        **SMALL,
        **settings,
    )


def test_models_of_a_store(moto: Moto, store: Faulty, tmp_path: Path) -> None:
    put(moto, "add", 1, "10")
    put(moto, "broken", 1, "20")
    with service(store, tmp_path, model_control="poll") as server:
        assert result(server, "add") == 11
        changes_are_served(moto, store, server)
        store.stop()
        wait_until(lambda: "reason" in index(server)["add"], "it is told")
        assert index(server)["add"]["state"] == "READY"
        assert "s3://models/prod: the store " in index(server)["add"]["reason"]
        (pid,) = server.pids("executor add")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: result(server, "add") == 101, "it runs from the cache")
        replace(server, "fetcher")
    without_the_store(moto, store, tmp_path)


def changes_are_served(moto: Moto, store: Faulty, server: RunningServer) -> None:
    """A new complete version takes over; a broken version does not."""
    put(moto, "add", 2, "100")
    wait_until(lambda: result(server, "add") == 101, "the new version")
    store.faults = {"broken/2/model.py": "corrupt"}
    put(moto, "broken", 2, "30")
    wait_until(lambda: "reason" in index(server)["broken"], "it is told")
    assert "another checksum" in index(server)["broken"]["reason"]
    put(moto, "add", 3, "nothing_of_this_name")  # whole, and cannot be used
    put(moto, "late", 1, "7")
    wait_until(lambda: server.infer("late", ONE)[0] == 200, "a new model")
    assert result(server, "broken") == 21
    moto.delete("models/prod/add/3/model.py")
    put(moto, "late", 2, "8")  # a round that finds it began after the deletion
    wait_until(lambda: result(server, "late") == 9, "the deletion is known")
    store.faults = {}
    wait_until(lambda: result(server, "broken") == 31, "it is whole by now")


def without_the_store(moto: Moto, store: Faulty, folder: Path) -> None:
    """A service that starts without the store serves cached models and keeps trying the store."""
    put(moto, "new", 1, "1000")
    settings = {**only("add,late")}
    with service(store, folder, **settings) as server:
        assert result(server, "add") == 101
        wait_until(lambda: "reason" in index(server)["add"], "it is told")
        server.wait_log("not fetched: s3://models/prod")
        store.start()
        wait_until(lambda: "reason" not in index(server)["add"], "it was reached")
        assert server.control("load", "new") == (200, None)
        assert result(server, "new") == 1001
        assert set(index(server)) >= {"add", "late", "new", "broken"}
        store.faults = {"new/2/model.py": "truncate"}
        put(moto, "new", 2, "1")
        status, told = server.control("load", "new")
        assert status == 400
        assert "2/model.py" in told["error"]
        assert result(server, "new") == 1001
    assert SECRET not in server.log()


def test_an_endless_listing_does_not_take_all_memory(tmp_path: Path) -> None:
    """The store sends more than the fetcher's memory, and the model serves on."""
    store = StandIn("s3")
    store.objects = {
        "prod/add/config.pbtxt": CONFIG.encode(),
        "prod/add/1/model.py": (MODEL % 10).encode(),
    }
    settings = {"repository_cache_dir": tmp_path / "cache", "poll_interval_s": 0.3, **SMALL}
    settings |= {"model_control": "poll", "repository_silence_s": 5}
    with contextlib.closing(store), Server(store.url, store.environ(), **settings) as server:
        (pid,) = server.pids("fetcher")
        limit, _ = resource.prlimit(pid, resource.RLIMIT_DATA)
        assert limit == 2 << 30
        resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes(pid) + (200 << 20),) * 2)
        store.fault = endless
        wait_until(lambda: "reason" in index(server)["add"], "it is told")
        assert result(server, "add") == 11
        assert server.pids("fetcher") == [pid]
        store.fault = None
        wait_until(lambda: "reason" not in index(server)["add"], "the store is well again")


def data_bytes(pid: int) -> int:
    """Return the bytes of a process counted by RLIMIT_DATA."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def endless(what: str, _key: str, handler: BaseHTTPRequestHandler, answer: Answer) -> Answer | None:
    if what != "list":
        return answer
    begin(handler, (200, {"Content-Length": str(1 << 40)}, b""))
    for _ in range(4096):  # at most: until the fetcher hangs up
        handler.wfile.write(bytes(1 << 20))
    return None


def test_a_store_that_is_not_there(store: Faulty, tmp_path: Path) -> None:
    store.stop()
    with service(store, tmp_path, Starting) as server:
        wait_until(server.lives, "it lives")
        wait_until(lambda: b"the store" in not_ready(server), "it says why")
        assert b"it has not read its repository yet (s3://models/prod: " in not_ready(server)
        store.start()
        server.wait_ready()
        assert result(server, "add") == 101


def not_ready(server: RunningServer) -> bytes:
    status, _, body = server.request("GET", "/v2/health/ready")
    assert status == 503
    return body
