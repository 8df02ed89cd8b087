"""The service of one node: it does as it is told, and comes again when it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.cluster import node_service
from shmserve.cluster.cluster_file import ClusterSettings
from shmserve.cluster.node_service import NodeReport, NodeService
from shmserve.testing.running_server import ROOT, segments_left, wait_until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeService]:
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
    with tempfile.TemporaryDirectory() as run_dir:  # a short path, for the sockets in it
        service = NodeService(settings, "127.0.0.1", 100, run_dir)
        try:
            yield service
        finally:
            service.stop()
    assert segments_left() == []


def wait_ready(node: NodeService, models: set[str]) -> NodeReport:
    wait_until(lambda: node.update(None).look.ready == models, f"{models} are not ready")
    return node.update(None)


def test_it_holds_what_it_is_told_and_comes_again(node: NodeService) -> None:
    wait_until(lambda: node.update(None).http is not None, "it is not up")
    assert node.update(None).look.held == frozenset(), "nothing without orders"
    wait_until(lambda: node.update(None).grpc is not None, "gRPC is not there")
    node.update(frozenset({"echo", "pair"}))
    wait_ready(node, {"echo", "pair"})
    node.update(frozenset({"pair", "broken"}))
    report = wait_ready(node, {"pair"})
    wait_until(lambda: "broken" in node.update(None).look.failed, "it has no reason")
    assert "load broken" in node.update(None).look.failed["broken"]
    assert report.look.counts.keys() <= {"echo", "pair"}
    os.kill(report.pid, signal.SIGKILL)
    wait_until(lambda: node.update(None).launches == 2, "it is not started again")
    again = wait_ready(node, {"pair"})
    assert again.pid != report.pid
    node.stop()
    assert not Path(f"/proc/{again.pid}").exists()


def test_a_node_whose_service_does_not_come_up_has_no_room_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_service, "_ABSENT_S", 0.1)
    settings = ClusterSettings(service_config=str(tmp_path / "none.toml"))
    service = NodeService(settings, "127.0.0.1", 100, str(tmp_path / "run"))
    try:
        wait_until(lambda: service.update(frozenset({"echo"})).look.room == 0, "it has room")
        wait_until(lambda: "status 2" in service.update(None).problem, "nothing is said")
    finally:
        service.stop()
