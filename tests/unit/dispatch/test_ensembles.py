"""Ensembles through real sockets and shared memory, with executors in threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.coordinator.models.composed_models import composed
from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.core.stats import request_counters
from shmserve.dispatch.attempt import Attempt
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import Cancelled, DeadlineExceeded, InvalidArgument, ModelFailure
from shmserve.executor.backend import Output, Request, Response
from shmserve.tensor.config_document import ConfigDocument
from shmserve.tensor.spec import EnsembleStep, ModelSpec, TensorSpec
from tests.unit.dispatch.test_dispatch import until
from tests.unit.dispatch.test_pipelines import plus, spec
from tests.unit.rig import Model, Rig

Array = np.ndarray[Any, Any]


def tensors(*names: str) -> tuple[TensorSpec, ...]:
    """A name that ends with "?" is optional."""
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


SUM = EnsembleStep("sum", "", {"A": "a", "B": "b"}, {"OUT": "OUT"})


def sums(request: Request) -> Response:
    total = sum(tensor.numpy() for tensor in request.inputs.values())
    return Response((Output("OUT", "FP32", np.asarray(total)),))


class Models:
    """Executors by the name of their model, and ensembles of them."""

    def __init__(self, folder: Path, *ensembles: ModelSpec, **settings: Any) -> None:
        self.rig = Rig(folder, **settings)
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
            slot = call.reserve(array.nbytes)
            slot.view[:] = memoryview(array).cast("B")
            call.add_input(tensor, "FP32", array.shape, slot)
        return call

    def run(self, name: str, inputs: dict[str, Array], **options: Any) -> dict[str, Array]:
        with self.call(name, inputs, **options) as call:
            outputs = call.execute().outputs
            return {o.name: np.frombuffer(bytes(o.view), np.float32) for o in outputs}

    def assert_nothing_held(self) -> None:
        memory = self.rig.dispatcher.memory
        until(lambda: memory.stats().slots == memory.stats().free, "input slots are held")
        until(lambda: not memory.forwarded, "outputs are still passed on")
        for pool in self.rig.dispatcher.executors.pools.values():
            pool.flush()
        for executor in self.rig.executors:
            until(lambda e=executor: not e.memory.rows("slots"), "output slots are held")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    models: list[Models] = []

    def make(*ensembles: ModelSpec, **settings: Any) -> Models:
        models.append(Models(tmp_path, *ensembles, **settings))
        return models[-1]

    yield make
    for each in models:
        each.rig.close()


WIDE = ensemble("e", "IN EXTRA?", "OUT a", step("one", "IN", "a"), step("ten", "EXTRA", "b"), SUM)
BRANCHES = ensemble("e", "IN", "OUT a", step("one", "IN", "a"), step("ten", "IN", "b"), SUM)
ARRAY = np.arange(5000, dtype=np.float32)


@pytest.mark.parametrize("threads", [0, 64])
def test_branches_with_and_without_threads(made: Any, threads: int) -> None:
    models = made(BRANCHES, ensemble_threads=threads)
    models.serve(one=plus(1), ten=plus(10), sum=sums)
    for _ in range(3):
        found = models.run("e", {"IN": ARRAY})
        assert list(found) == ["OUT", "a"]
        np.testing.assert_array_equal(found["OUT"], 2 * ARRAY + 11)
        np.testing.assert_array_equal(found["a"], ARRAY + 1)
    models.assert_nothing_held()


def test_independent_steps_meet(made: Any) -> None:
    both = threading.Barrier(2)

    def meets(number: int) -> Model:
        def model(request: Request) -> Response:
            both.wait(30)
            answer = plus(number)(request)
            assert answer is not None
            return answer

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
    models.assert_nothing_held()


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
    models.assert_nothing_held()


def test_an_ensemble_in_an_ensemble(made: Any) -> None:
    outer = ensemble(
        "outer", "IN", "OUT",
        step("one", "IN", "x"), EnsembleStep("e", "", {"IN": "x"}, {"OUT": "y", "a": "z"}),
        EnsembleStep("sum", "", {"A": "y", "B": "z"}, {"OUT": "OUT"}),
    )  # fmt: skip
    models = made(BRANCHES, outer)
    models.serve(one=plus(1), ten=plus(10), sum=sums)
    np.testing.assert_array_equal(models.run("outer", {"IN": ARRAY})["OUT"], 3 * (ARRAY + 1) + 12)
    models.assert_nothing_held()
    rows = request_counters.read(models.rig.dispatcher.counting.page.words)
    counts = {name: rows[name, "1"].succeeded for name in ("outer", "e", "one", "ten", "sum")}
    assert counts == {"outer": 1, "e": 1, "one": 2, "ten": 1, "sum": 2}


def streams(request: Request) -> None:
    assert request.responses is not None
    for _ in range(2):
        request.responses.send(plus(0)(request))
    request.responses.send(None, final=True)


def slow(request: Request) -> Response | None:
    time.sleep(0.3)
    return plus(1)(request)


STREAM = ensemble("e", "IN", "OUT", step("one", "IN", "a"), step("told", "a", "OUT"))


def test_later_answers_have_as_long_as_those_of_any_stream(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines: list[int] = []
    following = Attempt.next
    monkeypatch.setattr(
        Attempt, "next", lambda self: deadlines.append(self.deadline_ns) or following(self)
    )
    models = made(STREAM)
    models.serve(one=slow, told=streams)
    with models.call("e", {"IN": ARRAY}, timeout_s=30) as call:
        answers = call.stream()
        next(answers)
        from_ns = time.monotonic_ns()
        assert not next(answers).final
    assert deadlines[0] >= from_ns + 30 * 10**9  # not what the steps before have left of it
    models.assert_nothing_held()


def test_a_whole_stream_begins_with_its_first_step(made: Any) -> None:
    models = made(STREAM, stream_timeout_s=0.2)
    models.serve(one=slow, told=streams)
    with models.call("e", {"IN": ARRAY}) as call:
        answers = call.stream()
        next(answers)
        with pytest.raises(DeadlineExceeded, match="stream_timeout_s"):
            next(answers)
    models.assert_nothing_held()


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
    with pytest.raises(ModelFailure, match=r"^in ensemble 'e', step 'ten': no such luck$"):
        models.run("e", {"IN": ARRAY})
    assert ended.wait(30)
    models.assert_nothing_held()
    rows = request_counters.read(models.rig.dispatcher.counting.page.words)
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

        def cancel() -> None:
            begun.acquire(timeout=30)
            begun.acquire(timeout=30)
            call.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(Cancelled):
            call.execute()
        thread.join()
    models.assert_nothing_held()


def test_a_call_that_is_never_run_gives_its_slots_back(made: Any) -> None:
    models = made(BRANCHES)
    models.serve(one=plus(1), ten=plus(10), sum=sums)
    with models.call("e", {"IN": ARRAY}) as call:
        call.reserve(100)
    with models.call("e", {"IN": ARRAY}) as call:
        call.cancel()
        with pytest.raises(Cancelled):
            call.execute()
    models.assert_nothing_held()


def test_a_clients_tensor_that_a_step_cannot_take(made: Any) -> None:
    models = made(ensemble("e", "IN", "OUT", step("four", "IN", "OUT")))
    four = spec("four", inputs=(TensorSpec("IN", "FP32", (4,)),))
    models.entries["four"] = models.rig.serve(plus(1), spec=four)
    models.serve()
    with pytest.raises(InvalidArgument, match=r"step 'four': tensor 'IN' has shape \[5\], but"):
        models.run("e", {"IN": ARRAY[:5]})
    assert models.run("e", {"IN": ARRAY[:4]})["OUT"].size == 4
    models.assert_nothing_held()


def test_a_model_that_is_replaced_by_another_version(made: Any) -> None:
    models = made(ensemble("e", "IN", "OUT", step("one", "IN", "OUT")))
    models.serve(one=plus(1))
    assert models.run("e", {"IN": ARRAY})["OUT"][0] == 1
    newer = models.rig.serve(plus(2), spec=spec("one", version="2"))
    models.entries["one"] = msgspec.structs.replace(newer)
    models.serve()
    assert models.run("e", {"IN": ARRAY})["OUT"][0] == 2
