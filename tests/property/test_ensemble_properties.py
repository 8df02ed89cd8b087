"""Any graph of steps, in any order of their ends: each runs once, with what it takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.scheduling import ensemble_graph
from shmserve.core.scheduling.ensemble_graph import GraphProgress
from shmserve.errors import ConfigError
from shmserve.tensor.spec import EnsembleStep, ModelSpec, TensorSpec

INPUTS = ("in0", "in1")


@st.composite
def graphs(draw: st.DrawFn, forward_only: bool) -> list[EnsembleStep]:
    """Each step gives one or two tensors of its own, and takes some that others give."""
    count = draw(st.integers(1, 6))
    gives = [[f"{i}.{k}" for k in range(draw(st.integers(1, 2)))] for i in range(count)]
    steps = []
    for index in range(count):
        others = gives[:index] if forward_only else gives
        there = [*INPUTS, *(tensor for tensors in others for tensor in tensors)]
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


@given(graphs(forward_only=True), st.data())
def test_every_step_runs_once_with_its_inputs_and_nothing_is_kept_too_long(
    steps: list[EnsembleStep], data: st.DataObject
) -> None:
    given_by_steps = [tensor for step in steps for tensor in step.outputs.values()]
    wanted = data.draw(st.lists(st.sampled_from(given_by_steps), min_size=1, unique=True))
    ensemble_graph.check_graph(spec(steps, wanted))
    progress = GraphProgress(steps, wanted)
    there = set(INPUTS)
    runnable, running, began = progress.arrived(INPUTS), [], []
    while runnable or running:
        if runnable and (not running or data.draw(st.booleans())):
            index = runnable.pop(data.draw(st.integers(0, len(runnable) - 1)))
            assert index not in began
            assert set(steps[index].inputs.values()) <= there
            began.append(index)
            running.append(index)
            there -= set(progress.began(index))
        else:
            index = running.pop(data.draw(st.integers(0, len(running) - 1)))
            gives = list(steps[index].outputs.values())
            there |= {tensor for tensor in gives if progress.needed(tensor)}
            runnable += progress.arrived(gives)
    assert sorted(began) == list(range(len(steps)))
    taken = {tensor for step in steps for tensor in step.inputs.values()}
    assert there == set(wanted) | (set(INPUTS) - taken)


@given(graphs(forward_only=False))
def test_a_graph_that_never_ends_is_refused(steps: list[EnsembleStep]) -> None:
    there, left, before = set(INPUTS), list(steps), -1
    while len(left) != before:  # what can run has run: the plain definition
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
