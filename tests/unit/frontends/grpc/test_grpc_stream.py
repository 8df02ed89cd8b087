"""ModelStreamInfer over a real channel: order, errors, many answers, slow and gone clients."""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.dispatch.outcome import Outcome
from shmserve.errors import STOPPING, Code, ModelFailure
from tests import fake_models
from tests.fake_dispatch import FakeDispatcher, FakeRequest
from tests.grpc_client import Rig, Sender, put, tensor
from tests.running_server import WATCHDOG_S, wait_until


def ask(model: str, count: int, id: str = "", **parameters: Any) -> pb.ModelInferRequest:
    """Return a request to a model with one INT32 input."""
    array = np.array([count], np.int32)
    message = pb.ModelInferRequest(
        model_name=model,
        id=id,
        inputs=[tensor(array, datatype="INT32")],
        raw_input_contents=[array.tobytes()],
    )
    put(message.parameters, parameters)
    return message


def number(outcome: int) -> Outcome:
    return Outcome((fake_models.tensor_of("OUTPUT0", "INT32", np.array([outcome], np.int32)),))


class Models:
    """`one` answers once; `many` answers 0, 1, … as often as the input says.

    Both first wait for the gate named by a parameter of the request, if any.
    """

    def __init__(self) -> None:
        self.gates: dict[str, threading.Event] = {}
        self.entered: list[str] = []
        self.given = 0  # answers handed over by `many`
        spec = fake_models.spec
        self.dispatcher = FakeDispatcher(
            [
                (spec("one", "INT32", (1,)), self.one),
                (spec("many", "INT32", (1,), decoupled=True), self.many),
            ]
        )

    def gate(self, name: str) -> threading.Event:
        return self.gates.setdefault(name, threading.Event())

    def _enter(self, request: FakeRequest) -> int:
        self.entered.append(request.id)
        if "gate" in request.parameters:
            assert self.gate(str(request.parameters["gate"])).wait(WATCHDOG_S)
        return int(fake_models.array_of(request.inputs["INPUT0"])[0])

    def one(self, request: FakeRequest) -> Outcome:
        count = self._enter(request)
        if count < 0:
            raise ModelFailure("boom", Code.INVALID_ARGUMENT)
        return number(count)

    def many(self, request: FakeRequest) -> Iterator[Outcome]:
        count = self._enter(request)
        for index in range(abs(count)):
            self.given += 1
            yield number(index)
        if count < 0:
            yield Outcome(error=ModelFailure("boom"))


@pytest.fixture
def models():
    made = Models()
    before = threading.active_count()
    yield made
    wait_until(lambda: threading.active_count() <= before, f"threads: {threading.enumerate()}")
    assert all(call.closed == 1 for call in made.dispatcher.calls)


def value(message: pb.ModelStreamInferResponse) -> int:
    return int(np.frombuffer(message.infer_response.raw_output_contents[0], np.int32)[0])


def told(message: pb.ModelStreamInferResponse) -> tuple[str, Any, bool]:
    """Return the id, the value or error (None: neither), and whether the message is final."""
    response = message.infer_response
    final = response.parameters["triton_final_response"].bool_param
    if message.error_message:
        return response.id, message.error_message, final
    return response.id, value(message) if response.outputs else None, final


