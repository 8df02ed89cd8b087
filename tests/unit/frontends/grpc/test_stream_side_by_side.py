"""Requests of one stream side by side: order of answers, sequences, and bounds."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.registry import ModelState
from shmserve.dispatch.outcome import Outcome
from shmserve.frontends.grpc.inference import stream_requests
from shmserve.tensor.config_document import (
    BatchingEntry,
    ConfigDocument,
    QueuePolicyEntry,
    SequenceEntry,
)
from tests import fake_models
from tests.fake_dispatch import FakeRequest
from tests.grpc_client import Rig, Sender
from tests.running_server import WATCHDOG_S, wait_until
from tests.unit.frontends.grpc.test_grpc_stream import Models, ask, told


@pytest.fixture
def models() -> Iterator[Models]:
    made = Models()
    before = threading.active_count()
    yield made
    wait_until(lambda: threading.active_count() <= before, f"threads: {threading.enumerate()}")
    assert all(call.closed == 1 for call in made.dispatcher.calls)


def gated(*ids: str, **parameters: Any) -> list[Any]:
    """Return requests that wait for the gates of their ids; each answers with its number."""
    return [ask("one", n, id, gate=id, **parameters) for n, id in enumerate(ids)]


def entered(models: Models, ids: str) -> None:
    wait_until(lambda: set(models.entered) == set(ids), f"{models.entered}, not {ids}")


def test_requests_meet_at_a_barrier(models: Models) -> None:
    meeting = threading.Barrier(4)

    def meet(request: FakeRequest) -> Outcome:
        meeting.wait(WATCHDOG_S)
        return models.one(request)

    models.dispatcher.functions["one"] = meet
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream([ask("one", n, str(n)) for n in range(8)])
        assert [told(message) for message in call] == [(str(n), n, True) for n in range(8)]


def test_requests_begin_whenever_they_come(models: Models) -> None:
    """The reader runs a request itself only until the next message comes."""
    with Rig(models.dispatcher) as rig:
        sender = Sender()
        call = rig.client.stream(sender)
        for _ in range(2):
            for index, message in enumerate(gated(*"abc"), start=1):
                sender.send(message)
                entered(models, "abc"[:index])
            sender.send(ask("many", 1, "d"))
            assert told(next(call)) == ("d", 0, False)
            for id in "abc":
                models.gate(id).set()
            assert [told(next(call))[0] for _ in range(3)] == [*"abc"]
            sender.send(ask("one", 5, "alone"))
            assert told(next(call)) == ("alone", 5, True)
            models.entered.clear()
            models.gates.clear()
        sender.close()
        assert list(call) == []


def test_answers_keep_the_order_of_requests(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream([*gated(*"abc"), ask("nosuch", 1, "d"), ask("one", -1, "e")])
        answers = rig.threads.submit(lambda: [told(message) for message in call])
        entered(models, "abce")
        for id in "cba":
            assert not answers.done()
            models.gate(id).set()
        got = answers.result(WATCHDOG_S)
    assert got[:3] == [("a", 0, True), ("b", 1, True), ("c", 2, True)]
    assert [answer[0] for answer in got[3:]] == ["d", "e"]
    assert "unknown model" in got[3][1]
    assert got[4][1] == "boom"


def test_decoupled_answers_pass_ordinary_ones(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream([*gated("a"), ask("many", 2, "b"), ask("one", 9, "c")])
        assert [told(next(call)) for _ in range(2)] == [("b", 0, False), ("b", 1, False)]
        models.gate("a").set()
        assert [told(message) for message in call] == [("a", 0, True), ("c", 9, True)]


def test_another_request_begins_once_one_is_answered(models: Models) -> None:
    ids = "abcdefghijklmnopq"  # 17
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream(gated(*ids))
        entered(models, ids[:16])
        models.gate("b").set()  # the answer waits, and keeps the place
        wait_until(lambda: models.dispatcher.calls[1].outcomes == [], "b is not answered")
        assert "q" not in models.entered
        models.gate("a").set()
        assert told(next(call)) == ("a", 0, True)
        entered(models, ids)
        for id in ids[2:]:
            models.gate(id).set()
        assert [told(message)[0] for message in call] == [*ids[1:]]


def test_large_messages_run_with_fewer_beside_them(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_requests, "_LIMIT_BYTES", 1000)
    large = gated(*"abc", padding="x" * 600)
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream(large)
        entered(models, "ab")
        models.gate("a").set()
        assert told(next(call)) == ("a", 0, True)
        entered(models, "abc")
        models.gate("b").set()
        models.gate("c").set()
        assert [told(message)[0] for message in call] == ["b", "c"]


def test_tensors_that_fill_a_callers_share_come_one_after_another(models: Models) -> None:
    """Side by side, the caller's share would refuse requests, which fit in turn."""
    spec = fake_models.spec("wide", "INT32", (-1,))
    running = []

    def wide(request: FakeRequest) -> Outcome:
        running.append(request.id)
        result = Outcome((fake_models.tensor_of("OUTPUT0", "INT32", array),))
        assert running == [request.id]
        running.clear()
        return result

    array = np.zeros(1 << 18, np.int32)  # 1 MiB
    models.dispatcher.functions["wide"] = wide
    models.dispatcher.put(spec, ModelState.READY)
    models.dispatcher.pool_bytes = 8 << 20
    with Rig(models.dispatcher, http_workers=1, grpc_processes=1) as rig:
        call = rig.client.stream([wide_request(array) for _ in range(6)])
        assert [message.error_message for message in call] == [""] * 6


