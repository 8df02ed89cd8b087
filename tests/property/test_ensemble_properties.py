"""Any graph of steps, with ends in any order: each step runs once, with the right inputs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.scheduling import ensemble_graph
from shmserve.core.scheduling.ensemble_progress import ONCE, GraphProgress, Item, Run
from shmserve.errors import ConfigError
from shmserve.tensor.spec import EnsembleStep, ModelSpec, TensorSpec

INPUTS = ("in0", "in1")


@st.composite
def graphs(draw: st.DrawFn, forward_only: bool) -> list[EnsembleStep]:
    """Draw steps that each give one or two new tensors and take some tensors of other steps."""
    count = 7 - draw(st.integers(1, 6))  # rather many
    gives = [[f"{i}.{k}" for k in range(draw(st.integers(1, 2)))] for i in range(count)]
    steps = []
    for index in range(count):
        others = gives[:index] if forward_only else gives
        there = [*(tensor for tensors in reversed(others) for tensor in tensors), *INPUTS]
        takes = draw(st.lists(st.sampled_from(there), min_size=1, max_size=3))
        steps.append(
            EnsembleStep(
                f"m{index}",
                "",
                {f"X{i}": tensor for i, tensor in enumerate(takes)},
                {f"Y{i}": tensor for i, tensor in enumerate(gives[index])},
            )
        )
    return draw(st.permutations(steps))


def spec(steps: list[EnsembleStep], wanted: list[str]) -> ModelSpec:
    def tensors(names: tuple[str, ...]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, "FP32", (-1,)) for name in names)

    inputs, outputs = tensors(INPUTS), tensors(tuple(wanted))
    return ModelSpec("e", "1", "ensemble", "", 0, inputs, outputs, steps=tuple(steps))


def composed(steps: list[EnsembleStep], wanted: list[str], streaming: set[int]) -> ModelSpec:
    """Compose an ensemble in which the steps `streaming` are decoupled.

    Raises:
        ConfigError: a step depends on several decoupled steps.
    """
    whole = spec(steps, wanted)
    models = [
        ModelSpec(s.model, "1", "", "", 0, (), (), decoupled=i in streaming)
        for i, s in enumerate(steps)
    ]
    return ensemble_graph.composed(whole, models)


class PlainRequest:
    """One request by the plain definition: all runs and tensors of the request, kept for ever.

    `answers`: number of answers of each run of a decoupled step.
    """

    def __init__(self, whole: ModelSpec, answers: dict[int, list[int]]) -> None:
        self.runs: dict[int, int] = {}  # step -> number of runs
        # tensor -> number of values; None: one
        self.given: dict[str, int | None] = dict.fromkeys(INPUTS)
        left = dict(enumerate(whole.steps))
        while left:
            index, step = next(
                (i, s) for i, s in left.items() if set(s.inputs.values()) <= self.given.keys()
            )
            del left[index]
            counts = {self.given[t] for t in step.inputs.values()} - {None}
            count = self.runs[index] = counts.pop() if counts else 1
            times: int | None = count if step.behind >= 0 else None
            if step.streams:
                times = sum(answers[index][:count])
            self.given.update(dict.fromkeys(step.outputs.values(), times))
        counts = {self.given[t.name] for t in whole.outputs} - {None}
        self.answers: int = counts.pop() if counts else 1


@given(graphs(forward_only=True), st.data())
def test_every_run_has_its_inputs_in_turn_within_the_bound_and_nothing_is_kept_too_long(
    steps: list[EnsembleStep], data: st.DataObject
) -> None:
    given_by_steps = [tensor for step in steps for tensor in step.outputs.values()]
    wanted = data.draw(st.lists(st.sampled_from(given_by_steps), min_size=1, unique=True))
    numbers = st.integers(0, len(steps) - 1)
    streaming = {data.draw(numbers)} | data.draw(st.sets(numbers, max_size=1))
    ensemble_graph.check_graph(spec(steps, wanted))
    try:
        whole = composed(steps, wanted, streaming)
    except ConfigError as ex:
        assert len(streaming) == 2
        assert "numbers differ" in ex.message  # noqa: PT017
        return
    limit = data.draw(st.integers(1, 3))
    lengths = st.lists(st.sampled_from([4, 3, 2, 1, 0]), min_size=4, max_size=4)
    answers = {index: data.draw(lengths) for index in streaming}
    plain = PlainRequest(whole, answers)
    progress = GraphProgress(whole.steps, INPUTS, wanted, limit)
    there = {(tensor, ONCE) for tensor in INPUTS if any(tensor in s.inputs.values() for s in steps)}
    outputs: set[Item] = set()
    running: list[Run] = []
    begun: list[Run] = []
    ended: set[Run] = set()
    left: dict[Run, int] = {}  # remaining answers of runs of decoupled steps
    delivered = 0
    while running or progress.runnable or progress.answer() is not None:
        number = progress.answer()
        acts = (["take"] if progress.runnable else []) + (["end"] if running else [])
        act = data.draw(st.sampled_from(acts + (["answer"] if number is not None else [])))
        if act == "answer":
            assert number is not None
            for name in wanted:  # each output is there, and is released
                item = (name, number if (name, number) in outputs else ONCE)
                assert item in outputs
                outputs.discard((name, number) if number != ONCE else ("", 0))
            assert number in (ONCE, delivered)
            delivered += 1
            progress.answered(number)
        elif act == "take":
            run = progress.take()
            assert run is not None
            step = whole.steps[run.step]
            if run not in begun:
                assert {progress.item(t, run) for t in step.inputs.values()} <= there
                if step.in_turn and run.number > 0:
                    assert Run(run.step, run.number - 1) in ended
                begun.append(run)
                there.difference_update(progress.began(run))
                left[run] = answers[run.step][max(run.number, 0)] if step.streams else 1
            running.append(run)
        else:
            run = running.pop(data.draw(st.integers(0, len(running) - 1)))
            step = whole.steps[run.step]
            if left[run]:
                left[run] -= 1
                number = progress.gave(run)
                for tensor in step.outputs.values():
                    there |= {(tensor, number)} if tensor in progress.passed else set()
                    outputs |= {(tensor, number)} if tensor in wanted else set()
            if step.streams and (left[run] or data.draw(st.booleans())):
                progress.paused(run)  # perhaps a bare end follows
            else:
                progress.ended(run)
                ended.add(run)
        for index in streaming:
            held = {n for t, n in there if t in whole.steps[index].outputs.values()}
            assert len(held) <= limit
    assert progress.over
    for index, count in plain.runs.items():
        once = whole.steps[index].behind < 0
        expected = [ONCE] if once else list(range(count))
        assert sorted(run.number for run in begun if run.step == index) == expected
    assert delivered == plain.answers
    for tensor, number in there:  # inputs that all runs behind a stream share
        assert number == ONCE
        assert any(s.behind >= 0 for s in whole.steps if tensor in s.inputs.values())


@given(graphs(forward_only=False))
def test_a_graph_that_never_ends_is_refused(steps: list[EnsembleStep]) -> None:
    there, left, before = set(INPUTS), list(steps), -1
    while len(left) != before:  # every step that can run has run: the plain definition
        before = len(left)
        for step in list(left):
            if set(step.inputs.values()) <= there:
                left.remove(step)
                there |= set(step.outputs.values())
    wanted = [next(iter(steps[0].outputs.values()))]
    if left:
        with pytest.raises(ConfigError, match="wait for each other") as refusal:
            ensemble_graph.check_graph(spec(steps, wanted))
        assert all(f"('{step.model}')" in str(refusal.value) for step in left)
    else:
        ensemble_graph.check_graph(spec(steps, wanted))
