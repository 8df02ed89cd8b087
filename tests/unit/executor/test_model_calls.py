"""Calls from a model to other models: borrowed memory comes back, however the call ends."""

from __future__ import annotations

import gc
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.coordinator.state.publication import composed
from shmserve.core.caller import UNKNOWN_CALLER, caller_number
from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    ModelFailure,
    NotFound,
    QueueFull,
    ResourceExhausted,
    ShmserveError,
    Unavailable,
    Unimplemented,
)
from shmserve.executor.backend import Output, Request, Response
from shmserve.executor.calling import NO_MODELS, CalledTensor, ModelCall
from shmserve.executor.process import model_calls
from shmserve.executor.process.model_calls import ModelCalls
from shmserve.protocol.control.data_messages import CallingModel, Parameter
from shmserve.tensor.spec import EnsembleStep, TensorSpec
from tests.running_server import wait_until
from tests.unit.rig import SPEC, Rig

LARGE = 4 << 20  # elements
STREAM = msgspec.structs.replace(SPEC, decoupled=True, name="s")
IN, OUT = (TensorSpec(name, "BYTES", (-1,)) for name in ("IN", "OUT"))
TEXT = msgspec.structs.replace(SPEC, name="t", inputs=(IN,), outputs=(OUT,))


class Asking:
    """A request on whose behalf a model calls other models."""

    def __init__(
        self,
        *callers: CallingModel,
        deadline_ns: int = 0,
        responses: object = None,
        parameters: dict[str, Parameter] | None = None,
        sequence: SequenceName | None = None,
    ) -> None:
        self.parameters = parameters or {}
        self.sequence = sequence
        self.callers = callers
        self.traceparent = ""
        self.deadline_ns = deadline_ns
        self.responses = responses
        self.cancelled = False


@pytest.fixture
def calls(rig, monkeypatch):
    monkeypatch.setattr(model_calls, "MAX_CALLS", 3)
    monkeypatch.setattr(model_calls, "MAX_DEPTH", 4)
    with closing(ModelCalls(rig.settings, "asking", "asking-0")) as calls:
        yield calls


@pytest.fixture(autouse=True)
def only_references_count():
    """Turn the collector of cycles off: memory must come back without the collector."""
    gc.disable()
    yield
    gc.enable()


def floats(*values: float) -> CalledTensor:
    return CalledTensor("IN", "FP32", np.array(values, np.float32))


def call(model: str = "m", *inputs: CalledTensor, **options: object) -> ModelCall:
    return msgspec.convert(
        {"model": model, "inputs": list(inputs) or [floats(1, 2)], **options}, ModelCall
    )


def double(request: Request) -> Response:
    array = request.inputs["IN"].numpy()
    out = request.offer("OUT", "FP32", array.shape)
    np.multiply(array, 2, out=out)
    return Response((Output("OUT", "FP32", out),))


def echo(request: Request) -> Response:
    return Response((Output("OUT", "FP32", request.inputs["IN"].numpy()),))


def nothing_is_held(rig: Rig, calls: ModelCalls) -> bool:
    calls.settle()
    memories = [e.memory for e in rig.executors]
    if calls._dispatcher is not None:
        memories.append(calls._dispatcher.memory)
    return all(m.stats().slots == m.stats().free for m in memories)


def test_an_output_is_memory_of_the_called_executor(rig: Rig, calls: ModelCalls) -> None:
    rig.serve(double)
    large = CalledTensor("IN", "FP32", np.ones(LARGE, np.float32))
    answer = calls.begin(call("m", large), [Asking()]).next()
    array = answer.outputs[0].array
    assert (array == 2).all()
    assert not array.flags.writeable
    held = rig.executors[0].memory.stats()
    assert (held.leased, held.used_bytes) == (1, array.nbytes)
    part = array[10:20]
    del answer, array
    for _ in range(3):  # borrowed memory is not used for something else
        assert calls.begin(call("m", floats(5)), [Asking()]).next() is not None
    assert part.tolist() == [2.0] * 10
    assert rig.executors[0].memory.stats().used_bytes >= LARGE
    del part
    wait_until(lambda: nothing_is_held(rig, calls), "outputs come back")


