"""Pipelines through real sockets and shared memory: copies, and results."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve import config
from shmserve.coordinator.state.publication import composed
from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.core.scheduling import ensemble_graph, pipeline_wiring
from shmserve.core.stats.request_counters import COPIES
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import (
    ConfigError,
    DeadlineExceeded,
    ExecutorLost,
    Internal,
    ModelFailure,
    NotFound,
    Unavailable,
)
from shmserve.executor.backend import Output, Request, Response
from shmserve.tensor.spec import ModelSpec, TensorSpec
from tests.unit.dispatch.test_dispatch import into_offer, its_input, until
from tests.unit.rig import SPEC, Model, Rig, feed

Array = np.ndarray[Any, Any]


def spec(name: str, **changes: Any) -> ModelSpec:
    """A model from IN to OUT."""
    return msgspec.structs.replace(SPEC, name=name, **changes)


def plus(number: int) -> Model:
    """Adds a number, straight into the output slot."""

    def model(request: Request) -> Response:
        source = request.inputs["IN"].numpy()
        target = request.offer("OUT", "FP32", source.shape)
        np.add(source, number, out=target)
        return Response((Output("OUT", "FP32", target),))

    return model


class Line:
    """A rig whose models are the steps of one pipeline, "line"."""

    def __init__(self, rig: Rig, *models: Model) -> None:
        names = tuple("abcdef"[: len(models)])
        self.rig = rig
        self.specs = {name: spec(name) for name in names}
        self.entries = {
            name: self.rig.serve(model, spec=self.specs[name])
            for name, model in zip(names, models, strict=True)
        }
        self.publish(self.entries)

    def publish(self, entries: dict[str, ModelEntry]) -> None:
        loaded = {name: {"1": entry} for name, entry in entries.items()}
        models = composed(loaded, {"line": tuple(self.specs)})
        self.rig.writer.publish(Snapshot("cafe0123", 0, models=models, complete=True))

    def call(self, timeout_s: float | None = None) -> Any:
        entry = self.rig.dispatcher.ready_model("line")
        return self.rig.dispatcher.call(entry, RunOptions(timeout_s=timeout_s))

    def run(self, array: Array, timeout_s: float | None = None) -> tuple[Array, dict[str, Any]]:
        """The answer and the receipt."""
        with self.call(timeout_s) as call:
            feed(call, array)
            (output,) = call.execute().outputs
            assert output.name == "OUT"
            answer = np.frombuffer(bytes(output.view), np.float32).reshape(output.shape)
            return answer, call.receipt.as_dict()


@pytest.fixture
def line(rig_with):
    return lambda *models: Line(rig_with(), *models)


@pytest.mark.parametrize("size", [0, 1, 5000, (1 << 20) + 3])
def test_tensors_stay_in_the_slots_of_who_wrote_them(line: Any, size: int) -> None:
    whole = line(plus(1), plus(10), plus(100))
    array = np.arange(size, dtype=np.float32)
    for _ in range(3):
        answer, receipt = whole.run(array)
        np.testing.assert_array_equal(answer, array + 111)
        assert receipt["copied_bytes"] == {"in": 0, "batch": 0, "out": 0, "device": 0}
        assert receipt["executor"] == "a/1/0, b/1/0, c/1/0"
    whole.rig.assert_nothing_held()


def test_what_the_frontend_copies_counts_for_the_whole(line: Any) -> None:
    whole = line(into_offer, into_offer, into_offer)
    with whole.call() as call:
        feed(call, np.ones(3, np.float32))
        call.receipt.copied_in += 5
        call.execute()
        call.receipt.copied_out += 7
        call.account.answered()
        assert call.receipt.as_dict()["copied_bytes"] == {
            "in": 5, "batch": 0, "out": 7, "device": 0
        }  # fmt: skip
    rows = whole.rig.counts()
    of = {name: rows[name, "1"].copied for name in ("line", "a", "b", "c")}
    assert [copied[COPIES.index("in")] for copied in of.values()] == [5, 0, 0, 0]
    assert [copied[COPIES.index("out")] for copied in of.values()] == [7, 0, 0, 0]


@pytest.mark.parametrize(
    "models", [(its_input, plus(1), its_input), (plus(1), its_input, its_input), (its_input,) * 3]
)
def test_outputs_that_are_inputs_are_passed_on_as_well(line: Any, models) -> None:
    whole = line(*models)
    array = np.arange(5000, dtype=np.float32)
    added = 1 if its_input is not models[0] or its_input is not models[1] else 0
    answer, receipt = whole.run(array)
    np.testing.assert_array_equal(answer, array + added)
    assert receipt["copied_bytes"]["out"] == 0
    whole.rig.assert_nothing_held()


def test_many_threads_at_once(line: Any) -> None:
    whole = line(plus(1), its_input, plus(10))
    wrong: list[object] = []

    def work(seed: int) -> None:
        for i in range(30):
            array = np.full((seed * 997 + i * 131) % 9000 + 1, seed * 100 + i, np.float32)
            if not (whole.run(array)[0] == array + 11).all():
                wrong.append((seed, i))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert not wrong
    whole.rig.assert_nothing_held()


def test_what_a_later_model_keeps_is_not_written_over(line: Any) -> None:
    kept: list[Array] = []

    def keeper(request: Request) -> Response:
        kept.append(request.inputs["IN"].numpy()[1:])
        return into_offer(request)

    whole = line(plus(1), keeper)
    whole.run(np.full(2000, 6, np.float32))
    for value in range(5):
        whole.run(np.full(2000, value, np.float32))
        assert (kept[0] == 7).all()  # the first model wrote its later outputs elsewhere
    memory = whole.rig.dispatcher.memory
    assert memory.forwarded == 6

    def let_go() -> bool:
        kept.clear()
        gc.collect()
        whole.run(np.ones(1, np.float32))  # its answer tells
        return memory.forwarded <= 2

    until(let_go, "outputs that nobody looks at any more are held")


def test_a_deadline_in_a_later_model_keeps_the_earlier_ones_output(line: Any) -> None:
    gate, seen = threading.Event(), list[float]()

    def slow(request: Request) -> Response:
        gate.wait(30)
        seen.append(float(request.inputs["IN"].numpy()[-1]))
        return into_offer(request)

    whole = line(plus(1), slow)
    with pytest.raises(DeadlineExceeded):
        whole.run(np.full(5000, 3, np.float32), timeout_s=2.0)
    memory = whole.rig.dispatcher.memory
    assert memory.forwarded == 1  # the second executor may still read the output
    with whole.rig.dispatcher.call(whole.entries["a"]) as call:  # the first model goes on writing
        feed(call, np.zeros(5000, np.float32))
        call.execute()
    gate.set()
    until(lambda: not memory.forwarded, "the late answer did not let go of the output")
    assert seen == [4.0]
    whole.rig.assert_nothing_held()


def _fails(request: Request) -> Response:
    return Response(error=ModelFailure("no such luck"))


@pytest.mark.parametrize("models", [(_fails, plus(1)), (plus(1), _fails)])
def test_an_error_of_any_model_is_the_pipelines(line: Any, models: tuple[Model, ...]) -> None:
    whole = line(*models)
    with pytest.raises(ModelFailure, match="no such luck"):
        whole.run(np.ones(5000, np.float32))
    whole.rig.assert_nothing_held()


@pytest.mark.parametrize("victim", [0, 1])
def test_an_executors_death_gives_everything_back(line: Any, victim: int) -> None:
    def dies(request: Request) -> Response:
        whole.rig.cut_off(victim)
        return into_offer(request)

    models = [plus(1), plus(1)]
    models[victim] = dies
    whole = line(*models)
    with pytest.raises(ExecutorLost, match=f"executor of model '{'ab'[victim]}' died"):
        whole.run(np.ones(5000, np.float32))
    memory = whole.rig.dispatcher.memory
    assert memory.stats().slots == memory.stats().free
    assert not memory.forwarded


def test_the_first_executors_death_does_not_matter_to_the_second(line: Any) -> None:
    def survives(request: Request) -> Response:
        whole.rig.executors[0].close()
        return plus(1)(request)

    whole = line(plus(1), survives)
    answer, _ = whole.run(np.ones(5000, np.float32))
    assert (answer == 3).all()
    assert not whole.rig.dispatcher.memory.forwarded
    whole.rig.executors.pop(0)


def test_segments_that_are_gone_are_forgotten_by_those_who_were_given_them(line: Any) -> None:
    whole = line(plus(1), plus(1))
    large = np.ones(1 << 19, np.float32)  # has a segment of its own
    whole.run(large)
    whole.rig.assert_nothing_held()
    first, second = whole.rig.executors
    (frontend,) = second.channels._doorway.frontends.values()
    before = set(frontend.segments._mappings)
    assert before
    first.memory.trim(0.0)
    second.memory.trim(0.0)
    for _ in range(2):  # the first answer tells the frontend, the next request the executor
        whole.run(np.ones(3, np.float32))
        gc.collect()
    assert not before & set(frontend.segments._mappings)


def test_no_descriptor_is_left_open(tmp_path) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        whole = Line(Rig(tmp_path), plus(1), plus(1))
        for size in (10, 5000, 2 << 20):
            whole.run(np.ones(size, np.float32))
        whole.rig.close()
        del whole
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 3


def test_a_pipeline_is_a_model_to_frontends(line: Any) -> None:
    whole = line(plus(1), plus(1))
    dispatcher = whole.rig.dispatcher
    entry = dispatcher.model("line")
    assert entry.state is ModelState.READY
    assert [t.name for t in entry.spec.inputs] == ["IN"]
    assert [t.name for t in entry.spec.outputs] == ["OUT"]
    assert entry.spec.platform == "pipeline"
    assert msgspec.json.decode(entry.spec.config.json())["input"][0]["name"] == "IN"
    with pytest.raises(NotFound):
        dispatcher.model("line", "2")
    loading = msgspec.structs.replace(whole.entries["b"], state=ModelState.LOADING)
    whole.publish({**whole.entries, "b": loading})
    assert dispatcher.model("line").reason == "pipeline 'line' depends on 'b', which is loading"
    with pytest.raises(Unavailable):
        dispatcher.ready_model("line")
    whole.publish({"a": whole.entries["a"]})
    with pytest.raises(NotFound, match=r"pipeline 'line' depends on 'b', which is not found"):
        dispatcher.ready_model("line")


def tensor(name: str, datatype: str = "FP32", *shape: int, optional: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, shape or (-1,), optional)


@pytest.mark.parametrize(
    ("outputs", "inputs", "expected"),
    [
        ([tensor("x"), tensor("y")], [tensor("y")], [("y", "y")]),
        ([tensor("x"), tensor("y")], [tensor("p"), tensor("q")], [("x", "p"), ("y", "q")]),
        ([tensor("x")], [tensor("x"), tensor("o", optional=True)], [("x", "x")]),
        ([tensor("x")], [tensor("o", optional=True), tensor("p")], [("x", "p")]),
        ([tensor("x", "FP32", 2, -1)], [tensor("x", "FP32", -1, 3)], [("x", "x")]),
        ([tensor("x"), tensor("y")], [tensor("p")], "neither by name nor by number"),
        ([tensor("x", "INT8")], [tensor("x")], "'x' is INT8 and input 'x' is FP32"),
        (
            [tensor("x", "FP32", 2)],
            [tensor("x", "FP32", 3)],
            r"has shape \[2\] and input 'x' \[3\]",
        ),
        ([tensor("x", "FP32", 2, 2)], [tensor("x")], "has shape"),
    ],
)
def test_how_models_fit(outputs: Any, inputs: Any, expected: Any) -> None:
    giver, taker = spec("a", outputs=tuple(outputs)), spec("b", inputs=tuple(inputs))
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            pipeline_wiring.pipeline("p", [giver, taker])
    else:
        first, second = pipeline_wiring.pipeline("p", [giver, taker]).steps
        between = {tensor: output for output, tensor in first.outputs.items()}
        found = [(between[tensor], name) for name, tensor in second.inputs.items()]
        assert found == expected


def test_a_shape_that_only_shows_when_it_runs(line: Any) -> None:
    def flat(request: Request) -> Response:
        return Response((Output("OUT", "FP32", np.zeros((2, 2), np.float32)),))

    whole = line(flat, plus(1))
    with pytest.raises(Internal, match=r"OUT' has shape \[2, 2\], but input 'IN' of 'b' takes"):
        whole.run(np.ones(3, np.float32))
    whole.rig.assert_nothing_held()
    taker = spec("b", inputs=(TensorSpec("IN", "FP32", (-1, 2)),), max_batch_size=4)
    assert ensemble_graph.misfit(taker, "IN", "OUT", (4, 2)) == ""
    assert "at most 4 in a batch" in ensemble_graph.misfit(taker, "IN", "OUT", (5, 2))


def test_pipelines_in_the_settings(tmp_path) -> None:
    environ = {"SHMSERVE_GRPS_PIPELINES": "one = a, b/2 ; two=c"}
    expected = {"one": ("a", "b/2"), "two": ("c",)}
    assert config.load(environ).pipelines == expected
    for text in (
        '[grps_pipelines]\none = ["a", "b/2"]\ntwo = ["c"]',
        '[grps.pipelines]\none = ["a", "b/2"]\ntwo = ["c"]',
    ):
        (tmp_path / "s.toml").write_text(text)
        found = config.load({"SHMSERVE_CONFIG": str(tmp_path / "s.toml")})
        assert found.pipelines == expected
    for bad in ("a,b", "=a"):
        with pytest.raises(ConfigError, match=r"pipelines"):
            config.load({"SHMSERVE_GRPS_PIPELINES": bad})
    with pytest.raises(ConfigError, match=r"bad setting pipelines.one = \[\] .* one or more"):
        config.load({"SHMSERVE_PIPELINES": "two=a;one="})
    (tmp_path / "s.toml").write_text('[pipelines]\ntwo = ["a"]\none = ["a", 7]')
    with pytest.raises(ConfigError, match=r"bad setting pipelines.one\[1\] = 7 .*s.toml, line 1"):
        config.load({"SHMSERVE_CONFIG": str(tmp_path / "s.toml")})
