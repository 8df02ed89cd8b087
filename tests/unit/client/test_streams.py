"""The client's streams, tested without a server."""

import itertools
import json
import socket
import threading
import time
from typing import Any, cast

import numpy as np
import pytest

from shmserve.client import InferenceError, Result, ResultStream, placed_request
from shmserve.client.http_stream import HttpAnswers, generate_request
from shmserve.client.lane_answers import LaneAnswers
from shmserve.client.memory.shared_pools import SharedMemoryPools
from shmserve.client.output_sizes import DescribedModel, stream_windows
from shmserve.client.placed_request import RequestAttempt
from shmserve.client.requester import Requester
from shmserve.client.result import ClientCall
from shmserve.client.tensors import ClientTensor
from shmserve.client.wire import client_connection
from shmserve.client.wire.cancel_scope import CancelScope, cancellable
from shmserve.client.wire.http_transport import EventStream, Reply, Transport
from shmserve.client.wire.lanes import ClientLane, Lanes, converse
from shmserve.errors import InvalidArgument
from shmserve.protocol.control import client_messages
from shmserve.protocol.control import lane_messages as wire
from shmserve.protocol.control.client_messages import LaneOpened
from shmserve.tensor import bytes_codec
from shmserve.transport.channel import Channel

A, B = (Result({}, ("m", "1", name), {}, None) for name in "ab")


class Told:
    """Scripted answers; an exception is raised."""

    def __init__(self, *answers: Result | InferenceError | BaseException | None) -> None:
        self.left = list(answers)
        self.closed = 0

    def next(self) -> Result | InferenceError | None:
        told = self.left.pop(0)
        if isinstance(told, BaseException) and not isinstance(told, InferenceError):
            raise told
        return told

    def close(self) -> None:
        self.closed += 1


def test_a_stream_ends_once_and_gives_all_back() -> None:
    told = Told(A, B, None)
    stream = ResultStream(lambda: told)
    assert list(stream) == [A, B]
    assert told.closed == 1
    assert list(stream) == []
    stream.close()
    assert told.closed == 1


def test_an_error_of_one_answer_is_not_the_end() -> None:
    told = Told(A, InferenceError(400, "not this one"), B, None)
    stream = ResultStream(lambda: told)
    assert next(stream) is A
    with pytest.raises(InferenceError, match="not this one"):
        next(stream)
    assert list(stream) == [B]


def test_what_is_raised_is_the_end() -> None:
    told = Told(A, KeyboardInterrupt(), B)
    stream = ResultStream(lambda: told)
    assert next(stream) is A
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert told.closed == 1
    assert list(stream) == []

    def refuse() -> Told:
        raise InferenceError(404, "nope")

    stream = ResultStream(refuse)
    with pytest.raises(InferenceError, match="nope"):
        next(stream)
    assert list(stream) == []


def test_nothing_is_asked_of_a_stream_that_was_closed_before() -> None:
    def begin() -> Told:
        raise AssertionError

    with ResultStream(begin) as stream:
        pass
    assert list(stream) == []


def test_a_stream_that_is_dropped_is_closed() -> None:
    told = Told(A, B)
    stream = ResultStream(lambda: told)
    next(stream)
    del stream
    assert told.closed == 1


def test_a_wait_is_ended_from_another_thread() -> None:
    waits, over = threading.Event(), threading.Event()

    class Waiting(Told):
        def next(self) -> None:
            with cancellable(over.set):
                waits.set()
                assert over.wait(30)

    told = Waiting()
    stream = ResultStream(lambda: told)
    failed: list[InferenceError] = []

    def read() -> None:
        try:
            next(stream)
        except InferenceError as ex:
            failed.append(ex)

    thread = threading.Thread(target=read)
    thread.start()
    assert waits.wait(30)
    stream.close()
    thread.join(30)
    assert [ex.message for ex in failed] == ["the request was cancelled"]
    assert told.closed == 1


@pytest.mark.parametrize("which", ["inner", "outer"])
def test_scopes_in_each_other(which: str) -> None:
    scopes = {"outer": CancelScope(), "inner": CancelScope()}
    interrupted = []

    def wait() -> None:
        with cancellable(lambda: interrupted.append(1)):
            scopes[which].cancel()

    with pytest.raises(InferenceError, match="cancelled"):
        scopes["outer"].run(lambda: scopes["inner"].run(wait))
    assert interrupted == [1]


# ------------------------------------------------------------------------------ over HTTP

