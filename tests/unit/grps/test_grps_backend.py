"""GRPS projects in their backend, without an executor."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve._generated import grps_pb2
from shmserve.errors import ConfigError, ShmserveError
from shmserve.executor import custom_metrics
from shmserve.executor.backend import Response
from shmserve.grps.executor import torch_inferer
from shmserve.grps.protocol import custom_http
from shmserve.grps.protocol.custom_http import HttpAnswer, RequestHead
from tests import backend_runner
from tests.unit.grps.models_of_grps import arrays

PROJECTS = Path(__file__).parents[2] / "repositories" / "grps"


class Stream:
    """A request of a client that reads every response."""

    def __init__(self, parameters: dict[str, Any], **inputs: bytes) -> None:
        names = ("grps", "http", "http_body")
        self.request = backend_runner.FakeBackendRequest(names, parameters, **arrays(inputs))
        self.request.responses = self  # type: ignore[assignment]
        self._sent: queue.Queue[tuple[Response | None, bool]] = queue.Queue()

    def send(self, response: Response | None, final: bool = False) -> None:
        self._sent.put((response, final))

    def abandoned(self) -> None:
        raise AssertionError("the stream was let go of")

    def all(self) -> list[Response]:
        """Return every response, and check that nothing follows the final response."""
        found: list[Response] = []
        while True:
            response, final = self._sent.get(timeout=30)
            if response is not None:
                found.append(response)
            if final:
                assert self._sent.empty()
                return found


class Project:
    """A loaded project."""

    def __init__(self, name: str | Path) -> None:
        self.backend, self.spec = backend_runner.load(str(PROJECTS / name))

    def start(self, stream: Stream) -> Stream:
        assert list(self.backend.execute([stream.request])) == []
        return stream

    def stream(self, text: str, model: str = "") -> list[Any]:
        """Texts of a stream's messages; an error as the error."""
        sent = _wire(str_data=text, model=model)
        stream = self.start(Stream({"grps_streaming": True}, grps=sent))
        return [r.error or _message(r).str_data for r in stream.all()]

    def ask(self, **fields: Any) -> Any:
        """The answer to a message."""
        (response,) = self.start(Stream({}, grps=_wire(**fields))).all()
        return _message(response)

    def http(
        self, method: str = "POST", body: bytes = b"", streaming: bool = False, **head: Any
    ) -> list[tuple[HttpAnswer | None, bytes]]:
        headers = (("Content-Type", "application/json"), ("User-Agent", "me"))
        request = RequestHead(method, "/v1/chat/completions", headers=headers, **head)
        told = {"http": custom_http.encode(request), "http_body": body}
        stream = Stream({"grps_streaming": streaming}, **told)
        return [_part(response) for response in self.start(stream).all()]


def _wire(**fields: Any) -> bytes:
    return grps_pb2.GrpsMessage(**fields).SerializeToString()


def _message(response: Response) -> Any:
    if response.error is not None:
        raise response.error
    (output,) = response.outputs
    assert (output.name, output.datatype) == ("grps", "UINT8")
    return grps_pb2.GrpsMessage.FromString(output.array.tobytes())


def _part(response: Response) -> tuple[HttpAnswer | None, bytes]:
    if response.error is not None:
        raise response.error
    outputs = {output.name: output.array.tobytes() for output in response.outputs}
    head = custom_http.decode_answer(outputs["http"]) if "http" in outputs else None
    return head, outputs["http_body"]


Load = Callable[[str | Path], Project]


@pytest.fixture
def load(monkeypatch):
    """Load projects; changes to the process are undone afterwards."""
    monkeypatch.chdir(os.getcwd())
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)

    def loader(name: str | Path) -> Project:
        for module in [m for m in sys.modules if m.partition(".")[0] in ("src", "grps_framework")]:
            del sys.modules[module]
        project = Project(name)
        ends.callback(project.backend.close)
        return project

    with contextlib.ExitStack() as ends:
        yield loader


def test_a_project_echoes_every_kind_of_message(load: Load) -> None:
    project = load("echo")
    answer = project.ask(str_data="hi")
    assert answer.str_data == "hi!"
    assert (answer.status.code, answer.status.msg) == (200, "OK")
    assert answer.status.status == grps_pb2.Status.SUCCESS
    assert project.ask(str_data="greet").str_data == "hello!"
    assert project.ask(bin_data=b"\0\1").bin_data == b"\0\1"
    tensor = {"name": "x", "dtype": "DT_INT64", "shape": [2], "flat_int64": [1, -1]}
    tensors = grps_pb2.GenericTensorData(tensors=[tensor])
    assert project.ask(gtensors=tensors).gtensors == tensors
    mapped = grps_pb2.GenericMapData(s_b={"k": b"v"})
    assert project.ask(gmap=mapped).gmap == mapped


