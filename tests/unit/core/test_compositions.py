"""The state of an ensemble as derived from the ensemble's models."""

from typing import Any

import msgspec
import pytest

from shmserve.core.control import compositions
from shmserve.core.control.compositions import Models
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, require_ready
from shmserve.core.scheduling import pipeline_wiring
from shmserve.errors import NotFound
from shmserve.tensor.spec import ModelSpec
from tests.unit.core.test_ensemble_graph import ensemble, model, step, tensor

LOADING, READY, UNAVAILABLE = ModelState.LOADING, ModelState.READY, ModelState.UNAVAILABLE


def entry(
    name: str, state: ModelState = READY, version: str = "3", **changes: Any
) -> dict[str, dict[str, ModelEntry]]:
    live = (LiveInstance(f"{name}/{version}/0", f"p-{name}", f"{name}.sock", 1),)
    spec = model(name, version=version, **changes)
    return {name: {version: ModelEntry(spec, state, live if state is READY else (), "why")}}


def loaded(name: str, *steps: Any) -> Models:
    spec = ensemble(*steps, name=name)
    return {name: {"1": ModelEntry(spec, LOADING)}}


CHAIN = loaded("e", step("IN", "a"), step("a", "OUT", "n"))


def decided(models: Models, name: str = "e") -> ModelEntry:
    return compositions.compose(models)[name]["1"]


def test_it_is_ready_while_all_of_its_models_are() -> None:
    found = decided(CHAIN | entry("m") | entry("n"))
    assert (found.state, found.reason) == (READY, "")
    assert [instance.name for instance in found.instances] == ["m/3/0", "n/3/0"]
    restarting = entry("n")
    restarting["n"]["3"] = msgspec.structs.replace(restarting["n"]["3"], instances=())
    found = decided(CHAIN | entry("m") | restarting)
    assert (found.state, found.instances) == (READY, ())


@pytest.mark.parametrize(
    ("models", "state", "reason"),
    [
        (entry("m"), UNAVAILABLE, "ensemble 'e' depends on 'n', which is not found"),
        (entry("m") | entry("n", LOADING), LOADING, "depends on 'n', which is loading"),
        (
            entry("m") | entry("n", UNAVAILABLE), UNAVAILABLE,
            "depends on 'n', which is not ready (why)",
        ),
        (entry("m") | entry("n", inputs=(tensor("Z"),)), UNAVAILABLE, "has no input 'X'"),
    ],
)  # fmt: skip
def test_it_says_what_it_waits_for(models: Models, state: ModelState, reason: str) -> None:
    found = decided(CHAIN | models)
    assert found.state is state
    assert reason in found.reason


def test_versions() -> None:
    both = entry("m", version="9", inputs=(tensor("Z"),), state=UNAVAILABLE)
    both["m"] |= entry("m", version="10", state=LOADING)["m"] | entry("m")["m"]
    found = decided(CHAIN | both | entry("n"))
    assert [each.version for each in found.spec.steps] == ["3", "3"]  # the newest that is ready
    named = loaded("e", msgspec.structs.replace(step("IN", "OUT"), version="9"))
    assert "depends on 'm' version 9, which is not ready" in decided(named | both).reason


def test_ensembles_of_ensembles() -> None:
    outer = loaded("o", _of("e"))
    assert decided(outer | CHAIN | entry("m") | entry("n"), "o").state is READY
    assert decided(outer | CHAIN | entry("m", LOADING) | entry("n"), "o").state is LOADING
    circle = loaded("a", _of("b")) | loaded("b", _of("a")) | loaded("s", _of("s"))
    for name in ("a", "b", "s"):
        assert decided(circle, name).state is UNAVAILABLE
    assert decided(circle, "s").reason == "ensemble 's' is a step of itself"


def _of(name: str) -> Any:
    return msgspec.structs.replace(
        step("IN", "OUT", name), inputs={"IN": "IN"}, outputs={"OUT": "OUT"}
    )


def test_an_unloaded_ensemble_stays_unloaded() -> None:
    gone = msgspec.structs.replace(CHAIN["e"]["1"], state=UNAVAILABLE, reason="unloaded")
    assert decided({"e": {"1": gone}} | entry("m") | entry("n")) == gone


def test_pipelines_are_there_beside_models() -> None:
    setting = {"p": ("m", "n/3"), "m": ("n",), "q": ("n", "z")}
    made = compositions.with_pipelines(entry("m") | entry("n"), setting, _pipeline)
    assert made["p"]["1"].state is READY
    assert made["m"] == entry("m")["m"]  # a model of that name comes first
    reason = "pipeline 'q' depends on 'z', which is not found"
    assert (made["q"]["1"].state, made["q"]["1"].reason) == (UNAVAILABLE, reason)
    with pytest.raises(NotFound, match=f"'q' has no available versions: {reason}"):
        require_ready(made["q"]["1"], "")
    misfit = entry("m") | entry("n", inputs=(tensor("Y", datatype="INT8"),))
    (found,) = compositions.with_pipelines(misfit, setting, _pipeline)["p"].values()
    assert found.reason.startswith("pipeline 'p': 'm' does not lead to 'n': output 'Y' is FP32")


def _pipeline(name: str, models: Any) -> ModelSpec:
    return pipeline_wiring.pipeline(name, models)


def test_problems_of_what_is_to_be_loaded() -> None:
    spec = CHAIN["e"]["1"].spec
    assert compositions.problems(entry("m") | entry("n"), "e", [spec]) == {}
    found = compositions.problems(entry("m"), "e", [spec])
    assert found == {"1": "ensemble 'e' depends on 'n', which is not found"}
