"""A distribution from outside adds a backend, a reader of folders, a route and a gRPC service."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from google.protobuf.wrappers_pb2 import DoubleValue

from tests.running_server import wait_until
from tests.servers import SMALL, Server, run_shmserve

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "polynomial"


def install(folder: Path, project: Path) -> Path:
    """Install the example as `pip install` would: its packages and the entry points of its table.

    Nothing is fetched or built, so the test needs neither a network nor a build backend.
    """
    table = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    packages = [path.parent for path in project.glob("*/__init__.py")]
    for package in packages:
        shutil.copytree(package, folder / package.name)
    return describe(folder, table["name"], table["version"], table["entry-points"])


def describe(folder: Path, name: str, version: str, points: dict[str, dict[str, str]]) -> Path:
    """Write what an installed distribution tells of itself."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (about / "METADATA").write_text(told)
    groups = [
        "\n".join([f"[{group}]", *(f"{point} = {target}" for point, target in entries.items())])
        for group, entries in points.items()
    ]
    (about / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("site"), EXAMPLE)


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[Server]:
    with Server(
        EXAMPLE / "models",
        {"PYTHONPATH": str(site), "SHMSERVE_POLYNOMIAL_LARGEST": "1000"},
        http_workers=1,
    ) as running:
        yield running


def infer(server: Server, model: str, values: list[float]) -> list[float]:
    tensor = {"name": "X", "datatype": "FP32", "shape": [len(values)], "data": values}
    status, answer = server.infer(model, {"inputs": [tensor]})
    assert status == 200, answer
    data: list[float] = answer["outputs"][0]["data"]
    return data


def test_its_reader_finds_models_and_its_backend_runs_them(server: Server) -> None:
    assert infer(server, "square", [1.0, 2.0, -3.0]) == [1.0, 4.0, 9.0]
    status, _, body = server.request("GET", "/v2/models/square/config")
    config = json.loads(body)
    assert (status, config["backend"]) == (200, "polynomial")
    assert config["default_model_filename"] == "coefficients.json"


def test_its_route_is_served_with_its_settings(server: Server) -> None:
    status, _, body = server.request("GET", "/polynomial/square?x=12")
    assert (status, json.loads(body)) == (200, {"y": 144.0})
    for query, why in (("x=two", "x must be a number"), ("x=1001", "polynomial_largest")):
        status, _, body = server.request("GET", f"/polynomial/square?{query}")
        assert status == 400
        assert why in json.loads(body)["error"]
    assert server.request("GET", "/polynomial/none?x=1")[0] == 404


def test_its_service_is_served(server: Server) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        ask = channel.unary_unary(
            "/example.Polynomial/Value",
            request_serializer=Struct.SerializeToString,
            response_deserializer=DoubleValue.FromString,
        )
        message = Struct()
        message.update({"model": "square", "x": 7})
        assert ask(message, timeout=60).value == 49
        with pytest.raises(grpc.RpcError) as told:
            ask(Struct(), timeout=60)
        assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_its_route_asks_for_the_secret_of_its_category(site: Path) -> None:
    with Server(
        EXAMPLE / "models",
        {"PYTHONPATH": str(site)},
        **SMALL,
        http_restricted_api="inference:x-key=secret",
    ) as running:
        assert running.request("GET", "/polynomial/square?x=2")[0] == 403
        fields = {"x-key": "secret"}
        status, _, body = running.request("GET", "/polynomial/square?x=2", headers=fields)
        assert (status, json.loads(body)) == (200, {"y": 4.0})


