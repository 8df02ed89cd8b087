"""A connection's beginning and end: what goes wrong with one costs the others nothing."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.executor.__main__ import Executor
from shmserve.frontends.grpc.http2_engine.engine import Http2Engine
from shmserve.frontends.http.server.connection import HttpConnection
from shmserve.frontends.http.server.worker import ConnectionWorker
from shmserve.protocol.control.link_messages import LaneOffered, LanesOpen
from tests.grpc_client import Rig


class Worker(SimpleNamespace):
    """As much of an HTTP worker as its acceptor sees; the first connection is one too many."""

    def __init__(self) -> None:
        super().__init__(alive=True, accepts=0, pauses=0, told=0)
        self.cfg, self.connections = SimpleNamespace(workers=1), {}
        self.hub = SimpleNamespace(wait=lambda *_: None, sleep=self.sleep)
        self.log = SimpleNamespace(exception=self.tell)

    def sleep(self, _: float) -> None:
        self.pauses += 1

    def tell(self, _: str) -> None:
        self.told += 1

    def _accept_some(self, *_: object) -> bool:
        self.accepts += 1
        if self.accepts == 1:
            raise RuntimeError("of one connection")
        self.alive = False
        return True


def test_an_http_worker_goes_on_accepting_a_little_later() -> None:
    worker: Any = Worker()
    with socket.socket() as listener:
        ConnectionWorker._accept_all(worker, listener, None)  # type: ignore[arg-type]
    assert (worker.accepts, worker.pauses, worker.told) == (2, 1, 1)


def test_a_grpc_connection_that_cannot_be_set_up_is_closed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connected = Http2Engine._connected

    def first_fails(engine: Http2Engine, *arguments: Any) -> None:
        monkeypatch.setattr(Http2Engine, "_connected", connected)
        raise RuntimeError("of one connection")

    with Rig(grpc_server="http2") as rig:
        monkeypatch.setattr(Http2Engine, "_connected", first_fails)
        host, _, port = rig.target.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as sock:
            assert sock.recv(1) == b"", "it has been closed"
        assert rig.client.infer().outputs


@pytest.mark.parametrize("lanes", [None, object()])
def test_a_lane_that_comes_without_its_descriptor_is_none(lanes: object) -> None:
    sent: list[LanesOpen] = []
    executor: Any = SimpleNamespace(lanes=lanes, link=SimpleNamespace(send=sent.append))
    Executor._on_lane(executor, LaneOffered(7, 1, 1), [])
    assert sent == [LanesOpen((7,), ended=True)], "the coordinator has counted it"


@pytest.mark.parametrize("lingers", [True, False])
def test_who_is_refused_while_it_still_sends_reads_why(lingers: bool) -> None:
    """Without lingering what it sends meets a closed socket: the connection is reset."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), 30)
        accepted, _ = listener.accept()

    def refuse() -> None:
        accepted.sendall(b"why")
        if lingers:
            HttpConnection._linger(SimpleNamespace(sock=accepted))  # type: ignore[arg-type]
        accepted.close()

    client.sendall(bytes(64 << 10))
    worker = threading.Thread(target=refuse)
    worker.start()
    if not lingers:
        worker.join()
    with client, pytest.raises(ConnectionError) if not lingers else contextlib.nullcontext():
        client.sendall(bytes(8 << 10))
        client.shutdown(socket.SHUT_WR)
        assert client.makefile("rb").read() == b"why"
    worker.join()
