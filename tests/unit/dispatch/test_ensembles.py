"""Ensembles through real sockets and shared memory, with executors in threads."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.coordinator.state.publication import composed
from shmserve.core.memory.slots import SlotState
from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.core.scheduling.ensemble_progress import ONCE
from shmserve.dispatch.calls.attempt import Attempt
from shmserve.dispatch.calls.step_call import StepTensor
from shmserve.dispatch.ensembles import ensemble_call
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.dispatch.process import dispatcher
from shmserve.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    ModelFailure,
    QueueFull,
    WorkLost,
)
from shmserve.executor.backend import Output, Request, Response
from shmserve.tensor.config_document import ConfigDocument
from shmserve.tensor.spec import EnsembleStep, ModelSpec, TensorSpec
from tests.unit.dispatch.test_dispatch import caller_that_sees, until
from tests.unit.dispatch.test_pipelines import plus, spec
from tests.unit.rig import Model, Rig, feed

Array = np.ndarray[Any, Any]


def tensors(*names: str) -> tuple[TensorSpec, ...]:
    """Return tensor specs; a name that ends with "?" is optional."""
    return tuple(TensorSpec(n.rstrip("?"), "FP32", (-1,), n.endswith("?")) for n in names)


def ensemble(name: str, inputs: str, outputs: str, *steps: EnsembleStep) -> ModelSpec:
    return ModelSpec(
        *(name, "1", "ensemble", "ensemble", 0, tensors(*inputs.split())),
        tensors(*outputs.split()),
        config=ConfigDocument(name),
        steps=steps,
    )


def step(model: str, takes: str, gives: str) -> EnsembleStep:
    return EnsembleStep(model, "", {"IN": takes}, {"OUT": gives})


SUM = EnsembleStep("sum", "", {"A": "a", "B": "b"}, {"OUT": "OUT"})  # B is optional
SUM_OF_B = EnsembleStep("sum", "", {"A": "b", "B": "a"}, {"OUT": "OUT"})


def sums(request: Request) -> Response:
    total = sum(tensor.numpy() for tensor in request.inputs.values())
    return Response((Output("OUT", "FP32", np.asarray(total)),))


class Models:
    """Executors by model name, and ensembles of the models."""

    def __init__(self, rig: Rig, *ensembles: ModelSpec) -> None:
        self.rig = rig
        self.ensembles = ensembles
        self.entries: dict[str, ModelEntry] = {}

    def serve(self, **models: Model) -> None:
        for name, model in models.items():
            inputs = tensors("A", "B?") if name == "sum" else tensors("IN")
            told = spec(name, inputs=inputs, decoupled=name == "told")
            self.entries[name] = self.rig.serve(model, spec=told)
        loaded = {name: {entry.spec.version: entry} for name, entry in self.entries.items()}
        loaded |= {e.name: {"1": ModelEntry(e, ModelState.LOADING)} for e in self.ensembles}
        models_ = composed(loaded, {})
        self.rig.writer.publish(Snapshot("cafe0123", 0, models=models_, complete=True))

    def call(self, name: str, inputs: dict[str, Array], **options: Any) -> Any:
        dispatcher = self.rig.dispatcher
        call = dispatcher.call(dispatcher.ready_model(name), RunOptions(**options), True)
        for tensor, array in inputs.items():
            feed(call, array, tensor)
        return call

    def run(self, name: str, inputs: dict[str, Array], **options: Any) -> dict[str, Array]:
        with self.call(name, inputs, **options) as call:
            outputs = call.execute().outputs
            return {o.name: np.frombuffer(bytes(o.view), np.float32) for o in outputs}


@pytest.fixture
def made(rig_with, monkeypatch):
    def make(*ensembles: ModelSpec, threads: int = 64, **settings: Any) -> Models:
        monkeypatch.setattr(dispatcher, "STEP_THREADS", threads)
        return Models(rig_with(**settings), *ensembles)

    return make


WIDE = ensemble("e", "IN EXTRA?", "OUT a", step("one", "IN", "a"), step("ten", "EXTRA", "b"), SUM)
BRANCHES = ensemble("e", "IN", "OUT a", step("one", "IN", "a"), step("ten", "IN", "b"), SUM)
ARRAY = np.arange(5000, dtype=np.float32)


@pytest.mark.parametrize("threads", [0, 64])
def test_branches_with_and_without_threads(made: Any, threads: int) -> None:
    models = made(BRANCHES, threads=threads)
    models.serve(one=plus(1), ten=plus(10), sum=sums)
    for _ in range(3):
        found = models.run("e", {"IN": ARRAY})
        assert list(found) == ["OUT", "a"]
        np.testing.assert_array_equal(found["OUT"], 2 * ARRAY + 11)
        np.testing.assert_array_equal(found["a"], ARRAY + 1)
    models.rig.assert_nothing_held()


def test_a_step_that_is_sent_has_begun(made: Any, monkeypatch) -> None:
    """If another step then cannot run, the ensemble's request must not look as if it had not
    begun."""
    begun, failed = threading.Event(), threading.Event()
    after_restart = Attempt._after_restart

    def late(*arguments: Any) -> Any:
        assert begun.wait(30)
        return after_restart(*arguments)

    def waits(request: Request) -> Response:
        begun.set()
        assert failed.wait(30)
        return plus(1)(request)

    def unavailable(request: Request) -> Response:
        raise AssertionError

    monkeypatch.setattr(Attempt, "_after_restart", late)
    models = made(BRANCHES, restart_wait_s=0.5)
    models.serve(one=waits, ten=unavailable, sum=sums)
    models.rig.executors.pop(1).close()
    with pytest.raises(WorkLost, match="other steps have begun") as caught:
        models.run("e", {"IN": ARRAY})
    assert not caught.value.retry_after_s
    failed.set()


def test_a_refusal_of_the_only_step_that_was_sent_is_none_of_others(made: Any, monkeypatch) -> None:
    """Also for an ensemble inside: steps count in the ensemble that sends them."""
    wait = Attempt._wait

    def refused(*arguments: Any) -> Any:
        answer = wait(*arguments)
        if arguments[1].instance.name.startswith("ten"):
            text: Any = {"error": "full", "error_code": Code.UNAVAILABLE}
            return msgspec.structs.replace(answer, refused=True, **text)
        return answer

    monkeypatch.setattr(Attempt, "_wait", refused)
    inner = ensemble("inner", "IN", "OUT", step("one", "IN", "OUT"))
    alone = ensemble("alone", "IN", "OUT", step("ten", "IN", "OUT"))
    outer = ensemble("outer", "IN", "OUT", step("inner", "IN", "a"), step("alone", "a", "OUT"))
    models = made(inner, alone, outer)
    models.serve(one=plus(1), ten=plus(10))
    with pytest.raises(QueueFull, match=r"full \(step 'ten'\)") as caught:
        models.run("alone", {"IN": ARRAY})
    assert caught.value.retry_after_s
    with pytest.raises(WorkLost, match="other steps have begun"):
        models.run("outer", {"IN": ARRAY})


def test_independent_steps_meet(made: Any) -> None:
    both = threading.Barrier(2)

    def meets(number: int) -> Model:
        def model(request: Request) -> Response:
            both.wait(30)
            return plus(number)(request)

        return model

    models = made(BRANCHES)
    models.serve(one=meets(1), ten=meets(10), sum=sums)
    np.testing.assert_array_equal(models.run("e", {"IN": ARRAY})["OUT"], 2 * ARRAY + 11)


def test_an_optional_input(made: Any) -> None:
    optional = ensemble(
        "e", "IN EXTRA?", "OUT", step("one", "IN", "a"),
        EnsembleStep("sum", "", {"A": "a", "B": "EXTRA"}, {"OUT": "OUT"}),
    )  # fmt: skip
    models = made(optional)
    models.serve(one=plus(1), sum=sums)
    np.testing.assert_array_equal(models.run("e", {"IN": ARRAY})["OUT"], ARRAY + 1)
    found = models.run("e", {"IN": ARRAY, "EXTRA": ARRAY})
    np.testing.assert_array_equal(found["OUT"], 2 * ARRAY + 1)
    models.rig.assert_nothing_held()


def test_a_step_may_leave_out_what_a_later_step_can_do_without(made: Any) -> None:
    def one_of_two(request: Request) -> Response:
        return Response((Output("OUT", "FP32", ARRAY),))

    pair = EnsembleStep("two", "", {"IN": "IN"}, {"OUT": "a", "MORE": "b"})
    needs_b = ensemble("n", "IN", "OUT", pair, SUM_OF_B)
    models = made(ensemble("e", "IN", "OUT", pair, SUM), needs_b)
    two = spec("two", outputs=tensors("OUT", "MORE"))
    models.entries["two"] = models.rig.serve(one_of_two, spec=two)
    models.serve(sum=sums)
    np.testing.assert_array_equal(models.run("e", {"IN": ARRAY})["OUT"], ARRAY)
    with pytest.raises(Internal, match=r"the model gave no output 'MORE' \(step 'two'\)"):
        models.run("n", {"IN": ARRAY})
    models.rig.assert_nothing_held()


def test_what_an_answer_says_of_sequences_is_not_said_to_the_next_step(made: Any) -> None:
    told: list[dict[str, Any]] = []

    def says(request: Request) -> Response:
        tag: dict[str, Any] = {"sequence_id": 5, "sequence_start": True}
        return Response((Output("OUT", "FP32", ARRAY),), parameters=tag)

    def hears(request: Request) -> Response:
        told.append(dict(request.parameters))
        return Response((Output("OUT", "FP32", ARRAY),))

    models = made(ensemble("e", "IN", "OUT", step("says", "IN", "a"), step("hears", "a", "OUT")))
    models.serve(says=says, hears=hears)
    models.run("e", {"IN": ARRAY})
    assert told == [{}]


def test_only_what_is_asked_for_is_computed_and_given(made: Any) -> None:
    asked: list[tuple[str, ...]] = []

    def two(request: Request) -> Response:
        asked.append(request.requested)
        return Response(tuple(Output(name, "FP32", ARRAY) for name in request.requested))

    pair = EnsembleStep("two", "", {"IN": "IN"}, {"OUT": "a", "MORE": "b"})
    models = made(ensemble("e", "IN", "a b", pair))
    models.entries["two"] = models.rig.serve(two, spec=spec("two", outputs=tensors("OUT", "MORE")))
    models.serve()
    assert list(models.run("e", {"IN": ARRAY}, outputs=("b",))) == ["b"]
    assert list(models.run("e", {"IN": ARRAY})) == ["a", "b"]
    assert asked == [("MORE",), ("OUT", "MORE")]
    models.rig.assert_nothing_held()


def test_runs_are_counted_by_batch_with_the_times_of_the_steps(made: Any) -> None:
    inner = ensemble("inner", "IN", "OUT", step("one", "IN", "a"), step("ten", "a", "OUT"))
    outer = ensemble("outer", "IN", "OUT", step("inner", "IN", "a"), step("slow", "a", "OUT"))
    models = made(inner, msgspec.structs.replace(outer, max_batch_size=8))
    models.serve(one=plus(1), ten=plus(10), slow=slow)
    for rows in (1, 3, 3):
        models.run("outer", {"IN": np.zeros((rows,), np.float32)})
    with pytest.raises(DeadlineExceeded):
        models.run("outer", {"IN": ARRAY}, timeout_s=0.1)
    counts = models.rig.counts()
    outside, inside = (counts[name, "1"].batches for name in ("outer", "inner"))
    assert {size: values[1] for size, values in outside.items()} == {1: 1, 3: 2}
    assert inside[1][1] >= 3
    for last_ms, _, _, *stages_ns in (*outside.values(), *inside.values()):
        assert last_ms > 0
        assert min(stages_ns) > 0
    assert outside[3][4] >= 2 * 0.3e9, "the slow step's time in `infer`"
    models.rig.assert_nothing_held()


def test_an_ensemble_in_an_ensemble(made: Any) -> None:
    outer = ensemble(
        "outer", "IN", "OUT",
        step("one", "IN", "x"), EnsembleStep("e", "", {"IN": "x"}, {"OUT": "y", "a": "z"}),
        EnsembleStep("sum", "", {"A": "y", "B": "z"}, {"OUT": "OUT"}),
    )  # fmt: skip
    models = made(BRANCHES, outer)
    models.serve(one=plus(1), ten=plus(10), sum=sums)
    np.testing.assert_array_equal(models.run("outer", {"IN": ARRAY})["OUT"], 3 * (ARRAY + 1) + 12)
    models.rig.assert_nothing_held()
    rows = models.rig.counts()
    counts = {name: rows[name, "1"].succeeded for name in ("outer", "e", "one", "ten", "sum")}
    assert counts == {"outer": 1, "e": 1, "one": 2, "ten": 1, "sum": 2}


def streams(request: Request) -> None:
    for _ in range(2):
        request.responses.send(plus(0)(request))
    request.responses.send(None, final=True)


def slow(request: Request) -> Response | None:
    time.sleep(0.3)
    return plus(1)(request)


STREAM = ensemble("e", "IN", "OUT", step("one", "IN", "a"), step("told", "a", "OUT"))


def test_later_answers_have_as_long_as_those_of_any_stream(made: Any, monkeypatch) -> None:
    deadlines: list[int] = []
    following = Attempt.next
    monkeypatch.setattr(
        Attempt, "next", lambda self, *due: deadlines.append(due[0]) or following(self, *due)
    )
    models = made(STREAM)
    models.serve(one=slow, told=streams)
    with models.call("e", {"IN": ARRAY}, timeout_s=30) as call:
        answers = call.stream()
        next(answers)
        from_ns = time.monotonic_ns()
        assert not next(answers).final
    assert deadlines[0] >= from_ns + 30 * 10**9  # not the remaining time after earlier steps
    models.rig.assert_nothing_held()


def test_a_whole_stream_begins_with_its_first_step(made: Any, monkeypatch) -> None:
    monkeypatch.setattr(ensemble_call, "_GRACE_S", 30.0)  # the first answer is late, too
    models = made(STREAM, stream_timeout_s=0.2)
    models.serve(one=slow, told=streams)
    with models.call("e", {"IN": ARRAY}) as call:
        answers = call.stream()
        next(answers)
        with pytest.raises(DeadlineExceeded, match="stream_timeout_s"):
            next(answers)
    models.rig.assert_nothing_held()


def test_an_error_ends_the_steps_beside_it(made: Any) -> None:
    begun = threading.Event()
    ended = threading.Event()

    def waits(request: Request) -> Response:
        begun.set()
        until(lambda: request.cancelled, "nobody has cancelled it")
        ended.set()
        return Response(error=ModelFailure("late"))

    def fails(request: Request) -> Response:
        begun.wait(30)
        return Response(error=ModelFailure("no such luck"))

    models = made(BRANCHES)
    models.serve(one=waits, ten=fails, sum=sums)
    with pytest.raises(ModelFailure, match=r"^in ensemble 'e', no such luck \(step 'ten'\)$"):
        models.run("e", {"IN": ARRAY})
    assert ended.wait(30)
    models.rig.assert_nothing_held()
    rows = models.rig.counts()
    assert rows["e", "1"].failed == 1
    assert ("sum", "1") not in rows


def test_cancelling_ends_all_that_run(made: Any) -> None:
    begun = threading.Semaphore(0)

    def waits(request: Request) -> Response:
        begun.release()
        until(lambda: request.cancelled, "nobody has cancelled it")
        return Response(error=ModelFailure("late"))

    models = made(BRANCHES)
    models.serve(one=waits, ten=waits, sum=sums)
    with models.call("e", {"IN": ARRAY}) as call:
        thread = caller_that_sees(Cancelled, call.execute)
        for _ in range(2):
            assert begun.acquire(timeout=30)
        call.cancel()
        thread.join()
    models.rig.assert_nothing_held()


def test_a_call_that_is_never_run_gives_its_slots_back(made: Any) -> None:
    models = made(BRANCHES)
    models.serve(one=plus(1), ten=plus(10), sum=sums)
    with models.call("e", {"IN": ARRAY}) as call:
        call.reserve(100)
    with models.call("e", {"IN": ARRAY}) as call:
        call.cancel()
        with pytest.raises(Cancelled):
            call.execute()
    models.rig.assert_nothing_held()


def test_a_clients_tensor_that_a_step_cannot_take(made: Any) -> None:
    models = made(ensemble("e", "IN", "OUT", step("four", "IN", "OUT")))
    four = spec("four", inputs=(TensorSpec("IN", "FP32", (4,)),))
    models.entries["four"] = models.rig.serve(plus(1), spec=four)
    models.serve()
    with pytest.raises(InvalidArgument, match=r"tensor 'IN' has shape \[5\], but.*step 'four'"):
        models.run("e", {"IN": ARRAY[:5]})
    assert models.run("e", {"IN": ARRAY[:4]})["OUT"].size == 4
    models.rig.assert_nothing_held()


def test_a_model_that_is_replaced_by_another_version(made: Any) -> None:
    models = made(ensemble("e", "IN", "OUT", step("one", "IN", "OUT")))
    models.serve(one=plus(1))
    assert models.run("e", {"IN": ARRAY})["OUT"][0] == 1
    newer = models.rig.serve(plus(2), spec=spec("one", version="2"))
    models.entries["one"] = msgspec.structs.replace(newer)
    models.serve()
    assert models.run("e", {"IN": ARRAY})["OUT"][0] == 2


def counts(request: Request) -> None:
    """Answer n times, n being the first element: with n, n + 1, …; then an end without outputs."""
    first = request.inputs["IN"].numpy()[0]
    for number in range(int(first)):
        array = np.full(3, first + number, np.float32)
        request.responses.send(Response((Output("OUT", "FP32", array),)))
    request.responses.send(None, final=True)


def streamed(models: Models, inputs: dict[str, Array], **options: Any) -> list[list[float]]:
    """Return the first elements of the outputs of each answer; the last answer is final and
    carries no outputs."""
    with models.call("e", inputs, **options) as call:
        found = list[list[float]]()
        final = False
        for answer in call.stream():
            assert not final
            final = answer.final
            firsts = [float(np.frombuffer(o.view, np.float32)[0]) for o in answer.outputs]
            found += [firsts] if firsts else []
        assert final
        return found


TWO = np.full(3, 2, np.float32)
# Behind a stream: two branches that meet, with a tensor from outside of the stream
MIDDLE = ensemble(
    "e", "IN", "OUT once",
    step("one", "IN", "once"), step("told", "IN", "a"), step("ten", "a", "b"),
    EnsembleStep("sum", "", {"A": "b", "B": "once"}, {"OUT": "OUT"}),
)  # fmt: skip
NESTED = ensemble(
    "e", "IN", "OUT", step("told", "IN", "a"), step("one", "a", "b"), step("told", "b", "c"),
    step("ten", "c", "OUT"),
)  # fmt: skip


@pytest.mark.parametrize("threads", [0, 1, 64])
def test_steps_behind_one_that_streams(made: Any, threads: int) -> None:
    models = made(MIDDLE, threads=threads)
    models.serve(one=plus(1), told=counts, ten=plus(10), sum=sums)
    for _ in range(3):
        assert streamed(models, {"IN": TWO}) == [[15, 3], [16, 3]]
    assert streamed(models, {"IN": TWO}, outputs=("once",)) == [[3]]
    assert streamed(models, {"IN": 0 * TWO}) == []
    models.rig.assert_nothing_held()
    rows = models.rig.counts()
    assert {name: rows[name, "1"].succeeded for name in ("e", "told", "ten", "sum", "one")} == {
        "e": 5, "told": 5, "ten": 8, "sum": 8, "one": 5,
    }  # fmt: skip


def test_nothing_is_kept_of_answers_that_nobody_wants(made: Any) -> None:
    streams = ensemble("e", "IN", "OUT once", step("one", "IN", "once"), step("told", "IN", "OUT"))
    models = made(streams)
    models.serve(one=plus(1), told=counts)
    with models.call("e", {"IN": 100 * TWO}, outputs=("once",)) as call:
        assert sum(bool(answer.outputs) for answer in call.stream()) == 1
        assert len(call._steps.tensors._answers) <= 1
    models.rig.assert_nothing_held()


@pytest.mark.parametrize("threads", [0, 64])
def test_a_stream_behind_a_stream_keeps_its_order(made: Any, threads: int) -> None:
    models = made(NESTED, threads=threads)
    models.serve(told=counts, one=plus(1), ten=plus(10))
    # 2, 3, plus one: three from 3 on, and four from 4 on
    expected = [[n + 10.0] for n in (3, 4, 5, 4, 5, 6, 7)]
    assert streamed(models, {"IN": TWO}) == expected
    models.rig.assert_nothing_held()


def test_no_more_answers_are_on_their_way_than_may_be(made: Any) -> None:
    scheduling = ConfigDocument("e", ensemble_scheduling={"max_inflight_requests": 2})
    bounded = ensemble("e", "IN", "OUT", step("told", "IN", "a"), step("one", "a", "OUT"))
    models = made(msgspec.structs.replace(bounded, config=scheduling), stream_credit=1)
    models.serve(told=counts, one=plus(1))
    memory = models.rig.dispatcher.memory
    with models.call("e", {"IN": np.full(3, 20, np.float32)}) as call:
        found = 0
        for answer in call.stream():
            found += len(answer.outputs)
            assert memory.forwarded <= 4  # a tensor between the steps and an output, of each
        assert found == 20
    models.rig.assert_nothing_held()


def fails_at(number: float) -> Model:
    def model(request: Request) -> Response | None:
        if request.inputs["IN"].numpy()[0] == number:
            return Response(error=ModelFailure("no such luck"))
        return plus(1)(request)

    return model


CHAIN = ensemble("e", "IN", "OUT", step("told", "IN", "a"), step("one", "a", "OUT"))


def test_an_error_behind_a_stream_ends_it(made: Any) -> None:
    ended = threading.Event()

    def endless(request: Request) -> None:
        responses = request.responses
        while not request.cancelled:
            responses.send(Response((Output("OUT", "FP32", TWO),)))
        responses.send(None, final=True)
        ended.set()

    models = made(CHAIN)
    models.serve(told=endless, one=fails_at(2))
    with pytest.raises(ModelFailure, match=r"^in ensemble 'e', no such luck \(step 'one'\)$"):
        streamed(models, {"IN": TWO})
    assert ended.wait(30)
    models.rig.assert_nothing_held()
    rows = models.rig.counts()
    assert (rows["e", "1"].failed, rows["told", "1"].failed) == (1, 1)


def test_who_leaves_a_stream_cancels_what_is_in_flight(made: Any) -> None:
    first, begun, ended = threading.Event(), threading.Event(), threading.Event()

    def told(request: Request) -> None:
        request.responses.send(plus(0)(request))
        first.wait(30)  # its executor has one thread: the second must not come before it
        request.responses.send(plus(1)(request), final=True)

    def waits(request: Request) -> Response | None:
        if request.inputs["IN"].numpy()[0] == 2:
            first.set()
            return plus(1)(request)
        begun.set()
        until(lambda: request.cancelled, "nobody has cancelled it")
        ended.set()
        return Response(error=ModelFailure("late"))

    models = made(CHAIN)
    models.serve(told=told, one=waits)
    with models.call("e", {"IN": TWO}) as call:
        answers = call.stream()
        next(answers)
        assert begun.wait(30)
    assert ended.wait(30)
    with pytest.raises(DeadlineExceeded, match=r"in ensemble 'e', .*step 'one'"):
        streamed(models, {"IN": TWO}, timeout_s=2)
    models.rig.assert_nothing_held()


def test_an_error_of_one_answer_of_the_last_step_leaves_the_others(made: Any) -> None:
    def told(request: Request) -> None:
        request.responses.send(Response(error=ModelFailure("no such luck")))
        request.responses.send(plus(1)(request), final=True)

    models = made(STREAM)
    models.serve(one=plus(1), told=told)
    with models.call("e", {"IN": TWO}) as call:
        first, second = ((a.error, a.final) for a in call.stream())
    assert "in ensemble 'e', no such luck (step 'told')" in str(first[0])
    assert (first[1], second) == (False, (None, True))
    models.rig.assert_nothing_held()


class OneOutput:
    """A call whose model gives only the first output."""

    def __init__(self, tensor: StepTensor) -> None:
        self._tensor = tensor

    def give(self, name: str) -> StepTensor | None:
        return self._tensor if name == "OUT" else None


def test_a_step_that_gives_too_little_has_given_nothing(made: Any) -> None:
    both = EnsembleStep("both", "", {"IN": "IN"}, {"OUT": "a", "MORE": "b"})
    models = made(ensemble("e", "IN", "OUT", both, SUM_OF_B))
    told = spec("both", outputs=tensors("OUT", "MORE"))
    models.entries["both"] = models.rig.serve(plus(1), spec=told)
    models.serve(sum=sums)
    memory = models.rig.dispatcher.memory
    with models.call("e", {"IN": ARRAY}) as call:
        steps = call._steps
        run = steps.progress.take()
        slot = memory.reserve(4)
        memory.seal_and_lease(slot)
        given: Any = OneOutput(StepTensor("FP32", (1,), slot))
        with pytest.raises(Internal, match="no output 'MORE'"):
            steps._keep(run, given, Outcome((), {}))
        assert steps.progress.runnable == 0
        assert (slot.state, steps.tensors.get(("a", ONCE))) == (SlotState.FREE, None)
        steps.progress.ended(run)