MODEL = DescribedModel(
    {"N": ("INT64", (1,)), "X": ("FP32", (-1, 2)), "S": ("BYTES", (-1, -1)), "B": ("BOOL", (2,))}
)


def call(inputs: dict[str, Any], outputs: tuple[str, ...] | None = None, **more: Any) -> ClientCall:
    tensors = [ClientTensor(name, value) for name, value in inputs.items()]
    values = {"parameters": None, "request_id": "", **more}
    return ClientCall(
        "m", "", tensors, outputs, timeout_s=30.0, receipt=False, device=None, **values
    )


class Events:
    def __init__(self, *documents: dict[str, Any]) -> None:
        self.left = [json.dumps(document).encode() for document in documents]

    def next(self) -> bytes | None:
        return self.left.pop(0) if self.left else None


def told(document: dict[str, Any], outputs: tuple[str, ...] | None = None) -> Any:
    answers = HttpAnswers(cast(EventStream, Events(document)), call({}, outputs), MODEL)
    found = answers.next()
    assert answers.next() is answers.next() is None
    return found


def test_what_an_event_tells() -> None:
    head = {"model_name": "m", "model_version": "3", "id": "q"}
    values = {"N": 1 << 62, "X": [1, 2.5, float("nan"), 4], "S": "ü", "B": [True, False]}
    result = told({**head, **values, "P": 1.5})
    assert (result.model, result.version, result.id) == ("m", "3", "q")
    assert (result.parameters, result.transport, result.receipt) == ({"P": 1.5}, "http", None)
    assert result["N"].tolist() == [1 << 62]
    assert np.array_equal(result["X"], np.float32([[1, 2.5], [np.nan, 4]]), equal_nan=True)  # type: ignore[arg-type]
    assert (result["S"].tolist(), result["B"].tolist()) == ([["ü".encode()]], [True, False])
    assert list(told({**head, **values}, ("B", "N"))) == ["B", "N"]
    assert told({**head, "X": []})["X"].shape == (0, 2)
    failed = told({"error": "so it is"})
    assert (failed.status, failed.message) == (500, "so it is")
    assert "unknown shape" in told({**head, "S": ["a", "b"]}).message
    for wrong in ({**head, "N": [1, 2]}, {**head, "X": "a"}, {"elsewhere": 1}):
        with pytest.raises(InferenceError, match="malformed"):
            told(wrong)


def test_the_request_as_json() -> None:
    inputs = {"A": np.arange(4, dtype=np.int8).reshape(2, 2), "T": [b"a", "ü"]}
    body = generate_request(call(inputs, request_id="q", parameters={"top": 3}), MODEL)
    assert json.loads(body) == {
        "A": [[0, 1], [2, 3]],
        "T": ["a", "ü"],
        "id": "q",
        "parameters": {"top": 3},
    }


@pytest.mark.parametrize(
    ("inputs", "model", "words"),
    [
        ({"A": np.zeros(1, np.float16)}, MODEL, "input 'A' is FP16"),
        ({}, DescribedModel({"Y": ("BF16", (1,))}), "output 'Y' is BF16"),
        ({"A": [b"\xff"]}, MODEL, "'A' is no UTF-8"),
        ({"id": np.zeros(1)}, MODEL, "input 'id'"),
    ],
)
def test_what_has_no_place_in_json(inputs, model, words) -> None:
    with pytest.raises(InferenceError, match=words) as caught:
        generate_request(call(inputs, request_id="q"), model)
    assert caught.value.status == 0


# ----------------------------------------------------------------------------- over lanes


def test_windows_are_for_what_messages_do_not_carry() -> None:
    model = DescribedModel(
        {"n": ("INT64", (1,)), "big": ("FP32", (2000,)), "x": ("FP32", (-1,)), "s": ("BYTES", (1,))}
    )
    names = tuple(model.outputs)
    assert stream_windows(model, names, 1 << 20) == {
        "n": None,
        "big": 8000,
        "x": 1 << 20,
        "s": 1 << 20,
    }
    assert stream_windows(model, names, 4095) == {"n": None, "big": 8000, "x": None, "s": None}
    many = DescribedModel({str(n): ("FP32", (1000,)) for n in range(17)})
    assert set(stream_windows(many, many.outputs, 0).values()) == {4000}
    assert set(stream_windows(many, list(many.outputs)[:16], 0).values()) == {None}


