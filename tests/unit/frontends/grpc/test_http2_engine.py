"""The HTTP/2 engine alone: identity of callers, refusals, and shutdown."""

import gzip
import logging
import os
import threading
import time
import zlib
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.errors import InvalidArgument, ResourceExhausted, Unavailable
from shmserve.frontends.grpc import handlers
from shmserve.frontends.grpc.http2_engine import server_connection
from shmserve.frontends.grpc.http2_engine.engine import Http2Engine, caller_by_socket
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.frontends.grpc.http2_engine.message_compression import deflate, inflate
from shmserve.frontends.grpc.process.server import GrpcServer
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.heap_budget import BUDGET
from shmserve.frontends.http2.frames import ACK, END_STREAM, GOAWAY, HEADERS, PING
from shmserve.frontends.http2.grpc_framing import prefix
from tests import fake_models
from tests.grpc_client import Client, Rig, Sender, listen, request
from tests.raw_http2 import RawClient
from tests.running_server import WATCHDOG_S, wait_until


@pytest.fixture
def rig():
    with Rig(max_request_bytes=1 << 20) as rig:
        yield rig


@pytest.fixture
def raw(rig):
    return rig.raw()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_callers_are_known_by_their_socket(tmp_path, kind: str) -> None:
    callers: list[Caller] = []

    def find_caller(context: RpcContext) -> Caller:
        callers.append(caller_by_socket(context))
        return callers[-1]

    served = GrpcServer(fake_models.dispatcher(), Settings(), find_caller)  # type: ignore[arg-type]
    target = f"unix:{tmp_path}/s" if kind == "unix" else "127.0.0.1:0"
    target = listen(served, target)
    served.start()
    try:
        with Client(target) as client:
            client.call("SystemSharedMemoryStatus")
    finally:
        served.close()
    (seen,) = callers
    assert (seen.uid, seen.pid) == (os.geteuid(), os.getpid() if kind == "unix" else 0)


def test_without_memory_for_greenlets_the_server_fails_as_a_whole(monkeypatch, caplog) -> None:
    """Else calls would keep the places and slots of runs that never began."""

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("shmserve.frontends.hub.greenlet", no_memory)
    loop, failed = EventLoop(1), threading.Event()
    engine = Http2Engine({}, Settings(), loop)
    with caplog.at_level(logging.CRITICAL):
        engine.start(failed.set)
        loop.post(partial(loop.enter, print))
        assert failed.wait(WATCHDOG_S)
    assert "no memory is left for a greenlet" in caplog.text


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({":method": "GET"}, {":status": "405"}),
        ({"content-type": "application/grpcweb"}, {":status": "415"}),
        ({":path": "/nowhere"}, {"grpc-status": "12"}),
        ({"grpc-encoding": "snappy"}, {"grpc-status": "12"}),
        ({"grpc-timeout": "soon"}, {"grpc-status": "13"}),
        ({":authority": "rebound.example"}, {"grpc-status": "7"}),
        ({":authority": "rebound.example:8001"}, {"grpc-status": "7"}),
        ({":authority": "/"}, {"grpc-status": "3"}),
        ({":authority": ""}, {"grpc-status": "3"}),
    ],
)
def test_heads_that_are_refused(raw: RawClient, changed, expected) -> None:
    raw.call(b"", **changed)
    assert expected.items() <= raw.fields().items()