def test_an_output_kept_for_long_comes_back_though_nothing_is_called(rig, calls, monkeypatch):
    monkeypatch.setattr("shmserve.dispatch.process.dispatcher._RESTING_S", 3600.0)
    rig.serve(double)
    running = calls.begin(call(), ())
    answer = running.next()
    del running
    dispatcher = calls._dispatcher
    wait_until(lambda: dispatcher.rest.resting, "it does not rest")
    assert rig.executors[0].memory.rows("slots")
    del answer
    wait_until(lambda: not rig.executors[0].memory.rows("slots"), "the output is held")


def test_an_output_that_is_an_input_is_not_copied(rig: Rig, calls: ModelCalls) -> None:
    rig.serve(echo)
    source = np.arange(LARGE, dtype=np.float32)
    answer = calls.begin(call("m", CalledTensor("IN", "FP32", source)), []).next()
    array = answer.outputs[0].array
    assert (array == source).all()
    assert rig.executors[0].memory.stats().used_bytes == 0
    dispatcher = calls._dispatcher
    assert dispatcher.memory.stats().leased == 1
    del answer, array
    wait_until(lambda: nothing_is_held(rig, calls), "outputs come back")


def test_strings_go_both_ways_and_leave_nothing(rig: Rig, calls: ModelCalls) -> None:
    def upper(request: Request) -> Response:
        words = [word.upper() for word in request.inputs["IN"].numpy()]
        return Response((Output("OUT", "BYTES", np.array(words, object)),))

    rig.serve(upper, spec=TEXT)
    words = CalledTensor("IN", "BYTES", np.array([b"ab", "\u00e4"], object))
    answer = calls.begin(call("t", words), []).next()
    assert answer.outputs[0].array.tolist() == [b"AB", "\u00e4".encode()]
    wait_until(lambda: nothing_is_held(rig, calls), "outputs come back")


def wrong_calls() -> list[tuple[ModelCall, type[ShmserveError], str]]:
    whole = CalledTensor("IN", "INT32", np.zeros(2, np.int32))
    return [
        (call("nobody"), NotFound, "unknown model: 'nobody'"),
        (call(version="7"), NotFound, "version 7"),
        (call("m", whole), InvalidArgument, "data-type is 'INT32'"),
        (call("m", floats(1), floats(2)), InvalidArgument, "'IN' already exists"),
        (call(outputs=["NO"]), InvalidArgument, "unexpected inference output 'NO'"),
        (call("s"), Unimplemented, "decoupled"),
        (call(parameters={"timeout": -5}), InvalidArgument, "timeout"),
        (call(parameters={"sequence_id": 5.5}), InvalidArgument, "sequence_id"),
    ]


@pytest.mark.parametrize(("wrong", "kind", "text"), wrong_calls())
def test_a_call_that_does_not_fit_is_refused(rig, calls, wrong, kind, text) -> None:
    rig.serve(double)
    rig.serve(lambda request: None, spec=STREAM)
    with pytest.raises(kind, match=text):
        calls.begin(wrong, [])
    assert nothing_is_held(rig, calls)


def test_an_error_is_raised_and_counted(rig: Rig, calls: ModelCalls) -> None:
    def fail(request: Request) -> Response:
        return Response(error=ModelFailure("no luck"))

    rig.serve(fail)
    with pytest.raises(ModelFailure, match="no luck"):
        calls.begin(call(), [Asking()]).next()
    wait_until(lambda: nothing_is_held(rig, calls), "inputs come back")


def asking(process: str, depth: int = 1, blocked: bool = True) -> Asking:
    return Asking(CallingModel("m", process, depth, blocked))