@pytest.mark.parametrize("shape", [(1 << 18,), (-1,)])
def test_answers_that_fill_a_callers_share_wait_for_one_another(models: Models, shape: Any) -> None:
    """The first answer is the last to be known; all the others are larger than the share."""
    spec = fake_models.spec("wide", "INT32", (-1,))
    outputs = tuple(replace(output, shape=shape) for output in spec.outputs)
    array = np.zeros(1 << 18, np.int32)  # 1 MiB

    def wide(request: FakeRequest) -> Outcome:
        models.entered.append(request.id)
        models.gate(min(request.id, "b")).wait(WATCHDOG_S)
        return Outcome((fake_models.tensor_of("OUTPUT0", "INT32", array),))

    models.dispatcher.functions["wide"] = wide
    models.dispatcher.put(replace(spec, outputs=outputs), ModelState.READY)
    models.dispatcher.pool_bytes = 40 << 20
    with Rig(models.dispatcher, http_workers=1, grpc_processes=1) as rig:
        call = rig.client.stream([ask("wide", n, id) for n, id in enumerate("abcdefgh")])
        if shape[0] < 0:
            entered(models, "abcdefgh")
        else:  # the sizes are known before
            wait_until(lambda: bool(models.entered), "no request begins")
            assert "h" not in models.entered
        models.gate("b").set()
        models.gate("a").set()
        assert [message.error_message for message in call] == [""] * 8


def test_a_queue_that_the_model_bounds_is_not_filled_by_a_stream(models: Models) -> None:
    policy = QueuePolicyEntry(max_queue_size=2)
    config = ConfigDocument(dynamic_batching=BatchingEntry(default_queue_policy=policy))
    spec = models.dispatcher.entries["one"]["1"].spec
    models.dispatcher.put(replace(spec, config=config), ModelState.READY)
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream(gated(*"abc"))
        entered(models, "ab")
        models.gate("b").set()  # the answer waits, and the queue has room
        entered(models, "abc")
        for id in "ac":
            models.gate(id).set()
        assert [told(message)[0] for message in call] == [*"abc"]