BLOCKING = """
import threading
import time

class Waiting:
    def __init__(self, dispatcher):
        self.dispatcher = dispatcher

    def on_get(self, req, resp):
        seconds = float(req.get_param("s"))
        print(f"begun {seconds}", flush=True)
        time.sleep(seconds)
        resp.media = {"models": sorted(self.dispatcher.snapshot().models)}

    def on_post(self, req, resp):
        time.sleep(0.1)
        resp.data = req.stream.read()

    def on_put(self, req, resp):
        resp.stream = self.pieces(req.stream)

    def on_delete(self, req, resp):
        raise OSError("a secret path")

    @staticmethod
    def pieces(body):
        try:
            while piece := body.read(100_000):
                time.sleep(0.3)
                yield piece[:10]
        finally:
            print("the stream is closed", flush=True)

class Here(Waiting):
    pass

def add_routes(routes, dispatcher, settings):
    def found(req, resp):
        time.sleep(float(req.get_param("s")))
        resp.text = "found"

    routes.add("inference", "/waiting", Waiting(dispatcher))
    routes.add("inference", "/here", Here(dispatcher), never_blocks=True)
    routes.add_behind("inference", lambda req: found if req.path == "/elsewhere" else None)

    def find_by_body(req):
        kind = req.stream.read(4) if req.path == "/by-body" else b""
        if kind != b"echo":
            return None

        def echo(req, resp):
            resp.text = f"{threading.current_thread() is threading.main_thread()} "
            resp.text += req.stream.read().decode()

        return echo

    routes.add_behind("inference", find_by_body)

def add_service(services, dispatcher, settings):
    def wait(data, context):
        time.sleep(float(data))
        return data

    def echo(requests, context):
        first = services.first(requests, context)
        yield threading.current_thread().name.encode()
        yield first
        for data in requests:
            time.sleep(float(data))
            yield data

    services.add("test.Waiting", {
        "Wait": services.unary("Wait", "inference", wait),
        "Echo": services.stream("Echo", "inference", echo),
        "Here": services.stream("Here", "inference", echo, never_blocks=True),
    })
"""