def test_a_circle_is_told_at_once_and_another_instance_is_taken(rig, calls) -> None:
    entry = rig.serve(double)
    process = entry.instances[0].process
    with pytest.raises(Unavailable, match="all its instances wait for this very call") as told:
        calls.begin(call(), [asking(process)]).next()
    assert "(m -> asking -> m)" in told.value.message
    assert calls.begin(call(), [asking(process, blocked=False)]).next() is not None
    entry = rig.serve(double, double)
    for instance in entry.instances:  # the waiting instance, in either case the other instance
        running = calls.begin(call(), [asking(instance.process)])
        assert running.next() is not None
    assert [executor.loop.executed for executor in rig.executors] == [1, 1, 1]


def test_who_calls_is_told_to_the_called_model(rig: Rig, calls: ModelCalls) -> None:
    seen: list[tuple[CallingModel, ...]] = []

    def note(request: Request) -> Response:
        seen.append(request.callers)
        return echo(request)

    rig.serve(note)
    first, second = asking("a-1", 2), asking("b-1", 3)
    calls.begin(call(), [first, second, first]).next()
    own = CallingModel("asking", "asking-0", 4, True)
    assert seen == [(*first.callers, *second.callers, own)]
    calls.begin(call(), []).next()
    assert seen[1] == (CallingModel("asking", "asking-0", 1, False),)
    with pytest.raises(ResourceExhausted, match="more than 4 models"):
        calls.begin(call(), [asking("a-1", 4)])


def test_a_call_goes_on_in_the_sequence_of_the_request_that_brought_the_id(
    rig: Rig, calls: ModelCalls
) -> None:
    seen: list[tuple[Parameter, SequenceName | None]] = []

    def note(request: Request) -> Response:
        seen.append((request.parameters.get("sequence_id", ""), request.sequence))
        return echo(request)

    rig.serve(note)
    other = Asking(parameters={"sequence_id": 5}, sequence=SequenceName(8, 5))
    # the model knows this owner's sequence 5 by another id
    renamed = Asking(parameters={"sequence_id": 77}, sequence=SequenceName(9, 5))
    for id in (5, 77, 6):
        calls.begin(call(parameters={"sequence_id": id}), [Asking(), other, renamed]).next()
    calls.begin(call(), [other]).next()
    own = SequenceName(caller_number("model", "asking"), 6)
    assert seen == [
        (5, SequenceName(8, 5)),
        (5, SequenceName(9, 5)),
        (6, own),
        ("", None),
    ]


def test_shared_sequences_are_everybodys(rig: Rig) -> None:
    seen: list[SequenceName | None] = []

    def note(request: Request) -> Response:
        seen.append(request.sequence)
        return echo(request)

    rig.serve(note)
    calls = ModelCalls(
        msgspec.structs.replace(rig.settings, shared_sequences=True), "asking", "asking-0"
    )
    calls.begin(call(parameters={"sequence_id": 6}), []).next()
    calls.close()
    assert seen == [SequenceName(UNKNOWN_CALLER, 6)]


def test_a_call_has_what_is_left_of_the_calling_requests_time(rig: Rig, calls: ModelCalls) -> None:
    left = list[float]()

    def note(request: Request) -> Response:
        left.append((request.deadline_ns - time.monotonic_ns()) / 1e9)
        return echo(request)

    rig.serve(note)
    now = time.monotonic_ns()
    soon, later = (Asking(deadline_ns=now + s * 1_000_000_000) for s in (20, 40))
    calls.begin(call(), [soon]).next()
    calls.begin(call(), [soon, later]).next()
    calls.begin(call(timeout_s=10), [later]).next()
    calls.begin(call(), [soon, Asking()]).next()
    calls.begin(call(), [Asking(deadline_ns=soon.deadline_ns, responses=object())]).next()
    bounds = [(0, 20), (20, 40), (0, 10), (40, 60), (40, 60)]
    for got, (least, most) in zip(left, bounds, strict=True):
        assert least < got <= most
    with pytest.raises(DeadlineExceeded, match="the calling request's deadline has passed"):
        calls.begin(call(), [Asking(deadline_ns=1)])