def test_how_far_strings_go() -> None:
    data = bytes_codec.encode(["a", "", "bcd"])
    for count, extent in ((0, 0), (1, 5), (2, 9), (3, 16), (4, 20)):
        assert bytes_codec.extent(data + bytes(7), count) == extent
    for data, count in ((b"\5\0\0\0abcd", 1), (b"\0\0\0", 1), (bytes(4), 2)):
        with pytest.raises(InvalidArgument, match="more than the"):
            bytes_codec.extent(data, count)


class FewLanes:
    """Lanes whose other ends send scripted answers."""

    def __init__(self, *answers: wire.LaneAnswer) -> None:
        self.back: list[ClientLane] = []
        self.others: list[socket.socket] = []
        self.lanes: list[ClientLane] = []
        for answer in answers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.send(wire.encode(answer))
            self.others.append(theirs)
            self.lanes.append(ClientLane(LaneOpened("1", "m/1/0", False, 10**9), Channel(ours)))
        self.left = list(self.lanes)

    def take(self, _: object, until: float) -> ClientLane | None:
        return self.left.pop(0) if self.left else None

    def give(self, _: object, lane: ClientLane) -> None:
        self.back.append(lane)

    def close(self) -> None:
        for other in self.others:
            other.close()
        for lane in self.lanes:
            lane.channel.close()


def soon() -> float:
    return time.monotonic() + 30.0


def test_a_request_that_a_lane_has_not_taken_goes_to_another() -> None:
    moved = wire.LaneAnswer(7, (), 503, "UNAVAILABLE", "it ends", moved=True)
    for final in (True, False):
        lanes = FewLanes(moved, wire.LaneAnswer(7, final=final))
        found = converse(cast(Lanes, lanes), ("m", ""), wire.LaneRequest(7, ()), True, soon())
        answer, lane = found
        assert (answer.final, lane) == (final, lanes.lanes[1])
        assert lanes.back == ([lane] if final else []), "a stream keeps its lane"
        assert lanes.lanes[0].channel.fileno() == -1
        lanes.close()


def test_what_is_sent_again_has_the_time_that_is_left() -> None:
    class SlowLanes(FewLanes):
        def take(self, key: object, until: float) -> ClientLane | None:
            time.sleep(0.1)
            return super().take(key, until)

    moved = wire.LaneAnswer(7, (), 503, "UNAVAILABLE", "it ends", moved=True)
    lanes = SlowLanes(moved, wire.LaneAnswer(7))
    asked = wire.LaneRequest(7, (), timeout_ns=10**12)
    assert converse(cast(Lanes, lanes), ("m", ""), asked, True, time.monotonic() + 30.0)
    first, second = (wire.decode_to_lane(other.recv(1 << 16)) for other in lanes.others)
    assert isinstance(first, wire.LaneRequest)
    assert isinstance(second, wire.LaneRequest)
    assert second.timeout_ns + 10**8 <= first.timeout_ns <= 30 * 10**9
    lanes.close()
    lanes = SlowLanes(moved, moved, moved)
    with pytest.raises(InferenceError, match="did not answer in time"):
        converse(cast(Lanes, lanes), ("m", ""), asked, True, time.monotonic() + 0.15)
    assert lanes.left, "no further one is asked for behind the deadline"
    lanes.close()


def test_the_server_has_time_to_say_that_it_is_late() -> None:
    """The server checks streams once a second."""
    lanes = FewLanes(wire.LaneAnswer(7))
    (lane,), (other,) = lanes.lanes, lanes.others
    assert lane.receive(30.0) is not None
    late = wire.LaneAnswer(7, (), 504, "DEADLINE_EXCEEDED", "gave no answer within 1 s")
    timer = threading.Timer(lane.opened.timeout_ns / 1e9 + 1.2, other.send, [wire.encode(late)])
    timer.start()
    found = converse(cast(Lanes, lanes), ("m", ""), wire.LaneRequest(7, ()), True, soon())
    timer.join()
    assert found[0].error == late.error
    lanes.close()


class SlowServer:
    """A transport whose server takes a tenth of a second for everything."""

    is_local = False

    def __init__(self) -> None:
        self.timeouts: list[float] = []

    def request(self, method: str, *_: object, timeout_s: float = 0.0) -> Reply:
        self.timeouts.append(timeout_s)
        time.sleep(0.1)
        document = {"outputs": [{"name": "N", "datatype": "INT64", "shape": [1]}]}
        body = np.frombuffer(json.dumps(document).encode(), np.uint8)
        return Reply(200 if method == "GET" else 503, {}, body)


