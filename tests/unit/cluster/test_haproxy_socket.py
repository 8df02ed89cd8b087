"""A real HAProxy with the configuration that is made for it, told what to route where."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.cluster import haproxy_config
from shmserve.cluster.cluster_file import ClusterFile, ClusterSettings, ModelTable
from shmserve.cluster.haproxy_slots import Address, slots
from shmserve.cluster.haproxy_socket import Balancer
from shmserve.errors import Unavailable
from shmserve.testing.running_server import free_port, wait_until

pytestmark = pytest.mark.needs("haproxy")


@pytest.fixture
def balancer(tmp_path: Path) -> Iterator[Balancer]:
    settings = ClusterSettings(
        haproxy_sockets=(str(tmp_path / "h.sock"),),
        haproxy_slots=3,
        haproxy_http_bind=f"127.0.0.1:{free_port()}",
        haproxy_grpc_bind=f"127.0.0.1:{free_port()}",
    )
    file = ClusterFile(settings, {"digits": ModelTable(1), "a.b-c_D": ModelTable(1)})
    (tmp_path / "haproxy.cfg").write_text(haproxy_config.text(file))
    process = subprocess.Popen(
        ["haproxy", "-db", "-q", "-f", str(tmp_path / "haproxy.cfg")],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until((tmp_path / "h.sock").exists, "the balancer has no socket")
        yield Balancer(str(tmp_path / "h.sock"))
    finally:
        process.terminate()
        process.wait(20)


def taken(balancer: Balancer, backend: str) -> dict[tuple[str, int], int]:
    found = slots(balancer.ask(["show servers state"]))
    return {(s.host, s.port): s.weight for s in found if s.taken and s.backend == backend}


def test_servers_come_change_and_go(balancer: Balancer) -> None:
    name = "grpc_model_a.b-c_D"
    one, two = Address("127.0.0.2", 8001, 8000), Address("127.0.0.3", 8001, 8000)
    assert taken(balancer, name) == {}
    assert balancer.route({name: {one: 256, two: 7}}) > 0
    assert taken(balancer, name) == {("127.0.0.2", 8001): 256, ("127.0.0.3", 8001): 7}
    assert balancer.route({name: {one: 256, two: 7}}) == 0, "all is as it should be"
    assert balancer.route({name: {one: 256, two: 8}}) == 1
    balancer.route({name: {two: 8}})
    assert taken(balancer, name) == {("127.0.0.3", 8001): 8}
    assert taken(balancer, "http_model_digits") == {}


def test_what_it_has_no_place_for_is_told(
    balancer: Balancer, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = {Address(f"127.0.0.{i}", 80, 80): 1 for i in range(2, 7)}
    balancer.route({"http_model_digits": nodes, "http_model_other": {}})
    assert "backend http_model_digits: 2 nodes more than it has slots" in caplog.text
    assert "it has no backend http_model_other" in caplog.text
    assert len(taken(balancer, "http_model_digits")) == 3


def test_one_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"balancer .*none\.sock: No such file"):
        Balancer(str(tmp_path / "none.sock")).route({})
    with pytest.raises(Unavailable, match=r"balancer 127\.0\.0\.1:1: "):
        Balancer("127.0.0.1:1").route({})