class Gate:
    """A model that works on each request until released or cancelled."""

    def __init__(self) -> None:
        self.running = threading.Event()
        self.open = threading.Event()
        self.cancelled = threading.Event()

    def __call__(self, request: Request) -> Response:
        self.running.set()
        while not self.open.wait(0.01):
            if request.cancelled:
                self.cancelled.set()
                break
        return echo(request)


def test_a_call_ends_with_the_requests_it_is_for(rig: Rig, calls: ModelCalls) -> None:
    gate = Gate()
    rig.serve(gate)
    one, two = Asking(), Asking()
    running = calls.begin(call(), [one, two])
    waiting = running.next_soon()
    assert gate.running.wait(30)
    one.cancelled = True
    assert running.wanted
    two.cancelled = True
    with pytest.raises(Cancelled):
        waiting.result(30)
    assert gate.cancelled.wait(30)
    wait_until(lambda: nothing_is_held(rig, calls), "inputs come back")


def test_calls_are_bounded_and_close_cancels_them(rig: Rig, calls: ModelCalls) -> None:
    gate = Gate()
    rig.serve(gate)
    waiting = [calls.begin(call(), []).next_soon() for _ in range(3)]
    with pytest.raises(QueueFull, match="3 calls under way"):
        calls.begin(call(), [])
    assert gate.running.wait(30)
    wait_until(lambda: rig.executors[0].loop.queued == 2, "the others do not wait")
    calls.close()
    for future in waiting:
        with pytest.raises(Cancelled):
            future.result(30)
    with pytest.raises(Unavailable, match="the calling model is ending"):
        calls.begin(call(), [])


def counted(until: int, fails: bool = False) -> Callable[[Request], None]:
    """Return a decoupled model that counts."""

    def answer(request: Request) -> None:
        responses = request.responses
        for number in range(until):
            out = request.offer("OUT", "FP32", (1,))
            out[:] = number
            responses.send(Response((Output("OUT", "FP32", out),)))
        if fails:
            responses.fail(ModelFailure("lost count"))
        else:
            responses.send(None, final=True)

    return answer


def test_all_answers_of_a_stream_may_be_kept(rig: Rig, calls: ModelCalls) -> None:
    rig.serve(counted(50), spec=STREAM)
    running = calls.begin(call("s", stream=True), [])
    *answers, end = iter(running.next, None)
    assert [a.outputs[0].array.tolist() for a in answers] == [[n] for n in range(50)]
    assert (end.outputs, end.error, running.next()) == ((), None, None)
    del answers
    wait_until(lambda: nothing_is_held(rig, calls), "outputs come back")


def test_a_streams_error_is_raised_after_its_answers(rig: Rig, calls: ModelCalls) -> None:
    rig.serve(counted(1, fails=True), spec=STREAM)

    running = calls.begin(call("s", stream=True), [])
    answer = running.next()
    with pytest.raises(ModelFailure, match="lost count"):
        running.next()
    assert answer.outputs[0].array.tolist() == [0], "it can be read still when the error comes"
    del answer, running
    wait_until(lambda: nothing_is_held(rig, calls), "outputs come back")


def test_an_ordinary_model_may_be_asked_for_a_stream(rig: Rig, calls: ModelCalls) -> None:
    rig.serve(double)
    running = calls.begin(call(stream=True), [])
    answers = list(iter(running.next, None))
    assert [a.outputs[0].array.tolist() for a in answers] == [[2, 4]]


def test_a_stream_that_is_left_is_cancelled(rig: Rig, calls: ModelCalls) -> None:
    rig.serve(counted(10_000), spec=STREAM)
    running = calls.begin(call("s", stream=True), [])
    assert running.next() is not None
    running.abandoned()  # as a finalizer would call: the clean-up is done later
    del running
    wait_until(lambda: nothing_is_held(rig, calls), "everything comes back")
    assert calls.begin(call("s", stream=True), []).next() is not None


