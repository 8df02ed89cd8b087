"""Requirements on an ensemble: steps, and the models named by the steps."""

from typing import Any

import msgspec
import pytest

from shmserve.core.scheduling import ensemble_graph
from shmserve.errors import ConfigError
from shmserve.tensor.config_document import ConfigDocument, SequenceEntry
from shmserve.tensor.spec import EnsembleStep, ModelSpec, TensorSpec


def tensor(name: str, *shape: int, datatype: str = "FP32", **more: Any) -> TensorSpec:
    return TensorSpec(name, datatype, shape or (-1,), **more)


def model(name: str = "m", **changes: Any) -> ModelSpec:
    """From X to Y."""
    spec = ModelSpec(name, "3", "python", "python", 0, (tensor("X"),), (tensor("Y"),))
    return msgspec.structs.replace(spec, **changes)


def step(takes: str, gives: str, name: str = "m") -> EnsembleStep:
    return EnsembleStep(name, "", {"X": takes}, {"Y": gives})


def ensemble(*steps: EnsembleStep, **changes: Any) -> ModelSpec:
    """From IN to OUT."""
    spec = ModelSpec(
        *("e", "1", "ensemble", "ensemble", 0, (tensor("IN"),), (tensor("OUT"),)), steps=steps
    )
    return msgspec.structs.replace(spec, **changes)


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([step("IN", "a"), step("a", "OUT")], ""),
        ([step("a", "OUT"), step("IN", "a")], ""),
        ([step("IN", "OUT"), step("IN", "unused")], ""),
        ([step("b", "OUT")], r"step 0 \('m'\) takes tensor 'b', which is neither an input"),
        ([step("IN", "a")], "output 'OUT' is not the output of any step"),
        ([step("IN", "OUT"), step("IN", "OUT")], "'OUT' is given twice, by step 0 .* by step 1"),
        ([step("IN", "IN"), step("IN", "OUT")], "'IN' is given twice, by the request"),
        ([step("b", "a"), step("a", "b"), step("IN", "OUT")], r"wait for .*: step 0 .*, step 1 "),
        ([step("a", "a"), step("a", "OUT")], "wait for each other's outputs: step 0"),
    ],
)  # fmt: skip
def test_steps(steps: list[EnsembleStep], problem: str) -> None:
    if problem:
        with pytest.raises(ConfigError, match=f"ensemble 'e': .*{problem}"):
            ensemble_graph.check_graph(ensemble(*steps))
    else:
        ensemble_graph.check_graph(ensemble(*steps))


def test_an_output_that_is_an_input_is_given_by_no_step() -> None:
    with pytest.raises(ConfigError, match="output 'IN' is not the output of any step"):
        ensemble_graph.check_graph(ensemble(step("IN", "a"), outputs=(tensor("IN"),)))


CHAIN = (step("IN", "a"), step("a", "OUT", "n"))


@pytest.mark.parametrize(
    ("first", "second", "changes", "problem"),
    [
        ({}, {}, {}, ""),
        ({"outputs": (tensor("Y", 4),)}, {}, {}, ""),
        ({"outputs": (tensor("Z"),)}, {}, {}, r"step 0 \('m'\) has no output 'Y'"),
        ({"inputs": (tensor("Z"),)}, {}, {}, r"step 0 \('m'\) has no input 'X'"),
        (
            {"inputs": (tensor("X"), tensor("Z"))}, {}, {},
            "step 0 .* must have input 'Z', which input_map lacks",
        ),
        ({"inputs": (tensor("X"), tensor("Z", optional=True))}, {}, {}, ""),
        (
            {}, {"inputs": (tensor("X", datatype="INT8"),)}, {},
            r"step 1 \('n'\): input 'X' is INT8, and tensor 'a' is FP32",
        ),
        (
            {"outputs": (tensor("Y", 4),)}, {"inputs": (tensor("X", 5),)}, {},
            r"step 1 .*: input 'X' has shape \[5\], and tensor 'a' \[4\]",
        ),
        ({}, {"outputs": (tensor("Y", 2, 2),)}, {}, r"output 'OUT' has shape \[-1\], and tensor"),
        ({}, {"outputs": (tensor("Y", datatype="BYTES"),)}, {}, "output 'OUT' is FP32, and"),
        (
            {}, {}, {"inputs": (tensor("IN", optional=True),)},
            "step 0 .* must have input 'X', and tensor 'IN' is optional",
        ),
        (
            {"inputs": (tensor("X", optional=True),)}, {},
            {"inputs": (tensor("IN", optional=True),)}, "",
        ),
        ({"max_batch_size": 4}, {}, {"max_batch_size": 4}, ""),
        (
            {}, {"max_batch_size": 3}, {"max_batch_size": 4},
            "step 1 .* takes batches of at most 3, the ensemble of 4",
        ),
        ({}, {"decoupled": True}, {}, ""),
        ({"decoupled": True}, {}, {}, ""),
    ],
)  # fmt: skip
def test_models(first, second, changes, problem) -> None:
    spec, models = ensemble(*CHAIN, **changes), (model(**first), model("n", **second))
    if problem:
        with pytest.raises(ConfigError, match=f"ensemble 'e': {problem}"):
            ensemble_graph.check_models(spec, models)
    else:
        ensemble_graph.check_models(spec, models)


