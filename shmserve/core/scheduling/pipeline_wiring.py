"""Pipelines: ensembles of consecutive steps, each fed with the outputs of the step before.

Outputs are matched to inputs by name if every required input has an output of its name, else by
position.
"""

import itertools
from collections.abc import Sequence

from msgspec import Struct

from shmserve.core.scheduling.ensemble_graph import PIPELINE, may_fit
from shmserve.errors import ConfigError
from shmserve.tensor.config_document import ConfigDocument
from shmserve.tensor.spec import EnsembleStep, ModelSpec, TensorSpec


class Joint(Struct, frozen=True):
    """Connection of a model's output to an input of the next model."""

    output: str
    input: str


def pipeline(name: str, models: Sequence[ModelSpec]) -> ModelSpec:
    """Return the ensemble of these models, with the inputs of the first and the outputs of the
    last. Raise ConfigError if two consecutive models do not fit, with both and the tensors."""
    joints = [_join(name, giver, taker) for giver, taker in itertools.pairwise(models)]
    first, last = models[0], models[-1]
    takes = [{t.name: t.name for t in first.inputs}]
    gives = []
    for number, joint in enumerate(joints):
        # Differs from every input name of a client; an equal name would denote the input.
        between = {j.output: f"'{name}' after step {number}: {j.output}" for j in joint}
        takes.append({j.input: between[j.output] for j in joint})
        gives.append(between)
    gives.append({t.name: t.name for t in last.outputs})
    return ModelSpec(
        name=name,
        version="1",
        platform=PIPELINE,
        backend=PIPELINE,
        max_batch_size=first.max_batch_size,
        inputs=first.inputs,
        outputs=last.outputs,
        config=ConfigDocument(name=name, platform=PIPELINE),
        steps=tuple(
            EnsembleStep(model.name, model.version, taken, given)
            for model, taken, given in zip(models, takes, gives, strict=True)
        ),
    )


def _join(pipeline: str, giver: ModelSpec, taker: ModelSpec) -> list[Joint]:
    what = f"pipeline '{pipeline}': '{giver.name}' does not lead to '{taker.name}'"
    pairs = _pairs(giver.outputs, taker.inputs)
    if pairs is None:
        raise ConfigError(
            f"{what}: outputs {_names(giver.outputs)} are neither by name nor by number "
            f"inputs {_names(taker.inputs)}"
        )
    for source, target in pairs:
        if source.datatype != target.datatype:
            raise ConfigError(
                f"{what}: output '{source.name}' is {source.datatype} and input "
                f"'{target.name}' is {target.datatype}"
            )
        if not may_fit(source.shape, target.shape):
            raise ConfigError(
                f"{what}: output '{source.name}' has shape {list(source.shape)} and input "
                f"'{target.name}' {list(target.shape)}"
            )
    return [Joint(source.name, target.name) for source, target in pairs]


def _pairs(
    outputs: Sequence[TensorSpec], inputs: Sequence[TensorSpec]
) -> list[tuple[TensorSpec, TensorSpec]] | None:
    by_name = {output.name: output for output in outputs}
    named = [(by_name[taken.name], taken) for taken in inputs if taken.name in by_name]
    if named and all(taken.optional or taken.name in by_name for taken in inputs):
        return named
    needed = [taken for taken in inputs if not taken.optional]
    if outputs and len(outputs) == len(needed):
        return list(zip(outputs, needed, strict=True))
    return None


def _names(tensors: Sequence[TensorSpec]) -> str:
    return "[" + ", ".join(f"'{tensor.name}'" for tensor in tensors) + "]"
