"""Misuse of connections by clients of the HTTP/2 engine, and the effect on other connections."""

import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.frontends.caller_numbers import of_host
from shmserve.frontends.connections import open_connections
from shmserve.frontends.grpc import handlers
from shmserve.frontends.heap_budget import BUDGET, FREE
from shmserve.frontends.http2 import frames as f
from shmserve.frontends.http2.grpc_framing import prefix
from tests.grpc_client import PREFIX, Client, Rig, request
from tests.no_descriptors import no_descriptors
from tests.raw_http2 import RawClient, framed
from tests.running_server import WATCHDOG_S, wait_until

LARGE = np.zeros(50_000, np.float32)  # a tensor that gets a slot


def farewell(raw: RawClient) -> tuple[int, bytes]:
    """Return code and reason of the GOAWAY received before the connection closes."""
    *_, payload = raw.until(f.GOAWAY)
    assert list(raw.frames()) == []
    return int.from_bytes(payload[4:8]), payload[8:]


def test_a_client_that_pings_too_often_is_sent_away(rig: Rig) -> None:
    raw = rig.raw()
    for _ in range(4):
        raw.send(f.PING, 0, 0, bytes(8))
    assert farewell(raw) == (f.ErrorCode.ENHANCE_YOUR_CALM, b"too_many_pings")
    assert rig.client.infer().outputs


def test_a_silent_client_is_probed_and_given_up() -> None:
    times: dict[str, Any] = {"grpc_keepalive_time_s": 0.2, "grpc_keepalive_timeout_s": 2}
    with Rig(grpc_keepalive_without_calls=True, **times) as rig:
        alive, dead = rig.raw(), rig.raw()
        for _ in range(2):
            _, flags, _, payload = alive.until(f.PING)
            assert flags == 0
            alive.send(f.PING, f.ACK, 0, payload)
        assert farewell(dead) == (f.ErrorCode.NO_ERROR, b"keepalive timeout")


def test_connections_wait_while_there_is_no_descriptor(caplog, monkeypatch) -> None:
    monkeypatch.setattr(open_connections, "CROWDED_IDLE_S", 60)
    with Rig() as rig:
        rig.client.infer()
        with no_descriptors(but=1):
            raw = rig.raw()  # the last connection allowed
            raw.infer(request())
            wait_until(lambda: "No descriptor is left" in caplog.text, "it is said")
            assert rig.client.infer().outputs
        assert raw.fields()[":status"] == "200"


def ended(raw: RawClient) -> bool:
    """Whether the server has closed the connection."""
    raw.sock.settimeout(0)
    try:
        return not raw.sock.recv(1 << 16)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        raw.sock.settimeout(WATCHDOG_S)


def test_where_there_is_no_room_the_longest_idle_connection_ends(monkeypatch) -> None:
    monkeypatch.setattr(open_connections, "CROWDED_IDLE_S", 0.2)
    with Rig(max_connections=3, max_caller_share=1) as rig:
        gate = rig.hold()
        busy, idle, other = (rig.raw() for _ in range(3))
        busy.infer(request())
        wait_until(lambda: bool(rig.dispatcher.calls), "one has a call")
        other.send(f.PING, 0, 0, bytes(8))
        assert other.until(f.PING)
        assert rig.client.call("ServerReady", wait_for_ready=True).ready, "there is room for it"
        code, reason = farewell(idle)
        assert code == f.ErrorCode.NO_ERROR
        assert b"max_connections" in reason, "the server goes on"
        assert not ended(other)
        gate.set()
        assert busy.fields()[":status"] == "200"


@pytest.mark.parametrize("does", ["pings", "opens streams", "opens and resets streams"])
def test_who_asks_for_nothing_does_not_keep_its_place(does: str, monkeypatch) -> None:
    monkeypatch.setattr(open_connections, "CROWDED_IDLE_S", 0.1)
    with Rig(max_connections=2, max_caller_share=1) as rig:
        idle, used = rig.raw(), rig.raw()
        used.infer(request())
        assert used.fields()[":status"] == "200"
        time.sleep(0.2)
        if "opens" in does:
            idle.call(None)
        if "resets" in does:
            idle.send(f.RST_STREAM, 0, 1, int(f.ErrorCode.CANCEL).to_bytes(4))
        idle.send(f.PING, 0, 0, bytes(8))
        assert idle.until(f.PING), "by then it is the latest that has done anything"
        assert rig.client.call("ServerReady", wait_for_ready=True).ready, "there is room for it"
        assert farewell(idle)[0] == f.ErrorCode.NO_ERROR
        assert not ended(used)


