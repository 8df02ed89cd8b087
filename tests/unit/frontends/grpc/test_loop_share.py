"""Work on the loop of the HTTP/2 engine, and when the work is done."""

import threading
from time import monotonic
from typing import Any

import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.frontends.grpc.http2_engine.server_connection import ServerConnection
from shmserve.frontends.grpc.inference import model_infer
from shmserve.frontends.http2.frames import SETTINGS
from tests.grpc_client import Rig, request


@pytest.fixture
def events(monkeypatch):
    """Threads by which messages were read, and where a receive of a connection was over."""
    found: list[str] = []
    parse, receive = model_infer.parse_request, ServerConnection._receive  # type: ignore[attr-defined]

    def parsed(*args: Any) -> Any:
        found.append(threading.current_thread().name)
        return parse(*args)

    def received(connection: ServerConnection) -> None:
        receive(connection)
        found.append("received")

    monkeypatch.setattr(model_infer, "parse_request", parsed)
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


def test_what_is_known_is_not_walked_through_to_see_how_quick_it_is(monkeypatch) -> None:
    walked: list[int] = []
    quick = model_infer.quick_to_read  # type: ignore[attr-defined]
    monkeypatch.setattr(
        model_infer, "quick_to_read", lambda data: walked.append(len(data)) or quick(data)
    )
    message = request(np.zeros(1000, np.float32)).SerializeToString()
    alike = request(np.zeros(1000, np.float32)).SerializeToString().replace(b"FP32", b"FP64")
    with Rig() as rig:
        for _ in range(3):
            assert rig.client.infer(message).outputs
        assert walked == [len(message)]
        assert rig.client.error("ModelInfer", alike)[0] == "INVALID_ARGUMENT"
    assert walked == [len(message), len(alike)]


def test_of_many_calls_that_come_together_one_runs_before_others_are_looked_at(events) -> None:
    with Rig() as rig:
        raw = rig.raw()
        raw.until(SETTINGS)  # the server's settings: from now on the connection is served
        whole, parts = raw.sock, []

        class Gathered:
            def sendall(self, data: bytes) -> None:
                parts.append(data)

        raw.sock = Gathered()  # type: ignore[assignment]
        for stream in (1, 3, 5, 7):
            raw.infer(request(id="of its own"), stream)
        raw.sock = whole
        del events[:]
        raw.sock.sendall(b"".join(parts))
        assert all(raw.answers() for _ in range(4))
    begun = events.index("http2")  # what the client sent before may be received until then
    assert events[begun : begun + 5] == ["http2", "received", "http2", "http2", "http2"]


def test_a_defect_with_one_connection_keeps_no_other_from_its_time() -> None:
    class Defective:
        due, touched, idle_since = 0.0, True, float("inf")
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
            engine._serving.connections.add(connection, 1)
        engine._sweep(monotonic())
        for connection in both:
            engine._serving.connections.discard(connection)
    assert all(connection.ticks for connection in both)
