"""The service of one node: obeys orders, and restarts when killed."""

import os
import shutil
import signal
import socketserver
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from shmserve.cluster import node_service
from shmserve.cluster.cluster_file import ClusterSettings
from shmserve.cluster.node_service import NodeReport, NodeService
from shmserve.errors import Unavailable
from tests.running_server import ROOT, segments_left, wait_until


@pytest.fixture
def node(tmp_path):
    for name in ("echo", "pair"):
        shutil.copytree(ROOT / "tests/repositories/basic" / name, tmp_path / name)
    (tmp_path / "broken/1").mkdir(parents=True)
    (tmp_path / "broken/1/model.py").write_text("import nothing_of_that_name\n")
    settings = ClusterSettings(
        service_model_repository=(str(tmp_path),),
        service_http_port=0,
        service_grpc_port=0,
        service_http_workers=1,
    )
    # a short path, because sockets in this folder need short paths
    with tempfile.TemporaryDirectory() as run_dir:
        service = NodeService(settings, "127.0.0.1", 100, f"{run_dir}/n")
        try:
            yield service
        finally:
            service.stop()
        assert os.listdir(run_dir) == []
    assert segments_left() == []


def wait_ready(node: NodeService, models: set[str]) -> NodeReport:
    reports: list[NodeReport] = []

    def is_ready() -> bool:
        reports.append(node.update(None))
        return reports[-1].look.ready == models

    wait_until(is_ready, f"{models} are not ready")
    return reports[-1]


def test_it_holds_what_it_is_told_and_comes_again(node: NodeService) -> None:
    wait_until(lambda: node.update(None).http is not None, "it is not up")
    assert node.update(None).look.held == frozenset(), "nothing without orders"
    wait_until(lambda: node.update(None).grpc is not None, "gRPC is not there")
    for nonsense in ("echo", 5, frozenset({1})):
        with pytest.raises(msgspec.ValidationError):
            node.update(nonsense)  # type: ignore[arg-type]
    node.update(frozenset({"echo", "pair"}))
    wait_ready(node, {"echo", "pair"})
    node.update(frozenset({"pair", "broken"}))
    report = wait_ready(node, {"pair"})
    wait_until(lambda: "broken" in node.update(None).look.failed, "it has no reason")
    assert "load broken" in node.update(None).look.failed["broken"]
    assert report.look.counts.keys() <= {"echo", "pair"}
    os.kill(report.pid, signal.SIGKILL)
    wait_until(lambda: node.update(None).launches > report.launches, "it is not started again")
    again = wait_ready(node, {"pair"})
    assert again.pid != report.pid
    node.stop()
    assert not Path(f"/proc/{again.pid}").exists()


def test_a_node_whose_service_does_not_come_up_has_no_room_and_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(node_service, "_ABSENT_S", 0.1)
    settings = ClusterSettings(service_config=str(tmp_path / "none.toml"))
    service = NodeService(settings, "127.0.0.1", 100, str(tmp_path / "run"))
    try:
        wait_until(lambda: service.update(frozenset({"echo"})).look.room == 0, "it has room")
        assert service._environment()["SHMSERVE_MAX_CALLER_SHARE"] == "1", "all come through one"
        wait_until(lambda: "status 2" in service.update(None).problem, "nothing is said")
    finally:
        service.stop()


class StubbornService(BaseHTTPRequestHandler):
    """A running service with a model that never obeys an order."""

    told: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("/index"):
            self._answer(200, b'[{"name": "old", "state": "READY"}]')
        else:
            self.told.append(self.path)
            self._answer(503, b"{")

    def do_GET(self) -> None:
        self._answer(200, b'{"model_stats": []}')

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass


def test_what_fails_is_tried_again_after_a_while(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(NodeService, "_keep_alive", lambda self: None)
    monkeypatch.setattr(node_service, "_LOOK_S", 0.2)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with socketserver.ThreadingUnixStreamServer(str(run_dir / "http.sock"), StubbornService) as up:
        thread = threading.Thread(target=up.serve_forever)
        thread.start()
        service = NodeService(ClusterSettings(), "127.0.0.1", 100, str(run_dir))
        begun = time.monotonic()
        service.update(frozenset())
        wait_until(lambda: len(StubbornService.told) >= 4, "it is not told again")
        passed = time.monotonic() - begun
        assert "unload old" in service.update(None).problem
        service.stop()
        up.shutdown()
        thread.join()
    assert passed >= 3 * 0.2, "a pause after each"
    with pytest.raises(Unavailable, match="was stopped"):
        service.update(None)