def test_what_an_ensemble_has_of_its_models() -> None:
    labelled = model("n", outputs=(tensor("Y", labels=("cat", "dog")),), decoupled=True)
    off = model(parameters={"client_shm_mode": "off"})
    found = ensemble_graph.composed(ensemble(*CHAIN, config=ConfigDocument("e")), (off, labelled))
    assert found.output("OUT") == tensor("OUT", labels=("cat", "dog"))
    assert found.decoupled
    assert found.config.model_transaction_policy == msgspec.structs.replace(
        found.config.model_transaction_policy,
        decoupled=True,  # type: ignore[type-var]
    )
    assert found.parameters["client_shm_mode"] == "off"
    assert [each.version for each in found.steps] == ["3", "3"]
    own = ensemble(*CHAIN, outputs=(tensor("OUT", labels=("a",)),))
    assert ensemble_graph.composed(own, (model(), labelled)).outputs[0].labels == ("a",)


@pytest.mark.parametrize(
    ("steps", "last"),
    [
        ([step("IN", "a"), step("a", "OUT")], 1),
        ([step("a", "OUT"), step("IN", "a")], 0),
        ([step("IN", "OUT"), step("OUT", "b")], None),
    ],
)
def test_the_last_step_gives_all_and_to_nobody_else(steps, last) -> None:
    assert ensemble_graph.last_step(ensemble(*steps)) == last


def linked(name: str, takes: str, gives: str, **changes: Any) -> tuple[EnsembleStep, ModelSpec]:
    """Return a step with an input for each tensor in `takes`, and the step's model."""
    inputs = {f"X{i}": tensor_ for i, tensor_ in enumerate(takes.split())}
    spec = model(name, inputs=tuple(tensor(x) for x in inputs), **changes)
    return EnsembleStep(name, "", inputs, {"Y": gives}), spec


SEQUENCES = ConfigDocument(sequence_batching=SequenceEntry())
SPLITS = linked("splits", "IN", "part", decoupled=True)


def test_what_is_behind_a_decoupled_step() -> None:
    pairs = (
        linked("joins", "part once", "OUT"),
        linked("once", "IN", "once"),
        linked("state", "part", "unused", config=SEQUENCES),
        SPLITS,
        linked("again", "part", "words", decoupled=True),
        linked("last", "words", "more"),
    )
    steps, models = zip(*pairs, strict=True)
    whole = ensemble(*steps)
    ensemble_graph.check_models(whole, models)
    found = ensemble_graph.composed(whole, models)
    assert found.decoupled
    assert [(s.streams, s.behind, s.in_turn) for s in found.steps] == [
        (False, 3, False), (False, -1, False), (False, 3, True), (True, -1, True),
        (True, 3, True), (False, 4, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pair", "who"),
    [
        (linked("joins", "part other", "OUT"), r"step 0 \('joins'\) takes"),
        (linked("passes", "part", "OUT"), "an answer would consist of"),
    ],
)
def test_tensors_of_two_decoupled_steps_do_not_meet(pair, who) -> None:
    steps, models = zip(pair, SPLITS, linked("again", "IN", "other", decoupled=True), strict=True)
    outputs = (tensor("OUT"), tensor("other"))[: 2 if who.startswith("an") else 1]
    with pytest.raises(ConfigError, match=f"'e': {who} .*'splits'.*'again'.*decoupled"):
        ensemble_graph.check_models(ensemble(*steps, outputs=outputs), models)  # type: ignore[arg-type]


def test_a_model_that_is_asked_by_message_streams_only_at_the_end() -> None:
    project = model("p", decoupled=True, parameters={"grps": "message"})
    first = ensemble_graph.composed(ensemble(*CHAIN), (project, model()))
    assert not first.decoupled
    assert ensemble_graph.composed(ensemble(*CHAIN), (model(), project)).decoupled
