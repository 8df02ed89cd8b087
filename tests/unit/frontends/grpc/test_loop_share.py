"""What runs on the loop of the HTTP/2 engine, when, and what becomes of calls without a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.errors import ResourceExhausted, Unavailable
from shmserve.frontends.grpc import client_deadlines, infer
from shmserve.frontends.grpc.call_turns import CallTurn, PoolSize
from shmserve.frontends.grpc.http2_engine.server_connection import ServerConnection
from shmserve.frontends.grpc.thread_pools import BoundedPool, Refusals, check_admitted
from shmserve.frontends.http2.frames import SETTINGS
from shmserve.frontends.http2.grpc_framing import prefix
from shmserve.testing.running_server import WATCHDOG_S, wait_until
from tests.grpc_client import Rig, request
from tests.raw_http2 import RawClient


@pytest.fixture(scope="module", params=["http2"])
def engine(request: pytest.FixtureRequest) -> str:
    """This one only."""
    Rig.engine = request.param
    return Rig.engine


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Threads by which messages were read, and where a receive of a connection was over."""
    found: list[str] = []
    parse, receive = infer.parse_request, ServerConnection._receive

    def parsed(*args: Any) -> Any:
        found.append(threading.current_thread().name)
        return parse(*args)

    def received(connection: ServerConnection) -> None:
        receive(connection)
        found.append("received")

    monkeypatch.setattr(infer, "parse_request", parsed)
    monkeypatch.setattr(ServerConnection, "_receive", received)
    return found


def typed(count: int) -> bytes:
    made = pb.ModelInferRequest(model_name="identity")
    made.inputs.add(name="INPUT0", datatype="FP32", shape=[count])
    made.inputs[0].contents.fp32_contents.extend([1.0] * count)
    return made.SerializeToString()


MESSAGES = {
    "raw": (request(np.zeros(15_000, np.float32)).SerializeToString(), True),
    "typed, few": (typed(100), True),
    "typed": (typed(1000), False),
    "parts": (b"\x0a\x08identity" + b"\x3a\x00" * 2000, False),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_loop_reads_what_is_quick_to_read(name: str, events: list[str]) -> None:
    message, on_loop = MESSAGES[name]
    assert len(message) < 64 << 10
    with Rig() as rig:
        if name == "parts":
            assert rig.client.error("ModelInfer", message)[0] == "INVALID_ARGUMENT"
        else:
            assert rig.client.infer(message).outputs
    (thread,) = [event for event in events if event != "received"]
    assert (thread == "http2") is on_loop


def test_what_is_known_is_not_walked_through_to_see_how_quick_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    walked: list[int] = []
    quick = infer.quick_to_read
    monkeypatch.setattr(
        infer, "quick_to_read", lambda data: walked.append(len(data)) or quick(data)
    )
    message = request(np.zeros(1000, np.float32)).SerializeToString()
    alike = request(np.zeros(1000, np.float32)).SerializeToString().replace(b"FP32", b"FP64")
    with Rig() as rig:
        for _ in range(3):
            assert rig.client.infer(message).outputs
        assert walked == [len(message)]
        assert rig.client.error("ModelInfer", alike)[0] == "INVALID_ARGUMENT"
    assert walked == [len(message), len(alike)]


def test_of_many_calls_that_come_together_one_runs_before_others_are_looked_at(
    events: list[str],
) -> None:
    with Rig() as rig:
        raw = RawClient(rig.target)
        raw.until(SETTINGS)  # its settings: from now on it is served
        whole, parts = raw.sock, []

        class Gathered:
            def sendall(self, data: bytes) -> None:
                parts.append(data)

        raw.sock = Gathered()  # type: ignore[assignment]
        data = request(id="of its own").SerializeToString()
        for stream in (1, 3, 5, 7):
            raw.call(prefix(len(data), False) + data, stream)
        raw.sock = whole
        del events[:]
        raw.sock.sendall(b"".join(parts))
        for _ in range(4):
            assert raw.fields()[":status"] == "200"
            assert raw.fields()["grpc-status"] == "0"
        raw.close()
    assert events[:5] == ["http2", "received", "http2", "http2", "http2"]


def test_a_defect_with_one_connection_keeps_no_other_from_its_time() -> None:
    class Defective:
        caller, due, touched, idle_since = 1, 0.0, True, float("inf")
        ticks = 0

        def look(self, now: float) -> None:
            pass

        def tick(self, now: float) -> None:
            self.ticks += 1
            raise OSError("a defect")

    with Rig() as rig:
        engine: Any = rig.served.server
        both = Defective(), Defective()
        for connection in both:
            engine._serving.connections.add(connection)
        engine._sweep(monotonic())
        for connection in both:
            engine._serving.connections.discard(connection)
    assert all(connection.ticks for connection in both)


# --------------------------------------------------------------- no thread left


@pytest.fixture
def pool() -> Iterator[BoundedPool]:
    refusals = Refusals()
    refusals.submit(int).result(WATCHDOG_S)
    pool = BoundedPool("p", PoolSize(1, 2), refusals, "full")
    yield pool
    pool.shutdown()
    refusals.shutdown()


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def turn(pool: BoundedPool, fn: Any, post: Any = None) -> CallTurn:
    return CallTurn("line", pool.place(1), fn, (), None, post, b"m")


def test_a_call_without_a_thread_is_refused_and_leaves_nothing(
    pool: BoundedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        for _ in range(5):
            refused = turn(pool, ran.set)
            with pytest.raises(Unavailable, match="no thread"):
                pool.queue(refused)
            pool.leave(refused.place)
            with pytest.raises(ResourceExhausted, match="no thread"):
                pool.submit(check_admitted).result(WATCHDOG_S)
    assert pool.count == 0
    assert not pool._subjects
    pool.queue(turn(pool, ran.set))
    assert ran.wait(WATCHDOG_S)


def test_a_call_whose_turn_comes_without_a_thread_waits_for_the_next_end(
    pool: BoundedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = threading.Event()
    first, second, third = turn(pool, int, print), turn(pool, ran.set), None
    assert pool.queue(first)
    assert not pool.queue(second)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        pool.run(first)
    assert pool.count == 1
    third = turn(pool, int, print)
    assert pool.queue(third)
    pool.run(third)
    assert ran.wait(WATCHDOG_S)


def test_a_call_that_had_no_thread_is_tried_again_though_no_other_ends(
    pool: BoundedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_deadlines, "_TICK_S", 0.05)
    ran, deadlines = threading.Event(), client_deadlines.ClientDeadlines()
    deadlines.start([pool])
    try:
        wait_until(lambda: deadlines._resting, "nobody is waited for")
        first = turn(pool, int, print)
        assert pool.queue(first)
        assert not pool.queue(turn(pool, ran.set))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            pool.run(first)
            assert not ran.wait(0.2)
        assert ran.wait(WATCHDOG_S)
    finally:
        deadlines.close()
    wait_until(lambda: pool.count == 0, "its place is free")
    assert not pool.starved


def test_a_client_is_told_that_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with Rig() as rig:
        assert rig.client.infer().outputs
        start = threading.Thread.start

        def only_ours(thread: threading.Thread) -> None:
            if thread.name.startswith(("infer", "stream")):
                no_thread(thread)
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", only_ours)
            code, details = rig.client.error("ModelInfer", typed(1000))
            assert (code, "no thread" in details) == ("UNAVAILABLE", True)
            with pytest.raises(Exception, match="no thread"):
                next(rig.client.stream([request()]))
        assert rig.client.infer(typed(1000)).outputs
        assert next(rig.client.stream([request()])).infer_response.outputs