def test_blanks_around_values_are_no_part_of_them() -> None:
    """A real client sends blanks with metadata; a raw client also in gRPC's own fields."""
    with Rig(grpc_header_forward_pattern="^x-") as rig:
        rig.client.infer(metadata=(("x-user", " a b "),))
        noted = rig.dispatcher.calls[-1].request
        assert noted.parameters == {"x-user": "a b"}
        raw = rig.raw()
        raw.infer(
            request(), te=" trailers", content_type="\tapplication/grpc ", grpc_timeout=" 60S ",
            grpc_encoding="identity ",
        )  # fmt: skip
        assert raw.answers()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compressed_messages_are_bounded(raw: RawClient, encoding: str) -> None:
    message = request().SerializeToString()
    data = (gzip if encoding == "gzip" else zlib).compress(message)
    raw.call(prefix(len(data), compressed=True) + data, grpc_encoding=encoding)
    assert raw.answers()
    bomb = deflate(bytes(8 << 20), encoding)
    raw.call(prefix(len(bomb), compressed=True) + bomb, 3, grpc_encoding=encoding)
    assert raw.fields()["grpc-status"] == "8"


@pytest.mark.parametrize("changed", [{}, {"grpc_encoding": "identity"}])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_compressed_flag_without_an_encoding_is_an_error_of_the_protocol(raw, changed, size):
    raw.call(prefix(size, compressed=True) + b"x", **changed)
    fields = raw.fields()
    assert fields["grpc-status"] == "13"
    assert fields["grpc-message"] == "compressed flag set with identity or empty encoding"


def test_metadata_beyond_the_limit_are_refused_with_a_text(rig: Rig, raw: RawClient) -> None:
    raw.call(b"", x_long="y" * (16 << 10))
    fields = raw.fields()
    assert (fields[":status"], fields["grpc-status"]) == ("200", "8")
    assert "at most 16384 are taken" in fields["grpc-message"]
    raw.infer(request(), 3, x_long="y" * (15 << 10))
    assert raw.answers()
    code, details = rig.client.error("ModelInfer", request(), metadata=(("x", "y" * (17 << 10)),))
    assert (code, "at most 16384 are taken" in details) == ("RESOURCE_EXHAUSTED", True)


def test_a_client_that_may_not_send_is_not_too_slow() -> None:
    """The stream's rpc takes no message for longer than a message's bytes may take."""
    with Rig(body_timeout_s=2, min_bytes_per_s=1 << 30) as rig:
        gate = rig.hold()
        sender = Sender()
        call = rig.client.stream(sender)
        for _ in range(30):  # two windows of a stream
            sender.send(request(np.zeros(1 << 18, np.float32)))
        sender.close()
        time.sleep(3)
        gate.set()
        assert sum(1 for _ in call) == 30
        assert call.code() is grpc.StatusCode.OK


def test_inflating() -> None:
    heap = 7 << 20
    assert inflate(deflate(bytes(1000), "gzip"), "gzip", 1000, heap) == bytes(1000)
    assert inflate(deflate(bytes(1000), "deflate"), "deflate", 1000, heap) == bytes(1000)
    with pytest.raises(ResourceExhausted, match="999 bytes"):
        inflate(deflate(bytes(1000), "gzip"), "gzip", 999, heap)
    for bad, encoding in ((b"x", "gzip"), (b"", "deflate")):
        with pytest.raises(InvalidArgument):
            inflate(bad, encoding, 1000, heap)
    assert deflate(b"x", "gzip") == b"x"  # would be larger
    large = bytes(3 << 20)
    kept = [inflate(deflate(large, "gzip"), "gzip", 1 << 30, heap) for _ in range(3)]
    assert all(each == large for each in kept)
    assert BUDGET.used == 3 * (2 << 20), "one MiB of each is free"
    with pytest.raises(Unavailable, match="max_heap_bytes"):
        inflate(deflate(large, "gzip"), "gzip", 1 << 30, heap)
    kept.clear()
    assert BUDGET.used == 0
    for bad, reason in ((deflate(large, "gzip")[:-9], "cut off"), (large[:9], "not valid")):
        with pytest.raises(InvalidArgument, match=f"a message.* {reason}"):
            inflate(bad, "gzip", 1 << 30, heap)
    with pytest.raises(InvalidArgument, match="goes on after its gzip data"):
        inflate(deflate(large, "gzip") + b"x", "gzip", 1 << 30, heap)