def test_a_call_has_one_deadline_whatever_is_asked_for_it() -> None:
    server = SlowServer()
    no_memory = SharedMemoryPools(cast(Transport, server), "", 0, 0)
    requester = Requester(cast(Transport, server), no_memory, None)
    with pytest.raises(InferenceError, match="503"):
        requester.run(call({}))
    answers = requester.begin(call({}), 0)  # of a model that answers once
    with pytest.raises(InferenceError, match="503"):
        answers.next()
    description, inference, config, stream = server.timeouts
    assert inference <= description - 0.1 <= 29.9
    assert stream <= config - 0.1 <= 29.9


class Changing(SlowServer):
    """A server whose model takes no stream any more, contrary to the client's memory of the
    model."""

    def request(self, method: str, path: str, *_: object, **__: object) -> Reply:  # type: ignore[override]
        self.timeouts.append(0.0)
        document = {
            "model_transaction_policy": {"decoupled": True},
            "outputs": [{"name": "N", "datatype": "INT64", "shape": [1]}],
        }
        return Reply(200, {}, np.frombuffer(json.dumps(document).encode(), np.uint8))

    def events(self, *_: object) -> EventStream:
        raise InferenceError(404, "it is gone")


def test_what_is_known_of_a_model_is_forgotten_with_a_refused_stream(monkeypatch) -> None:
    server = Changing()
    no_memory = SharedMemoryPools(cast(Transport, server), "", 0, 0)
    over_http = Requester(cast(Transport, server), no_memory, None)
    for asked in (2, 4):
        with pytest.raises(InferenceError, match="it is gone"):
            over_http.begin(call({}), 0)
        assert len(server.timeouts) == asked
    monkeypatch.setattr(placed_request, "_numbers", itertools.repeat(7))
    refusal = wire.LaneAnswer(7, (), 404, "NOT_FOUND", "it is gone")
    lanes = FewLanes(refusal, refusal)
    over_lanes = Requester(cast(Transport, server), no_memory, cast(Lanes, lanes))
    for asked in (6, 8):
        told = over_lanes.begin(call({}), 0).next()
        assert isinstance(told, InferenceError)
        assert len(server.timeouts) == asked
    lanes.close()


class Attempt:
    """Holder of a request's memory, without any memory."""

    windows: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.tainted = self.closed = 0

    def taint(self) -> None:
        self.tainted += 1

    def close(self) -> None:
        self.closed += 1


class Lane:
    """A stream with credit for four answers on a lane whose other end is the test's."""

    def __init__(self, first: wire.LaneAnswer, timeout_s: float = 30.0) -> None:
        self.lanes = FewLanes(first)
        self.attempt, self.other = Attempt(), self.lanes.others[0]
        request = wire.LaneRequest(7, (), credit=4)
        found = converse(cast(Lanes, self.lanes), ("m", ""), request, True, soon())
        self.lane = found[1]
        self.answers = LaneAnswers(
            *(cast(Lanes, self.lanes), found, cast(RequestAttempt, self.attempt), request),
            *(call({}, request_id="q"), time.monotonic() + timeout_s),
        )

    def say(self, *answers: wire.LaneAnswer) -> None:
        for answer in answers:
            self.other.send(wire.encode(answer))

    def heard(self) -> list[Any]:
        """Return the messages received by the other end."""
        told = []
        while True:
            try:
                told.append(wire.decode_to_lane(self.other.recv(1 << 16, socket.MSG_DONTWAIT)))
            except BlockingIOError:
                return told


def one(number: int, final: bool = False) -> wire.LaneAnswer:
    tensor = wire.LaneTensor("N", "INT64", (1,), np.int64(number).tobytes())
    return wire.LaneAnswer(7, (tensor,), final=final)


@pytest.fixture
def lane():
    lane = Lane(one(0))
    yield lane
    lane.lanes.close()


def number(told: Result | InferenceError | None) -> int:
    assert isinstance(told, Result)
    return int(told["N"][0])


def test_credit_is_given_for_what_was_taken(lane: Lane) -> None:
    lane.say(*(one(n) for n in range(1, 4)), one(4, final=True))
    (asked,) = lane.heard()
    assert isinstance(asked, wire.LaneRequest)
    heard = []
    for n in range(5):
        assert number(lane.answers.next()) == n
        heard.append(lane.heard())
    assert heard == [[], *[[wire.LaneCredit(7, 1)]] * 4]
    assert lane.lanes.back == [lane.lane]
    assert (lane.attempt.closed, lane.attempt.tainted) == (1, 0)
    assert lane.answers.next() is None
    lane.answers.close()
    assert lane.lane.channel.fileno() >= 0, "it is others' now"
    assert lane.attempt.tainted == 0


