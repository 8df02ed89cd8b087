"""`ensemble_scheduling`: the models of an ensemble, and fields that an ensemble cannot have."""

from __future__ import annotations

from typing import Any

from shmserve import ids
from shmserve.errors import ConfigError
from shmserve.tensor.spec import EnsembleStep

# Fields for models with instances of their own.
_NOT_OF_ENSEMBLES = ("backend", "default_model_filename", "instance_group", "model_warmup")
_LATEST = -1
_MOST_IN_FLIGHT = 1024  # answers of a streaming step


def ensemble_steps(message: Any, model: str) -> tuple[EnsembleStep, ...]:
    """Return the steps of an ensemble's ModelConfig message, in order. Raise ConfigError for a
    wrong field; the text names the field."""
    what = f"ensemble '{model}'"
    for field in _NOT_OF_ENSEMBLES:
        if getattr(message, field):
            raise ConfigError(f"{field} should not be specified for {what}")
    for entry in (*message.input, *message.output):
        if entry.HasField("reshape"):
            raise ConfigError(f"reshape of '{entry.name}' should not be specified for {what}")
    if message.WhichOneof("scheduling_choice") not in (None, "ensemble_scheduling"):
        raise ConfigError(f"{message.WhichOneof('scheduling_choice')} does not go with {what}")
    in_flight = message.ensemble_scheduling.max_inflight_requests
    if in_flight > _MOST_IN_FLIGHT:
        raise ConfigError(
            f"max_inflight_requests {in_flight} of {what} is more than {_MOST_IN_FLIGHT}"
        )
    steps = message.ensemble_scheduling.step
    if not steps:
        raise ConfigError(f"must specify 'step' for {what}")
    return tuple(_step(step, f"step {number} of {what}") for number, step in enumerate(steps))


def _step(step: Any, where: str) -> EnsembleStep:
    for field in ("model_name", "input_map", "output_map"):
        if not getattr(step, field):
            raise ConfigError(f"must specify '{field}' in {where}")
    fault = ids.model_name_fault(step.model_name)
    if fault:
        raise ConfigError(f"model_name in {where} is not a valid model name, {fault}")
    if step.model_version != _LATEST and step.model_version < 1:
        raise ConfigError(
            f"model_version {step.model_version} in {where} is neither -1 (the latest) nor positive"
        )
    version = "" if step.model_version == _LATEST else str(step.model_version)
    inputs, outputs = dict(sorted(step.input_map.items())), dict(sorted(step.output_map.items()))
    if "" in (*inputs, *outputs, *inputs.values(), *outputs.values()):
        raise ConfigError(f"a name in input_map or output_map is empty in {where}")
    return EnsembleStep(step.model_name, version, inputs, outputs)