def test_a_message_that_is_refused_while_it_is_inflated_leaves_no_memory() -> None:
    heap = 256 << 20
    bomb = deflate(bytes(heap + (8 << 20)), "gzip")
    before = private_bytes()
    with pytest.raises(Unavailable, match="max_heap_bytes") as refused:
        inflate(bomb, "gzip", 1 << 30, heap)
    assert private_bytes() - before < heap / 4, "the traceback keeps the message"
    assert BUDGET.used == 0
    assert refused.tb is not None


def private_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def test_a_deadline_is_kept_by_the_server_too(rig: Rig, raw: RawClient) -> None:
    gate = rig.hold()
    raw.infer(request(), grpc_timeout="100m")
    assert raw.fields()["grpc-status"] == "4"
    gate.set()
    wait_until(lambda: rig.served.busy == 0, "nothing is left")


def test_a_call_whose_message_never_ends_has_its_place_and_gives_it_back(monkeypatch) -> None:
    monkeypatch.setattr(handlers, "MESSAGE_TIMEOUT_S", 3)
    with Rig(grpc_max_calls=1) as rig:
        raw = rig.raw()
        raw.call(None)
        wait_until(lambda: rig.served.busy > 0, "it has its place")
        assert rig.client.error("ModelInfer", request())[0] == "RESOURCE_EXHAUSTED"
        wait_until(lambda: rig.served.busy == 0, "it is given up")
        assert rig.client.infer().outputs


def test_a_stop_says_goaway_and_finishes_what_runs(rig: Rig, raw: RawClient) -> None:
    gate = rig.hold()
    raw.infer(request())
    wait_until(lambda: bool(rig.dispatcher.calls), "it runs")
    rig.served.server.stop(WATCHDOG_S)
    frames = raw.frames()
    assert any(kind == GOAWAY for kind, *_ in frames)
    gate.set()
    assert any(kind == HEADERS and flags & END_STREAM for kind, flags, *_ in frames)


def test_after_a_drain_the_client_closes_first(rig: Rig, raw: RawClient, monkeypatch) -> None:
    monkeypatch.setattr(server_connection, "_CLOSES_FIRST_S", WATCHDOG_S)
    rig.served.server.stop(WATCHDOG_S)
    *_, goaway = raw.until(GOAWAY)
    assert goaway[8:] == b"the server is stopping"
    *_, leaving = raw.until(PING)
    raw.send(PING, ACK, 0, leaving)
    *_, goaway = raw.until(GOAWAY)
    assert goaway == bytes(8) + b"the server is stopping"
    raw.send(PING, 0, 0, bytes(8))
    assert raw.until(PING)[1:] == (ACK, 0, bytes(8)), "the connection is still open"
    raw.close()
    wait_until(lambda: not rig.served.server.connected, "it ends with the client's end")


def test_a_drained_connection_that_no_client_closes_ends(rig: Rig, raw: RawClient) -> None:
    rig.served.server.stop(WATCHDOG_S)
    *_, leaving = raw.until(PING)
    begun = time.monotonic()
    raw.send(PING, ACK, 0, leaving)
    assert [kind for kind, *_ in raw.frames()].count(GOAWAY) == 1
    assert 0.5 < time.monotonic() - begun < WATCHDOG_S / 2


def test_old_connections_are_asked_to_end() -> None:
    with Rig(grpc_max_connection_age_s=0.2) as rig:
        assert b"grpc_max_connection_age_s" in rig.raw().until(GOAWAY)[3]


def test_a_client_that_sends_faster_than_its_stream_is_served_waits() -> None:
    with Rig() as rig:
        gate = rig.hold()
        sender = Sender()
        call = rig.client.stream(sender)
        for _ in range(100):
            sender.send(request())
        gate.set()
        assert sum(1 for _ in zip(range(100), call, strict=False)) == 100
        sender.close()
        assert list(call) == []
        assert call.code() is grpc.StatusCode.OK