def test_a_stream_that_is_closed_early_ends_its_lane(lane: Lane) -> None:
    assert number(lane.answers.next()) == 0
    lane.answers.close()
    lane.answers.close()
    assert lane.lane.channel.fileno() == -1
    assert lane.lanes.back == []
    assert lane.attempt.tainted == 1
    assert lane.answers.next() is None


def test_a_bare_end_and_errors(lane: Lane) -> None:
    failed = wire.LaneAnswer(7, (), 400, "INVALID_ARGUMENT", "not this one", final=False)
    lane.say(failed, one(2), wire.LaneAnswer(7))
    assert number(lane.answers.next()) == 0
    error = lane.answers.next()
    assert isinstance(error, InferenceError)
    assert (error.status, error.message) == (400, "not this one")
    assert number(lane.answers.next()) == 2
    assert lane.answers.next() is None
    assert lane.lanes.back == [lane.lane]


def test_the_last_words_of_an_executor_are_heard(lane: Lane) -> None:
    lane.say(one(1), one(2), one(3, final=True))
    lane.other.close()  # which refuses all credit
    assert [number(lane.answers.next()) for _ in range(4)] == [0, 1, 2, 3]
    dying = Lane(one(0))
    dying.say(one(1), one(2))
    dying.other.close()
    assert [number(dying.answers.next()) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InferenceError, match="died while it had the request") as caught:
        dying.answers.next()
    assert caught.value.status == 502
    dying.lanes.close()


def test_no_answer_is_waited_for_behind_the_deadline() -> None:
    lane = Lane(one(0), timeout_s=0.0)
    assert number(lane.answers.next()) == 0
    lane.say(one(1))
    with pytest.raises(InferenceError, match="did not answer in time"):
        lane.answers.next()
    lane.lanes.close()


class Pieces:
    """A response that arrives in the given pieces."""

    will_close = False

    def __init__(self, *pieces: bytes) -> None:
        self.left = [*pieces, b""]
        self.closed = 0

    def read1(self, _: int) -> bytes:
        return self.left.pop(0)

    def read(self) -> bytes:
        return b""

    def close(self) -> None:
        self.closed += 1


class Kept:
    """A transport with a single connection."""

    def __init__(self) -> None:
        self.kept = self.closed = 0

    def keep(self, *_: object) -> None:
        self.kept += 1

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_however_they_are_cut(size: int) -> None:
    sent = [b"a", b"", b"b" * 20, b"c"]
    data = b"".join(b"data: %b\n\n" % text for text in sent)
    pieces, kept = Pieces(*(data[n : n + size] for n in range(0, len(data), size))), Kept()
    with socket.socket() as sock:
        parts: Any = (kept, kept, sock, pieces, time.monotonic() + 30)
        events = EventStream(*parts)
        assert [events.next() for _ in range(5)] == [*sent, None]
        assert kept.kept == 1
        events.close()
        assert (kept.closed, pieces.closed) == (0, 0), "the connection is others' now"
        again: Any = (kept, kept, sock, Pieces(data[:9]), time.monotonic() - 1)
        late = EventStream(*again)
        with pytest.raises(InferenceError, match="did not answer in time"):
            late.next()
        assert kept.closed == 1
        late.close()
        assert kept.kept == 1


def test_opening_a_lane_is_bounded_by_the_call(tmp_path, monkeypatch) -> None:
    """A stopped coordinator's listener accepts connections and stays silent."""
    monkeypatch.setattr(client_connection, "_ANSWER_S", 3600.0)
    path = str(tmp_path / "c.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        taken: list[socket.socket] = []
        hello = threading.Thread(target=lambda: taken.append(say_hello(listener)))
        hello.start()
        control = client_connection.ControlConnection(path)
        hello.join()
        until = time.monotonic() + 0.2
        assert (
            converse(Lanes(lambda: control), ("m", ""), wire.LaneRequest(7, ()), True, until)
            is None
        )
        control.close()
        taken[0].close()


def say_hello(listener: socket.socket) -> socket.socket:
    connection, _ = listener.accept()
    connection.recv(1 << 16)
    hello = client_messages.ServerHello(client_messages.VERSION, lanes=True)
    connection.send(client_messages.encode(hello))
    return connection