def test_the_model_may_be_named_and_other_names_are_the_workers(load: Load) -> None:
    ask = load("chain").ask
    assert ask(str_data="x", model="first-1.0.0").str_data == "xa"
    assert ask(str_data="x", model="second-1.0.0").str_data == "xb/1"
    assert ask(str_data="x", model="chain").str_data == "xab/1"


def test_a_stream_arrives_whole_and_in_order(load: Load) -> None:
    project = load("echo")
    words = [str(number) for number in range(100)]
    assert project.stream(" ".join(words)) == [f"{word}!" for word in words]
    assert project.stream("") == []
    assert project.stream("a done b") == ["a!", "done"]
    stream = Stream({"grps_streaming": True}, grps=_wire(str_data="tensor"))
    (response,) = project.start(stream).all()
    assert _message(response).gtensors.tensors[0].flat_float32 == [1.5, 2.5]
    assert _message(response).status.msg == "OK"


@pytest.mark.parametrize(
    ("text", "sent", "error"),
    [
        ("a b raise c", ["a!", "b!"], "the stream broke"),
        ("a stop", ["a!"], "the stream was stopped"),
    ],
)
def test_an_error_follows_what_was_sent(load: Load, text: str, sent: list[str], error: str) -> None:
    *before, last = load("echo").stream(text)
    assert before == sent
    assert isinstance(last, ShmserveError)
    assert last.message == error


def test_errors_are_short_for_clients_and_whole_in_the_log(load: Load, caplog) -> None:
    project = load("echo")
    with pytest.raises(ShmserveError, match="cannot echo this, see <path>") as caught:
        project.ask(str_data="raise")
    assert caught.value.http_status == 500
    assert "customized_inferer.py" in caplog.text
    with pytest.raises(ShmserveError, match=r"^bad words are not echoed$"):
        project.ask(str_data="bad")
    (response,) = project.start(Stream({}, grps=b"\xff\xff")).all()
    assert backend_runner.failure(response).message == "the request is no GrpsMessage"


def test_nobody_is_asked_for_an_answer_that_nobody_wants(load: Load) -> None:
    stream = Stream({}, grps=b"")
    stream.request.cancelled = True
    before = custom_metrics.registry.values.snapshot().get("echoed", {"total": 0})["total"]
    assert load("echo").start(stream).all() == []
    assert custom_metrics.registry.values.snapshot().get("echoed", {"total": 0})["total"] == before


def full_batches(root: Path) -> Path:
    """Copy the project `chain`; its batches of four wait until they are full."""
    shutil.copytree(PROJECTS / "chain", root)
    file = root / "conf/inference.yml"
    file.write_text(
        file.read_text().replace("batch_timeout_us: 500000", "batch_timeout_us: 30000000")
    )
    return root


def test_requests_run_side_by_side_and_in_batches(load: Load, tmp_path) -> None:
    project = load(full_batches(tmp_path / "p"))
    streams = [project.start(Stream({}, grps=_wire(str_data=f"{i}"))) for i in range(4)]
    texts = [_message(stream.all()[0]).str_data for stream in streams]
    assert texts == [f"{i}ab/4" for i in range(4)]


def test_an_error_of_a_batch_is_everybodys(load: Load, tmp_path) -> None:
    project = load(full_batches(tmp_path / "p"))
    wire = [_wire(str_data=text) for text in ("poison", "x", "y", "z")]
    for stream in [project.start(Stream({}, grps=data)) for data in wire]:
        (response,) = stream.all()
        assert backend_runner.failure(response).message == "the batch failed"
    with pytest.raises(ShmserveError, match="the first model failed"):
        project.ask(str_data="fail")


def test_custom_http(load: Load) -> None:
    project = load("chat")
    ((head, body),) = project.http(body=b'{"prompt": "a b"}')
    assert head == HttpAnswer(200, (("Content-Type", "text/plain"),))
    assert body == b'{"words": ["a", "b"], "type": "application/json"}'
    ((head, body),) = project.http("GET", query=(("say", "hi"),))
    assert head == HttpAnswer(203, (("Content-Type", "text/weird"), ("X-Agent", "me")))
    assert body == b"hi"
    ((head, body),) = project.http(body=b'{"silent": true}')
    assert head == HttpAnswer(200, (("Content-Type", "text/plain"),))
    assert body == b""


def test_custom_http_streams_from_a_thread_of_the_models_own(load: Load) -> None:
    parts = load("chat").http(body=b'{"prompt": "a b c"}', streaming=True)
    heads = [head for head, _ in parts]
    assert heads == [HttpAnswer(200, (("Content-Type", "text/event-stream"),)), None, None]
    assert [body for _, body in parts] == [b"data: a\n\n", b"data: b\n\n", b"data: c\n\n"]