def test_cancelling_leaves_the_answers_that_have_come(rig: Rig, calls: ModelCalls) -> None:
    def stay(request: Request) -> None:
        for number in range(3):
            out = request.offer("OUT", "FP32", (1,))
            out[:] = number
            request.responses.send(Response((Output("OUT", "FP32", out),)))
        wait_until(lambda: request.cancelled, "the executor hears of the cancellation")
        request.responses.send(None, final=True)

    rig.serve(stay, spec=STREAM)
    running = calls.begin(call("s", stream=True), [])
    answers = [running.next()]
    inference: Any = running._call
    channel = inference._attempt.unfinished.channel
    running.cancel()
    for _ in range(2):
        assert select.select([channel], [], [], 30)[0]
        answers.append(running.next())
    assert [a.outputs[0].array.tolist() for a in answers] == [[0], [1], [2]]
    with pytest.raises(Cancelled):
        running.next()
    del answers
    wait_until(lambda: nothing_is_held(rig, calls), "outputs come back")


def test_a_cancelled_stream_ends_though_its_model_goes_on(rig: Rig, calls: ModelCalls) -> None:
    rig.serve(counted(10_000), spec=STREAM)
    running = calls.begin(call("s", stream=True), [])
    assert running.next() is not None
    running.cancel()
    with pytest.raises(Cancelled):
        list(iter(running.next, None))
    wait_until(lambda: nothing_is_held(rig, calls), "outputs come back")


def test_a_process_that_the_model_forks_calls_nobody(rig: Rig, calls: ModelCalls) -> None:
    """A forked process would send on the parent's sockets."""
    rig.serve(double)
    begun = calls.begin(call(), [])
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            calls.settle()
            calls.begin(call(), [])
        except Unavailable as ex:
            os.write(writing, ex.message.encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        assert os.read(reading, 1000) == b"a process that the model has forked cannot call models"
    finally:
        os.close(reading)
        os.waitpid(pid, 0)
    assert begun.next() is not None


def test_an_ensemble_may_be_called(rig: Rig, calls: ModelCalls) -> None:
    steps = (
        EnsembleStep("m", "", {"IN": "IN"}, {"OUT": "half"}),
        EnsembleStep("n", "", {"IN": "half"}, {"OUT": "OUT"}),
    )
    line = msgspec.structs.replace(SPEC, name="line", platform="ensemble", steps=steps)
    entry = rig.serve(double)
    rig.serve(double, spec=msgspec.structs.replace(SPEC, name="n"))
    rig.models["line"] = {"1": ModelEntry(line, ModelState.LOADING)}
    rig.writer.publish(Snapshot("cafe0123", 0, models=composed(rig.models, {}), complete=True))
    answer = calls.begin(call("line"), [Asking()]).next()
    assert answer.outputs[0].array.tolist() == [4, 8]
    del answer
    with pytest.raises(Unavailable, match="model 'm' cannot be called"):
        calls.begin(call("line"), [asking(entry.instances[0].process)]).next()
    wait_until(lambda: nothing_is_held(rig, calls), "outputs come back")


def test_what_is_ready(rig: Rig, calls: ModelCalls) -> None:
    rig.serve(double)
    asked = (("m",), ("m", "1"), ("m", "2"), ("nobody",))
    assert [calls.is_ready(*model) for model in asked] == [True, True, False, False]


def test_without_a_server_nothing_can_be_called() -> None:
    with pytest.raises(Unavailable, match="model 'm' cannot be called: no server is running"):
        NO_MODELS.begin(call(), [])
    assert not NO_MODELS.is_ready("m")
    with pytest.raises(Unavailable, match="'m' cannot be loaded"):
        NO_MODELS.load("m", {})
    with pytest.raises(Unavailable, match="'m' cannot be unloaded"):
        NO_MODELS.unload("m")