def test_an_unreadable_message_ends_the_stream_after_earlier_answers(models: Models) -> None:
    with Rig(models.dispatcher, max_request_bytes=10_000) as rig:
        large = ask("one", 1, "b", padding="x" * 20_000)
        packed = grpc.Compression.Gzip  # so that only the unpacked message is too large
        call = rig.client.stream([*gated("a"), large], compression=packed)
        entered(models, "a")
        models.gate("a").set()
        assert told(next(call)) == ("a", 0, True)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_decoupled_request_is_not_the_ordinary_request_of_its_stream(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        rig.served._streams._max_ordinary = 2
        first = rig.client.stream(gated(*"ab"))
        entered(models, "ab")
        sender = Sender()
        second = rig.client.stream(sender)
        sender.send(ask("many", 3, "d", gate="d"))
        entered(models, "abd")
        sender.send(ask("one", 5, "o"))
        entered(models, "abdo")
        for id in "abd":
            models.gate(id).set()
        assert len(list(first)) == 2
        sender.close()
        assert "o" in [told(message)[0] for message in second]


def wide_request(array: Any) -> Any:
    message = ask("wide", 0)
    message.inputs[0].shape[:] = array.shape
    message.raw_input_contents[0] = array.tobytes()
    return message


def test_all_streams_together_have_a_bound_but_each_has_a_place(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        assert rig.served._streams._max_ordinary == Settings().grpc_threads
        rig.served._streams._max_ordinary = 2
        first = rig.client.stream(gated(*"abc"))
        entered(models, "ab")
        second = rig.client.stream(gated(*"xy"))
        entered(models, "abx")
        models.gate("x").set()
        assert told(next(second)) == ("x", 0, True)
        entered(models, "abxy")
        for id in "abcy":
            models.gate(id).set()
        assert [told(message)[0] for message in first] == [*"abc"]
        assert [told(message)[0] for message in second] == ["y"]


@pytest.mark.parametrize("model", ["one", "many"])
def test_a_sequences_requests_keep_their_order(models: Models, model: str) -> None:
    """Requests of a sequence reach the model in turn, beside requests of other sequences."""
    config = ConfigDocument(sequence_batching=SequenceEntry())
    spec = fake_models.spec(model, "INT32", (1,), decoupled=model == "many")
    spec = replace(spec, config=config)
    models.dispatcher.put(spec, ModelState.READY)
    request = partial(ask, model, 1)
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream(
            [
                request("a", gate="a", sequence_id=5),
                request("b", gate="b", sequence_id=5),
                request("c", sequence_id=5),
                request("x", sequence_id="five"),
                request("y", sequence_id=0),
            ]
        )
        entered(models, "axy")
        models.gate("a").set()
        entered(models, "abxy")
        models.gate("b").set()
        assert {told(message)[0] for message in call} == {*"abcxy"}
    assert [id for id in models.entered if id in "abc"] == [*"abc"]


@pytest.mark.parametrize("how", ["cancel", "close", "deadline"])
def test_a_call_that_ends_takes_all_its_requests_along(models: Models, how: str) -> None:
    with Rig(models.dispatcher, grpc_stream_requests=5) as rig:
        sender = Sender()
        timeout = 3.0 if how == "deadline" else None
        call = rig.client.stream(sender, timeout=timeout)
        for message in [
            *gated("a", "b"),
            ask("one", 7, "done"),  # answered behind `a`
            ask("one", 1, "s", gate="a", sequence_id=1),
            ask("one", 1, "t", sequence_id=1),
        ]:
            sender.send(message)
        wait_until(lambda: "done" in models.entered, "the third runs")
        if how == "cancel":
            call.cancel()
        elif how == "close":
            rig.client.close()
        cancelled = models.dispatcher.calls[0]
        wait_until(lambda: cancelled.cancelled, "the first is cancelled")
        for id in "ab":
            models.gate(id).set()
        wait_until(lambda: rig.served.busy == 0, "nothing is left of it")
        sender.close()
        with pytest.raises(grpc.RpcError):
            list(call)
    assert "t" not in models.entered


def test_a_failure_that_ends_the_stream_comes_in_its_turn(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        sent = [*gated("a"), ask("one", -1, "b"), ask("one", 3, "c", gate="c")]
        call = rig.client.stream(sent, metadata=(("triton_grpc_error", "true"),))
        entered(models, "abc")
        models.gate("a").set()
        assert told(next(call)) == ("a", 0, True)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        models.gate("c").set()
        wait_until(lambda: rig.served.busy == 0, "nothing is left of it")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_client_that_does_not_read_leaves_answers_in_their_places(models: Models) -> None:
    big = np.zeros(1 << 20, np.int32)

    def answer(request: FakeRequest) -> Outcome:
        models.entered.append(request.id)
        return Outcome((fake_models.tensor_of("OUTPUT0", "INT32", big),))

    models.dispatcher.functions["one"] = answer
    with Rig(models.dispatcher) as rig:
        call = rig.client.stream([ask("one", 0, str(n)) for n in range(100)])
        wait_until(lambda: len(models.entered) >= 16, "requests run")
        seen = -1
        while seen != len(models.entered):  # until the count stands still
            seen = len(models.entered)
            threading.Event().wait(0.5)
        encoded = [c for c in models.dispatcher.calls if c.outcomes]
        assert seen <= 16 + len(encoded)
        assert len(encoded) < 10
        assert sum(1 for _ in call) == 100


def test_a_drain_finishes_all_running_requests(models: Models) -> None:
    with Rig(models.dispatcher) as rig:
        sender = Sender()
        call = rig.client.stream(sender)
        for message in gated(*"ab"):
            sender.send(message)
        entered(models, "ab")
        drained = rig.threads.submit(rig.served.drain, WATCHDOG_S)
        wait_until(lambda: rig.served._streams.draining, "it drains")
        sender.send(ask("one", 1, "late"))
        models.gate("b").set()
        models.gate("a").set()
        got: list[Any] = []
        with pytest.raises(grpc.RpcError):
            got.extend(map(told, call))
        sender.close()
        drained.result(WATCHDOG_S)
    assert got[:2] == [("a", 0, True), ("b", 1, True)]


def test_a_limit_of_one_runs_requests_one_after_another(models: Models) -> None:
    with Rig(models.dispatcher, grpc_stream_requests=1) as rig:
        call = rig.client.stream(gated(*"ab"))
        entered(models, "a")
        models.gate("a").set()
        assert told(next(call)) == ("a", 0, True)
        entered(models, "ab")
        models.gate("b").set()
        assert told(next(call)) == ("b", 1, True)