def test_custom_http_errors(load: Load) -> None:
    project = load("chat")
    with pytest.raises(ShmserveError, match="no chat today"):
        project.http(body=b'{"fail": true}')
    with pytest.raises(ShmserveError, match="body is not JSON") as caught:
        project.http(body=b"{")
    assert caught.value.http_status == 400


def test_values_of_the_models_own_are_kept(load: Load) -> None:
    project = load("echo")
    before = custom_metrics.registry.values.snapshot().get("echoed", {"total": 0})["total"]
    project.ask(str_data="hi")
    assert custom_metrics.registry.values.snapshot()["echoed"]["total"] == before + 1


def test_what_server_yml_says_in_vain_is_logged(load: Load, caplog) -> None:
    caplog.set_level(logging.INFO)
    load("echo")
    assert "interface.port is not used; the settings are http_bind" in caplog.text
    assert f"loaded for cpu in {PROJECTS / 'echo'}" in caplog.text


CODE = """
from grps_framework.model_infer.inferer import ModelInferer, inferer_register
class Mine(ModelInferer):
    def init(self, path, device=None, args=None):
        super().init(path, device, args)
    def load(self):
        %s
    def infer(self, inp, context):
        return %s
inferer_register.register("chat", Mine())
"""


def write(root: Path, load: str = "return True", result: str = "inp", more: str = "") -> Path:
    """Write a project with a custom inferer."""
    (root / "conf").mkdir(parents=True)
    (root / "src").mkdir()
    inference = (PROJECTS / "chat/conf/inference.yml").read_text()
    (root / "conf/inference.yml").write_text(inference)
    (root / "src/customized_inferer.py").write_text(more + CODE % (load, result))
    return root


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"load": "return False"}, "its inferer's load gave False"),
        ({"load": "raise OSError('no weights in /srv/x')"}, "no weights in <path>"),
        ({"more": "import sys; sys.exit(3)\n"}, "SystemExit: 3"),
        (
            {"more": "from grps_framework.model_infer.tf_inferer import TfModelInferer\n"},
            "TensorFlow models of GRPS projects are not supported",
        ),
        ({"more": "import grps_framework.nothing\n"}, "No module named"),
    ],
)
def test_a_project_that_does_not_load(load: Load, tmp_path, parts, text) -> None:
    with pytest.raises(ShmserveError, match=text):
        load(write(tmp_path / "p", **parts))
    assert not list(tmp_path.rglob("__pycache__"))


def test_a_name_that_nobody_registered(load: Load, tmp_path) -> None:
    root = write(tmp_path / "p")
    file = root / "conf/inference.yml"
    file.write_text(file.read_text().replace("inferer_name: chat", "inferer_name: other"))
    with pytest.raises(ShmserveError, match="inferer_name 'other' is not registered"):
        load(root)


def test_no_more_run_at_a_time_than_the_project_wants(load: Load, tmp_path, monkeypatch) -> None:
    running: list[int] = []
    most: list[int] = []
    gate = threading.Semaphore(0)

    def enter(message: Any) -> Any:
        running.append(1)
        most.append(len(running))
        gate.acquire(timeout=30)
        running.pop()
        return message

    monkeypatch.setattr(sys, "enter_test", enter, raising=False)
    root = write(tmp_path / "p", result="__import__('sys').enter_test(inp)")
    (root / "conf/server.yml").write_text("max_concurrency: 2")
    project = load(root)
    streams = [Stream({}, grps=b"") for _ in range(5)]
    feeder = threading.Thread(target=lambda: [project.start(stream) for stream in streams])
    feeder.start()
    streams[4].request.cancelled = True  # before its turn comes
    gate.release(5)
    feeder.join()
    assert [len(stream.all()) for stream in streams] == [1, 1, 1, 1, 0]
    assert max(most) <= 2


def test_an_answer_that_is_no_message(load: Load, tmp_path) -> None:
    project = load(write(tmp_path / "p", result="{}"))
    with pytest.raises(ShmserveError, match=r"^Output type must be GrpsMessage\.$"):
        project.ask()


def test_devices_of_projects_are_the_services(monkeypatch) -> None:
    seen = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    monkeypatch.setattr(torch_inferer, "import_torch", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for told, device in (("cpu", "cpu"), ("cuda", "cuda:0"), ("gpu:1", "cuda:1")):
        assert torch_inferer.device_of(told) == device
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a")  # the executor's own, the service's second
    assert torch_inferer.device_of("cuda:1") == "cuda:0"
    for told in ("cuda:x", "tpu"):
        with pytest.raises(ConfigError, match=f"device '{told}' is not cpu, cuda"):
            torch_inferer.device_of(told)