@pytest.fixture(scope="module")
def blocking(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with one worker and an extension whose routes block."""
    folder = tmp_path_factory.mktemp("blocking")
    (folder / "waiting_routes.py").write_text(BLOCKING)
    points = {"http_routes": "add_routes", "grpc_services": "add_service"}
    groups = {f"shmserve.{g}": {"waiting": f"waiting_routes:{p}"} for g, p in points.items()}
    describe(folder, "waiting-routes", "1", groups)
    with Server(
        EXAMPLE / "models",
        {"PYTHONPATH": f"{site}:{folder}"},
        http_workers=1,
        http_threads=2,
        request_timeout_s=2,
    ) as running:
        yield running


def test_a_route_that_blocks_keeps_nobody_else_waiting(blocking: Server) -> None:
    with ThreadPoolExecutor(4) as clients:
        for path in ("/waiting?s=1.5", "/elsewhere?s=1.5"):
            asked = [clients.submit(blocking.request, "GET", path) for _ in range(2)]
            answered = 0
            while not any(one.done() for one in asked):
                assert infer(blocking, "square", [3.0]) == [9.0]
                answered += 1
            assert answered > 1
            assert [one.result()[0] for one in asked] == [200, 200]
    status, _, body = blocking.request("GET", "/waiting?s=0")
    assert (status, json.loads(body)) == (200, {"models": ["square"]})


def test_requests_wait_a_bounded_time_for_a_thread(blocking: Server) -> None:
    with ThreadPoolExecutor(2) as clients:
        busy = [clients.submit(blocking.request, "GET", "/waiting?s=5") for _ in range(2)]
        wait_until(lambda: blocking.log().count("begun 5.0") == 2, "both run")
        status, fields, body = blocking.request("GET", "/waiting?s=0")
        assert (status, fields["retry-after"]) == (503, "1")
        assert "no thread was free for this call in 2 s (http_threads)" in body.decode()
        assert [one.result()[0] for one in busy] == [200, 200]


def test_bodies_streams_and_errors_of_routes_that_block(blocking: Server) -> None:
    data = bytes(range(256)) * 20_000
    for body, whole in ((data, data), (iter([data, data]), 2 * data)):  # the latter in chunks
        status, _, answer = blocking.request("POST", "/waiting", body)  # type: ignore[arg-type]
        assert (status, answer == whole) == (200, True)
    status, _, answer = blocking.request("PUT", "/waiting", data[:300_000])
    assert (status, answer) == (200, b"".join(data[n : n + 10] for n in (0, 100_000, 200_000)))
    wait_until(lambda: "the stream is closed" in blocking.log(), "its line of the log")
    status, _, answer = blocking.request("DELETE", "/waiting")
    assert (status, json.loads(answer)) == (500, {"error": "internal server error"})
    with ThreadPoolExecutor(1) as clients:  # while the next piece of a stream is delayed
        asked = clients.submit(blocking.request, "PUT", "/waiting", data[:1_000_000])
        while not asked.done():
            assert infer(blocking, "square", [3.0]) == [9.0]
        assert asked.result()[0] == 200


def test_clients_that_send_their_bodies_slowly_hold_no_threads(blocking: Server) -> None:
    head = b"POST /waiting HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nhello"
    with contextlib.ExitStack() as stack:
        slow = []
        for _ in range(4):  # twice as many calls as threads
            sock = stack.enter_context(
                socket.create_connection((blocking.http_host, blocking.http_port), 60)
            )
            sock.sendall(head)
            slow.append(sock)
        for _ in range(3):
            assert blocking.request("POST", "/waiting", b"body")[::2] == (200, b"body")
        for sock in slow:
            sock.sendall(b"world")
            answer = b""
            while not answer.endswith(b"helloworld"):
                piece = sock.recv(65536)
                assert piece
                answer += piece
            assert answer.startswith(b"HTTP/1.1 200")


def test_a_finder_may_read_the_body_beside_the_loop(blocking: Server) -> None:
    for rest in (b"small", b"x" * 3_000_000):
        head = b"POST /by-body HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        place = (blocking.http_host, blocking.http_port)
        with socket.create_connection(place, 60) as sock:
            sock.sendall(head % (4 + len(rest)))
            time.sleep(0.2)  # the finder waits for the body
            sock.sendall(b"echo" + rest)
            sock.shutdown(socket.SHUT_WR)
            answer = sock.makefile("rb").read()
        assert answer.endswith(b"\r\n\r\nFalse " + rest)
    assert blocking.request("POST", "/by-body", b"none")[0] == 404


def test_a_route_that_never_blocks_runs_on_the_loop(blocking: Server) -> None:
    status, _, answer = blocking.request("GET", "/here?s=0.01")
    assert (status, json.loads(answer)) == (200, {"models": ["square"]})
    assert blocking.request("POST", "/here", b"body")[2] == b"body"


def test_a_service_that_blocks_keeps_nobody_else_waiting(blocking: Server) -> None:
    with grpc.insecure_channel(blocking.grpc_address) as channel:
        wait, live = (
            channel.unary_unary(name)
            for name in ("/test.Waiting/Wait", "/inference.GRPCInferenceService/ServerLive")
        )
        echo, here = (channel.stream_stream(f"/test.Waiting/{name}") for name in ("Echo", "Here"))
        blocked = wait.future(b"1.5", timeout=60)
        stream = echo(iter([b"first", b"0.5", b"1"]), timeout=60)
        answered = 0
        while not blocked.done():
            live(b"", timeout=60)
            answered += 1
        assert (answered > 1, blocked.result()) == (True, b"1.5")
        thread, *echoed = stream
        assert (thread, echoed) == (b"beside", [b"first", b"0.5", b"1"])
        thread, *echoed = here(iter([b"first", b"0"]), timeout=60)
        assert (thread, echoed) == (b"http2", [b"first", b"0"])
        cut = echo(iter([b"x", b"30"]), timeout=0.5)  # the client's deadline ends the call
        with pytest.raises(grpc.RpcError, match="Deadline"):
            list(cut)


def test_without_it_the_models_are_not_known() -> None:
    done = check({})
    assert done.returncode == 1
    assert "square: config.pbtxt is missing" in done.stdout.replace("'", "").replace("model ", "")


def test_a_setting_that_no_extension_has_is_unknown(site: Path) -> None:
    assert check({"PYTHONPATH": str(site)}).returncode == 0
    done = check({"PYTHONPATH": str(site), "SHMSERVE_POLYNOMIAL_LEAST": "1"})
    assert "unknown setting SHMSERVE_POLYNOMIAL_LEAST" in done.stdout + done.stderr


def check(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    own = {"SHMSERVE_MODEL_REPOSITORY": str(EXAMPLE / "models"), "PATH": "/usr/bin"}
    return run_shmserve("check", environ=own | environ)


def test_the_document_shows_the_files_as_they_are() -> None:
    document = (ROOT / "docs" / "extending.md").read_text()
    shown = re.findall(r"<!-- file: (\S+) -->\n\n((?:    .*\n|\n)+)", document)
    assert len(shown) >= 4
    for name, block in shown:
        lines = [line.removeprefix("    ") for line in block.strip("\n").splitlines()]
        assert "\n".join(lines) + "\n" == (EXAMPLE / name).read_text(), name