def test_ordinary_models_answer_once_in_order(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        sent = [ask("one", n, str(n), triton_enable_empty_final_response=n > 3) for n in range(8)]
        call = rig.client.stream(sent)
        assert [told(message) for message in call] == [(str(n), n, True) for n in range(8)]
        assert call.code() is grpc.StatusCode.OK
        assert list(rig.client.stream([])) == []


def test_one_by_one(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        sender = Sender()
        call = rig.client.stream(sender)
        for n in range(3):
            sender.send(ask("one", n))
            assert value(next(call)) == n
        sender.close()
        assert list(call) == []


def test_errors_are_told_and_the_stream_goes_on(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        bad = ask("one", 1, "empty")
        del bad.raw_input_contents[:]
        call = rig.client.stream(
            [b"\x0a\xff", ask("nosuch", 1, "a"), bad, ask("one", -1, "b"), ask("one", 5, "c")]
        )
        answers = [told(message) for message in call]
    assert [answer[0] for answer in answers] == ["", "a", "empty", "b", "c"]
    assert "unknown model" in answers[1][1]
    assert "unable to find data" in answers[2][1]
    assert answers[3:] == [("b", "boom", True), ("c", 5, True)]
    assert call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (ask("nosuch", 1), "NOT_FOUND"),
        (ask("one", -1), "INVALID_ARGUMENT"),
        (ask("many", -1), "INTERNAL"),
    ],
)
@pytest.mark.parametrize("before", ["one", "many"])
def test_an_error_ends_the_stream_for_those_who_ask(models: Models, bad, code, before) -> None:
    with Rig(models.dispatcher) as rig:
        sender = Sender()
        call = rig.client.stream(sender, metadata=(("triton_grpc_error", "true"),))
        sender.send(ask(before, 1))
        assert value(next(call)) in (0, 1)
        sender.send(bad)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        sender.close()
    assert caught.value.code().name == code


def test_many_answers_and_their_end(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream(
            [ask("many", 3, "a"), ask("many", 2, "b", triton_enable_empty_final_response=True),
             ask("many", 0, "c"), ask("many", 0, "d", triton_enable_empty_final_response=True)]
        )  # fmt: skip
        answers = [told(message) for message in call]
        assert call.code() is grpc.StatusCode.OK
    of = {id: [answer[1:] for answer in answers if answer[0] == id] for id in "abcd"}
    assert of == {
        "a": [(0, False), (1, False), (2, False)],
        "b": [(0, False), (1, False), (None, True)],
        "c": [],
        "d": [(None, True)],
    }
    assert {message.infer_response.model_name for message in call} == set()


def test_errors_of_a_stream_of_answers(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        answers = [told(m) for m in rig.client.stream([ask("many", -2, "a"), ask("one", 1, "b")])]
    assert [answer for answer in answers if answer[0] == "a"] == [
        ("a", 0, False),
        ("a", 1, False),
        ("a", "boom", False),
    ]
    assert ("b", 1, True) in answers


def test_requests_of_one_stream_run_at_the_same_time_but_not_too_many(models: Models) -> None:
    with Rig(models.dispatcher, grpc_stream_requests=2) as rig:
        sent = [ask("many", 1, id, gate=id) for id in "abc"]
        sent.append(ask("one", 7, "x"))
        call = rig.client.stream(sent)
        wait_until(lambda: set(models.entered) == {"a", "b"}, "two run")
        models.gate("b").set()
        assert told(next(call)) == ("b", 0, False)  # later asked, earlier answered
        wait_until(lambda: "c" in models.entered, "the third runs")
        models.gate("c").set()
        assert told(next(call)) == ("c", 0, False)
        assert told(next(call)) == ("x", 7, True)  # which no decoupled model delays
        models.gate("a").set()
        assert [told(message) for message in call] == [("a", 0, False)]


def test_a_half_closed_stream_finishes(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream([ask("many", 2, "a", gate="g")])
        wait_until(lambda: models.entered == ["a"], "it runs")
        models.gate("g").set()
        assert [told(message) for message in call] == [("a", 0, False), ("a", 1, False)]
        assert call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_client_that_goes_takes_its_requests_along(models: Models, how: str) -> None:
    with Rig(models.dispatcher) as rig:
        sender = Sender()
        call = rig.client.stream(sender)
        sender.send(ask("many", 1_000_000, "a"))
        sender.send(ask("many", 1_000_000, "b"))
        assert next(call).infer_response.outputs
        if how == "cancel":
            call.cancel()
        else:
            rig.client.close()
        wait_until(
            lambda: all(call.closed for call in models.dispatcher.calls), "its calls are closed"
        )
        sender.close()
        assert models.given < 1_000_000
        wait_until(lambda: rig.served.busy == 0, "nothing is left of it")


def test_a_client_that_does_not_read_stops_its_model_and_nobody_else(models: Models) -> None:
    big = np.zeros(1 << 20, np.int32)

    def flood(request: FakeRequest) -> Iterator[Outcome]:
        for _ in range(100):
            models.given += 1
            yield Outcome((fake_models.tensor_of("OUTPUT0", "INT32", big),))

    models.dispatcher.functions["many"] = flood
    with Rig(models.dispatcher) as rig:
        slow = rig.client.stream([ask("many", 1)])
        wait_until(lambda: models.given > 4, "answers are made")
        seen = -1
        while seen != models.given:  # until the count stands still
            seen = models.given
            threading.Event().wait(0.5)
        assert seen < 20
        assert [value(m) for m in rig.client.stream([ask("one", 3)])] == [3]
        assert sum(1 for _ in slow) == 100


def test_a_client_that_does_not_read_is_given_up_in_the_end(models: Models) -> None:
    big = np.zeros(1 << 20, np.int32)
    models.dispatcher.functions["many"] = lambda _: (
        Outcome((fake_models.tensor_of("OUTPUT0", "INT32", big),)) for _ in range(1000)
    )
    with Rig(models.dispatcher, send_timeout_s=0.5, min_bytes_per_s=1 << 30) as rig:
        call = rig.client.stream([ask("many", 1)])
        wait_until(lambda: bool(models.dispatcher.calls), "it runs")
        wait_until(lambda: models.dispatcher.calls[0].closed == 1, "it is given up")
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.CANCELLED


def test_streams_have_a_limit(models: Models) -> None:
    with Rig(models.dispatcher, grpc_max_streams=1) as rig:
        sender = Sender()
        first = rig.client.stream(sender)
        sender.send(ask("one", 1))
        next(first)
        with pytest.raises(grpc.RpcError) as caught:
            list(rig.client.stream([ask("one", 1)]))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "grpc_max_streams" in caught.value.details()
        assert rig.client.call("ServerReady").ready
        assert rig.client.infer(ask("one", 4)).outputs
        sender.close()
        assert list(first) == []
        wait_until(lambda: streams_again(rig), "a place for another")


def streams_again(rig: Rig) -> bool:
    try:
        return [value(m) for m in rig.client.stream([ask("one", 9)])] == [9]
    except grpc.RpcError:
        return False


def test_a_drain_finishes_requests_and_refuses_more(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        sender = Sender()
        call = rig.client.stream(sender)
        sender.send(ask("many", 1, "a", gate="g"))
        wait_until(lambda: models.entered == ["a"], "it runs")
        drained = rig.threads.submit(rig.served.drain, WATCHDOG_S)
        wait_until(lambda: refused_within(sender, call), "new requests are refused")
        models.gate("g").set()
        rest: list[Any] = []
        with pytest.raises(grpc.RpcError):
            rest.extend(map(told, call))
        assert ("a", 0, False) in rest
        drained.result(WATCHDOG_S)
        sender.close()


def refused_within(sender: Sender, call: Any) -> bool:
    sender.send(ask("one", 1, "x"))
    return STOPPING in next(call).error_message
