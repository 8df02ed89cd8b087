"""A real HAProxy with the generated configuration, and routes set at run time."""

import http.client
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shmserve.cluster import haproxy_config, haproxy_socket
from shmserve.cluster.cluster_file import ClusterFile, ClusterSettings, ModelTable
from shmserve.cluster.haproxy_slots import Address, slots
from shmserve.cluster.haproxy_socket import Balancer
from shmserve.errors import Unavailable
from tests.running_server import free_port, wait_until

pytestmark = pytest.mark.needs("haproxy")


@pytest.fixture
def settings(tmp_path):
    return ClusterSettings(
        haproxy_sockets=(str(tmp_path / "h.sock"),),
        haproxy_slots=3,
        haproxy_check_s=0.05,
        haproxy_http_bind=f"127.0.0.1:{free_port()}",
        haproxy_grpc_bind=f"127.0.0.1:{free_port()}",
    )


@pytest.fixture
def balancer(tmp_path, settings):
    file = ClusterFile(settings, {"digits": ModelTable(1), "a.b-c_D": ModelTable(1)})
    (tmp_path / "haproxy.cfg").write_text(haproxy_config.text(file))
    process = subprocess.Popen(
        ["haproxy", "-db", "-q", "-f", str(tmp_path / "haproxy.cfg")],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    made = Balancer(str(tmp_path / "h.sock"))

    def answers() -> bool:
        try:
            return bool(made.ask(["show info"]))
        except Unavailable:  # HAProxy makes the socket's file before listening
            return False

    try:
        wait_until(answers, "the balancer does not answer")
        yield made
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
    assert balancer.route({name: {one: 256, two: 7}})[0] > 0
    assert taken(balancer, name) == {("127.0.0.2", 8001): 256, ("127.0.0.3", 8001): 7}
    assert balancer.route({name: {one: 256, two: 7}}) == (0, []), "all is as it should be"
    assert balancer.route({name: {one: 256, two: 8}}) == (1, [])
    balancer.route({name: {two: 8}})
    assert taken(balancer, name) == {("127.0.0.3", 8001): 8}
    assert taken(balancer, "http_model_digits") == {}


def test_what_it_has_no_place_for_is_told(balancer: Balancer) -> None:
    nodes = {Address(f"127.0.0.{i}", 80, 80): 1 for i in range(2, 7)}
    assert balancer.route({"http_model_digits": nodes, "http_model_other": {}})[1] == [
        "backend http_model_digits: 2 slots are missing (haproxy_slots)",
        "it has no backend http_model_other",
    ]
    assert len(taken(balancer, "http_model_digits")) == 3


def test_what_it_refuses_is_told_in_its_words(balancer: Balancer) -> None:
    _, problems = balancer.route({"http_model_digits": {Address("127.0.0.2", 80, 80): 300}})
    assert problems == ["Absolute weight can only be between 0 and 256 inclusive."]


def test_one_that_says_nothing_is_a_problem_and_holds_nobody_up(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(haproxy_socket, "_TIMEOUT_S", 0.3)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "h.sock"))
        silent.listen(8)
        told = Balancer(str(tmp_path / "h.sock"))
        told.start()
        told.tell({})
        wait_until(lambda: told.problems != (), "nobody knows")
        told.stop()
        assert "timed out" in told.problems[0]


def test_one_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(Unavailable, match=r"balancer .*none\.sock: No such file"):
        Balancer(str(tmp_path / "none.sock")).route({})
    with pytest.raises(Unavailable, match=r"balancer 127\.0\.0\.1:1: "):
        Balancer("127.0.0.1:1").route({})


class Checked(BaseHTTPRequestHandler):
    """A service that answers HTTP/1.1 checks, and nothing else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_each_server_of_a_model_is_checked_by_http(balancer: Balancer, door: str) -> None:
    """HAProxy 2.6 obeyed `check-proto` of a server-template for the first server only."""
    name = f"{door}_model_digits"
    with served(Checked) as one, served(Checked) as two:
        grpc = {Address("127.0.0.1", 1, one.server_port), Address("127.0.0.1", 2, two.server_port)}
        balancer.route({name: dict.fromkeys(grpc, 1)})
        wait_until(lambda: states(balancer, name) == ["UP", "UP", "MAINT"], "not both are up")


def states(balancer: Balancer, backend: str) -> list[str]:
    """Return the states of the servers of a backend, once their checks have ended."""
    lines = balancer.ask(["show stat"]).lstrip("# \n").splitlines()
    names = lines[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=False)) for line in lines[1:] if line]
    servers = [row for row in rows if row["pxname"] == backend and row["svname"] != "BACKEND"]
    return [row["status"] if row["check_status"] else "MAINT" for row in servers]


class OneModel(BaseHTTPRequestHandler):
    """A service's model: it is ready until its only request has begun, which waits to be let go."""

    begun, not_ready_seen, may_end = threading.Event(), threading.Semaphore(0), threading.Event()

    def do_GET(self) -> None:
        ready = not self.begun.is_set()
        self.send_response(200 if ready else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()
        if not ready:
            self.not_ready_seen.release()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.begun.set()
        self.may_end.wait(60)
        self.send_response(200)
        self.send_header("Content-Length", "4")
        self.end_headers()
        self.wfile.write(b"done")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    """Run an HTTP server on a free port of 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def one_model() -> Iterator[Address]:
    OneModel.begun.clear()
    OneModel.may_end.clear()
    with served(OneModel) as server:
        try:
            yield Address("127.0.0.1", server.server_port, server.server_port)
        finally:
            OneModel.may_end.set()


@pytest.mark.parametrize("path", ["/v2/models/digits/infer", "/models/digits"])
def test_who_goes_ends_the_request_it_has_when_its_model_is_not_ready_any_more(
    settings, balancer, path
):
    name = "http_model_digits"
    with one_model() as address:
        balancer.route({name: {address: 1}})
        host, _, port = settings.haproxy_http_bind.rpartition(":")
        client = http.client.HTTPConnection(host, int(port), timeout=60)
        client.request("POST", path, b"{}")
        assert OneModel.begun.wait(60)
        balancer.route({name: {}})
        for _ in range(6):  # checks: `fall` of them and more
            assert OneModel.not_ready_seen.acquire(timeout=60)
        OneModel.may_end.set()
        response = client.getresponse()
        assert (response.status, response.read()) == (200, b"done")
        client.close()