def test_who_sends_a_message_slowly_keeps_its_place(monkeypatch) -> None:
    monkeypatch.setattr(open_connections, "CROWDED_IDLE_S", 0.1)
    with Rig(max_connections=2, max_caller_share=1) as rig:
        sends, idle = rig.raw(), rig.raw()
        assert idle.until(f.SETTINGS)
        sends.call(None)
        sends.send(0, 0, 1, framed(request(LARGE))[:1000])
        sends.send(f.PING, 0, 0, bytes(8))
        assert sends.until(f.PING)
        time.sleep(0.2)
        assert rig.client.call("ServerReady", wait_for_ready=True).ready, "there is room for it"
        assert farewell(idle)[0] == f.ErrorCode.NO_ERROR
        assert not ended(sends)


def test_one_caller_has_its_share_of_the_connections(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(open_connections, "CROWDED_IDLE_S", 60)
    address = f"unix:{tmp_path}/grpc.sock"
    with (
        Rig(also=address, max_connections=4, max_caller_share=0.5) as rig,
        Client(address) as other,
    ):
        raws = [rig.raw() for _ in range(2)]
        for raw in raws:
            assert raw.until(f.SETTINGS)
        for _ in range(20):
            late = rig.raw()
            wait_until(lambda late=late: ended(late), "it is refused")  # type: ignore[misc]
        assert other.infer().outputs
        assert not any(map(ended, raws))


def test_a_reset_stream_is_a_cancelled_call(rig: Rig) -> None:
    gate = rig.hold()
    raw = rig.raw()
    raw.infer(request())
    wait_calls(rig)
    raw.send(f.RST_STREAM, 0, 1, int(f.ErrorCode.CANCEL).to_bytes(4))
    wait_until(lambda: rig.dispatcher.calls[0].cancelled, "it is cancelled")
    gate.set()
    wait_until(lambda: rig.dispatcher.calls[0].closed == 1, "it is closed")
    raw.infer(request(), 3)
    assert raw.until(f.HEADERS)[2] == 3  # nothing came for the other stream


def test_memory_of_calls_that_end_before_their_answer_comes_back() -> None:
    with Rig(grpc_threads=1) as rig:
        gate = rig.hold()
        raw = rig.raw()
        raw.infer(request(LARGE))
        (running,) = wait_calls(rig)
        raw.infer(request(LARGE), 3)  # waits for the thread
        wait_until(lambda: rig.served.busy == 2, "both are there")
        for stream_id in (1, 3):
            raw.send(f.RST_STREAM, 0, stream_id, int(f.ErrorCode.CANCEL).to_bytes(4))
        wait_until(lambda: running.cancelled, "the running one is cancelled")
        wait_until(lambda: rig.dispatcher.memory.held == [], "the waiting one's slot is left")
        gate.set()
        wait_until(lambda: running.closed == 1, "its answer is held for nobody")
        assert len(rig.dispatcher.calls) == 1


def test_thousands_of_silent_streams_take_no_more_than_their_places(monkeypatch) -> None:
    monkeypatch.setattr(handlers, "MESSAGE_TIMEOUT_S", 3)
    with Rig(grpc_max_calls=50) as rig:
        raws = [rig.raw() for _ in range(4)]
        for raw in raws:
            for number in range(500):
                raw.call(None, 2 * number + 1)
        wait_until(lambda: rig.served.busy == 38, "this caller has its share of the places")
        assert rig.client.call("ServerReady").ready
        assert rig.client.error("ModelInfer", request())[0] == "RESOURCE_EXHAUSTED"
        wait_until(lambda: rig.served.busy == 0, "they are given up")
        assert rig.client.infer().outputs


def test_more_streams_than_allowed_are_refused_one_by_one(rig: Rig) -> None:
    raw = rig.raw()
    for number in range(257):
        raw.call(None, 2 * number + 1)
    _, _, stream_id, payload = raw.until(f.RST_STREAM)
    assert (stream_id, int.from_bytes(payload)) == (513, f.ErrorCode.REFUSED_STREAM)
    raw.close()
    wait_until(lambda: rig.served.busy == 0, "with the connection they end")


def test_whom_calls_may_be_for_is_a_setting() -> None:
    with Rig(allowed_hosts=("models.example",)) as rig:
        assert rig.client.error("ModelInfer", request())[0] == "PERMISSION_DENIED"
        raw = rig.raw()
        raw.infer(request(), **{":authority": "models.example:443"})  # type: ignore[arg-type]
        assert raw.answers()


@pytest.mark.parametrize("ready", [True, False])
def test_large_tensors_are_received_in_slots_and_sent_from_them(ready: bool, rig: Rig) -> None:
    array = np.random.default_rng(1).random(1 << 20, dtype=np.float32)
    rig.dispatcher.memory.ready = ready  # otherwise the dispatcher makes memory for the tensor
    for _ in range(2):
        assert rig.client.infer(request(array)).raw_output_contents == [array.tobytes()]
    assert rig.client.infer().outputs
    assert rig.client.infer(request(array)).outputs
    # bytes that came with the message's head
    assert 0 < rig.dispatcher.calls[3].receipt.copied_in <= 64 << 10
    for call in rig.dispatcher.calls[:2]:
        assert (call.receipt.copied_in, call.receipt.copied_out) == (0, 0)
    wait_until(lambda: all(call.closed == 1 for call in rig.dispatcher.calls), "all are")
    assert rig.dispatcher.memory.held == []


def test_without_memory_the_message_is_copied_as_any(rig: Rig) -> None:
    array = np.zeros(1 << 20, np.float32)
    rig.dispatcher.memory.ready, rig.dispatcher.memory.exhausted = False, True
    assert rig.client.infer(request(array)).outputs
    assert rig.dispatcher.calls[0].receipt.copied_in == array.nbytes


@pytest.mark.parametrize("end", ["reset", "close", "deadline", "timeout", "slow"])
@pytest.mark.parametrize("ready", [True, False])
def test_slots_come_back_however_a_message_ends(end: Any, ready: bool, monkeypatch) -> None:
    if end == "timeout":
        monkeypatch.setattr(handlers, "MESSAGE_TIMEOUT_S", 2)
    slow: dict[str, Any] = (
        {"body_timeout_s": 2, "min_bytes_per_s": 1 << 30} if end == "slow" else {}
    )
    with Rig(**slow) as rig:
        memory = rig.dispatcher.memory
        memory.ready = ready
        slots, reserve = [], memory.reserve
        monkeypatch.setattr(memory, "reserve", lambda n: slots.append(reserve(n)) or slots[-1])
        raw = rig.raw()
        raw.call(None, **({"grpc-timeout": "2S"} if end == "deadline" else {}))  # type: ignore[arg-type]
        raw.send(0, 0, 1, framed(request(LARGE))[:1000])
        wait_until(lambda: len(slots) == 1, "it has its slot")
        if end in ("reset", "close"):  # another may have ended by now
            assert dict(rig.dispatcher.shares.held) == {of_host("127.0.0.1"): LARGE.nbytes}
        if end == "reset":
            raw.send(f.RST_STREAM, 0, 1, int(f.ErrorCode.CANCEL).to_bytes(4))
        elif end == "close":
            raw.close()
        wait_until(lambda: memory.held == [], "the slot is left")
        wait_until(lambda: not rig.dispatcher.shares.held, "the caller's share is")
        wait_until(lambda: rig.served.busy == 0, "its place is left")
        assert rig.dispatcher.calls == []


def changed(**fields: Any) -> Any:
    """Return a request with a large input that has other fields."""
    message = request(LARGE)
    for name, value in fields.items():
        if name == "shape":
            message.inputs[0].shape[0] = value
        else:
            setattr(message.inputs[0], name, value)
    return message


@pytest.mark.parametrize(
    ("message", "settings", "status"),
    [
        (request(LARGE, model="nobody"), {}, 5),
        (changed(name="OTHER"), {}, 3),
        (changed(shape=len(LARGE) + 1), {}, 3),
        (changed(shape=1 << 41), {}, 3),
        (request(LARGE), {"grpc_restricted_protocol": ("inference:key=secret",)}, 14),
    ],
    ids=["model", "input", "size", "elements", "restricted"],
)
def test_what_the_head_refuses_gets_no_memory(message, settings, status) -> None:
    with Rig(**settings) as rig:
        rig.dispatcher.memory.exhausted = True  # would be received on the heap, then
        raw = rig.raw()
        raw.call(None)
        raw.send(0, 0, 1, framed(message)[:1000])
        assert raw.fields()["grpc-status"] == str(status)
        wait_until(lambda: rig.served.busy == 0, "its place is left")


def test_tensors_before_what_tells_of_them_get_no_slot() -> None:
    array = np.zeros(1 << 20, np.float32)
    whole = request(array)
    behind = pb.ModelInferRequest(model_name="identity", inputs=whole.inputs)
    before = pb.ModelInferRequest(raw_input_contents=whole.raw_input_contents)
    data = before.SerializeToString() + behind.SerializeToString()
    with Rig() as rig:
        assert rig.client.infer(data).raw_output_contents == [array.tobytes()]
        assert rig.dispatcher.calls[0].receipt.copied_in >= array.nbytes
    with Rig(max_heap_bytes=1 << 20) as rig:
        code, details = rig.client.error("ModelInfer", data)
        assert (code, "max_heap_bytes" in details) == ("UNAVAILABLE", True)
        assert rig.client.infer(whole).outputs, "which has its slot"
        wait_until(lambda: BUDGET.used == 0, "what was counted is given back")


def test_messages_of_streams_are_counted_while_they_are_kept() -> None:
    array = np.zeros(1 << 20, np.float32)
    with Rig(max_heap_bytes=1 << 20) as rig:
        with pytest.raises(grpc.RpcError, match="max_heap_bytes"):
            list(rig.client.stream([request(array)]))
        (answer,) = rig.client.stream([request(array[:1000])])
        assert answer.infer_response.outputs
    with Rig() as rig:
        answers = list(rig.client.stream([request(array)] * 3))
        assert [bool(answer.infer_response.outputs) for answer in answers] == [True] * 3
        wait_until(lambda: BUDGET.used == 0, "what was counted is given back")


def test_messages_that_wait_for_their_stream_are_counted(rig: Rig) -> None:
    array = np.zeros(1 << 20, np.float32)
    gate = rig.hold()
    client = threading.Thread(target=lambda: list(rig.client.stream([request(array)] * 3)))
    client.start()
    try:
        wait_until(lambda: BUDGET.used >= 2 * (array.nbytes - FREE), "only what runs is counted")
    finally:
        gate.set()
        client.join(WATCHDOG_S)
    wait_until(lambda: BUDGET.used == 0, "what was counted is given back")


def test_callers_are_refused_before_a_large_message_has_come() -> None:
    with Rig(grpc_restricted_protocol=("model-repository:key=secret",)) as rig:
        raw = rig.raw()
        load = "/inference.GRPCInferenceService/RepositoryModelLoad"
        raw.call(None, **{":path": load})  # type: ignore[arg-type]
        raw.send(0, 0, 1, prefix(1 << 20) + bytes(1000))
        assert raw.fields()["grpc-status"] == "14"
        wait_until(lambda: rig.served.busy == 0, "its place is left")


@pytest.mark.parametrize("end", ["reset", "close"])
def test_an_answer_that_nobody_takes_is_let_go(end: Any, rig: Rig) -> None:
    raw = rig.raw()  # a client with small windows
    raw.infer(request(np.zeros(1 << 20, np.float32)))
    (call,) = wait_calls(rig)
    assert raw.until(f.HEADERS)
    assert call.closed == 0
    if end == "reset":
        raw.send(f.RST_STREAM, 0, 1, int(f.ErrorCode.CANCEL).to_bytes(4))
    else:
        raw.close()
    wait_until(lambda: call.closed == 1, "it is let go")


def wait_calls(rig: Rig) -> list[Any]:
    wait_until(lambda: bool(rig.dispatcher.calls), "it runs")
    return rig.dispatcher.calls


def test_a_window_that_is_opened_has_the_rest_of_the_answer_sent(rig: Rig) -> None:
    raw = rig.raw()
    array = np.arange(100_000, dtype=np.float32)
    raw.infer(request(array))
    assert raw.until(f.HEADERS)
    for stream_id in (0, 1):
        raw.send(f.WINDOW_UPDATE, 0, stream_id, (1 << 20).to_bytes(4))
    answer = b""
    for kind, _, _, payload in raw.frames():
        if kind == f.HEADERS:
            break
        answer += payload if kind == 0 else b""
    assert array.tobytes() in answer


def test_tensors_arrive_however_frames_and_packets_are_cut(rig: Rig) -> None:
    """Two calls at a time, with interleaved frames and unknown frames in between."""
    raw = rig.raw()
    raw.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.send(f.WINDOW_UPDATE, 0, 0, (1 << 30).to_bytes(4))
    raw.send(f.SETTINGS, 0, 0, struct.pack(">HL", f.INITIAL_WINDOW_SIZE, 1 << 24))
    for seed in range(12):
        choose = random.Random(seed)
        rig.dispatcher.memory.ready = bool(seed % 3)
        given: dict[int, bytes] = {}
        rest: dict[int, bytes] = {}
        for stream_id in (4 * seed + 1, 4 * seed + 3):
            array = np.frombuffer(choose.randbytes(4 * choose.randrange(9, 90_000)), np.float32)
            rest[stream_id] = framed(request(array))
            given[stream_id] = array.tobytes()
            raw.call(None, stream_id)
        sent = b""
        while rest:
            stream_id = choose.choice(list(rest))
            data, size = rest[stream_id], choose.choice((1, 5, 100, 4000, 16000))
            sent += frame_of(choose, stream_id, data[:size], len(data) <= size)
            rest[stream_id] = data[size:]
            if len(data) <= size:
                del rest[stream_id]
        while sent:
            size = choose.choice((1, 9, 3000, 100_000))
            raw.sock.sendall(sent[:size])
            sent = sent[size:]
        for stream_id, answer in answers(raw, 2).items():
            assert answer.endswith(given[stream_id]), (seed, stream_id)
    wait_until(lambda: all(call.closed == 1 for call in rig.dispatcher.calls), "all are")
    assert rig.dispatcher.memory.held == []


def frame_of(choose: random.Random, stream_id: int, data: bytes, end: bool) -> bytes:
    """Return a DATA frame, padded at random, at random preceded by a frame of unknown type."""
    before = f.frame(77, 0, stream_id, b"unknown") if choose.random() < 0.1 else b""
    if choose.random() < 0.2:
        padding = choose.randrange(200)
        return before + f.frame(
            0, end | f.PADDED, stream_id, bytes([padding]) + data + bytes(padding)
        )
    return before + f.frame(0, end, stream_id, data)


def answers(raw: RawClient, count: int) -> dict[int, bytes]:
    """Return the messages of `count` calls by stream."""
    found: dict[int, bytes] = {}
    for kind, flags, stream_id, payload in raw.frames():
        if kind == 0:
            found[stream_id] = found.get(stream_id, b"") + payload
        count -= kind == f.HEADERS and flags & f.END_STREAM
        if not count:
            break
    return found


@pytest.mark.needs("h2load")
def test_another_client_of_many_streams(tmp_path, rig: Rig) -> None:
    body = tmp_path / "body"
    body.write_bytes(framed(request()))
    program: Any = shutil.which("h2load")
    done = subprocess.run(
        [
            *(program, "-n", "400", "-c", "4", "-m", "10", "-d", str(body)),
            *("-H", "content-type: application/grpc", "-H", "te: trailers"),
            f"http://{rig.target}{PREFIX}ModelInfer",
        ],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_S,
    )
    assert "400 succeeded, 0 failed, 0 errored" in done.stdout, done.stdout + done.stderr
    assert rig.dispatcher.calls[-1].outcomes == ["answered"]
    wait_until(lambda: len(rig.dispatcher.calls) == 400, "each has run")
