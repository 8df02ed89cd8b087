"""Ensemble graph: checks that the models of an ensemble fit, and finds the steps that stream.

The models of an ensemble answer one request together. The tensors of an ensemble have names of
their own. Each step is a model, and maps the model's inputs and outputs to tensors of the ensemble
(`tensor.spec.EnsembleStep`). A pipeline is an ensemble of consecutive steps
(`core.scheduling.pipeline_wiring`).
"""

from collections.abc import Iterable, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from shmserve import extensions
from shmserve.errors import ConfigError
from shmserve.tensor.config_document import TransactionEntry
from shmserve.tensor.spec import EnsembleStep, ModelSpec, TensorSpec, fits

ENSEMBLE, PIPELINE = "ensemble", "pipeline"  # platforms of specs with steps


def check_graph(spec: ModelSpec) -> None:
    """Check that inputs and steps supply every tensor needed by the steps and by the ensemble's
    outputs. Raise ConfigError with the missing or doubly supplied tensor, or the steps that wait
    for each other."""
    what = f"ensemble '{spec.name}'"
    giver = {tensor.name: "the request" for tensor in spec.inputs}
    for number, step in enumerate(spec.steps):
        for tensor in step.outputs.values():
            if tensor in giver:
                raise ConfigError(
                    f"{what}: tensor '{tensor}' is given twice, by {giver[tensor]} and "
                    f"by {_step(number, step)}"
                )
            giver[tensor] = _step(number, step)
    for number, step in enumerate(spec.steps):
        for tensor in step.inputs.values():
            if tensor not in giver:
                raise ConfigError(
                    f"{what}: {_step(number, step)} takes tensor '{tensor}', which is neither "
                    "an input of the ensemble nor the output of a step"
                )
    for output in spec.outputs:
        if giver.get(output.name, "the request") == "the request":
            raise ConfigError(f"{what}: output '{output.name}' is not the output of any step")
    waiting = sorted(set(range(len(spec.steps))).difference(_in_order(spec)))
    if waiting:
        names = ", ".join(_step(number, spec.steps[number]) for number in waiting)
        raise ConfigError(f"{what}: steps wait for each other's outputs: {names}")


def _in_order(spec: ModelSpec) -> list[int]:
    """Return the steps, each after the suppliers of its inputs. Steps which can never run are
    missing."""
    available = {tensor.name for tensor in spec.inputs}
    remaining, order = dict(enumerate(spec.steps)), list[int]()
    while runnable := [
        i for i, step in remaining.items() if available.issuperset(step.inputs.values())
    ]:
        for index in runnable:
            available.update(remaining.pop(index).outputs.values())
        order += runnable
    return order


def check_models(spec: ModelSpec, models: Sequence[ModelSpec]) -> None:
    """Check the models of the steps (in step order) against the ensemble's declarations. Raise
    ConfigError with the step and the tensor that do not fit."""
    inputs = {tensor.name: tensor for tensor in spec.inputs}
    given = dict(inputs)
    for number, (step, model) in enumerate(zip(spec.steps, models, strict=True)):
        where = f"ensemble '{spec.name}': {_step(number, step)}"
        if 0 < model.max_batch_size < spec.max_batch_size:
            raise ConfigError(
                f"{where} takes batches of at most {model.max_batch_size}, the ensemble of "
                f"{spec.max_batch_size}"
            )
        for name, tensor in step.outputs.items():
            output = model.output(name)
            if output is None:
                raise ConfigError(f"{where} has no output '{name}'")
            given[tensor] = output
    for number, (step, model) in enumerate(zip(spec.steps, models, strict=True)):
        where = f"ensemble '{spec.name}': {_step(number, step)}"
        for name, tensor in step.inputs.items():
            taken = model.input(name)
            if taken is None:
                raise ConfigError(f"{where} has no input '{name}'")
            if given[tensor].optional and not taken.optional:
                raise ConfigError(
                    f"{where} must have input '{name}', and tensor '{tensor}' is optional"
                )
            _check_same(f"{where}: input '{name}'", taken, tensor, given[tensor])
        missing = [t.name for t in model.inputs if not t.optional and t.name not in step.inputs]
        if missing:
            raise ConfigError(f"{where} must have input '{missing[0]}', which input_map lacks")
    for output in spec.outputs:
        what = f"ensemble '{spec.name}': output '{output.name}'"
        _check_same(what, output, output.name, given[output.name])
    _streaming(spec, models)


def _check_same(what: str, expected: TensorSpec, tensor: str, given: TensorSpec) -> None:
    if expected.datatype != given.datatype:
        raise ConfigError(
            f"{what} is {expected.datatype}, and tensor '{tensor}' is {given.datatype}"
        )
    if not may_fit(given.shape, expected.shape):
        raise ConfigError(
            f"{what} has shape {list(expected.shape)}, and tensor '{tensor}' {list(given.shape)}"
        )


def _streaming(spec: ModelSpec, models: Sequence[ModelSpec]) -> tuple[EnsembleStep, ...]:
    """Return the steps with their streaming attributes (`streams`, `behind`, `in_turn`), as their
    models imply."""
    last = last_step(spec)
    # A model with native requests streams only on demand, and only the last step is asked to.
    asked = extensions.names(extensions.NATIVE_REQUESTS).keys()
    steps = list(spec.steps)
    # tensor -> streaming step, or -1
    streams: dict[str, int] = {tensor.name: -1 for tensor in spec.inputs}
    for index in _in_order(spec):
        step, model = steps[index], models[index]
        decoupled = model.decoupled and (index == last or asked.isdisjoint(model.parameters))
        behind = _one_stream(spec, streams, step.inputs.values(), f"{_step(index, step)} takes")
        sequences = model.config.sequence_batching is not UNSET
        in_turn = decoupled or sequences or any(inner.in_turn for inner in model.steps)
        steps[index] = replace(step, streams=decoupled, behind=behind, in_turn=in_turn)
        for tensor in step.outputs.values():  # in a pipeline, an output may have an input's name
            streams[tensor] = index if decoupled else behind
    outputs = [output.name for output in spec.outputs]
    _one_stream(spec, streams, outputs, "an answer would consist of")
    return tuple(steps)


def _one_stream(spec: ModelSpec, streams: dict[str, int], tensors: Iterable[str], who: str) -> int:
    """Return the streaming step from which all these tensors come, or -1."""
    tensor_by_stream = {streams[tensor]: tensor for tensor in tensors if streams[tensor] >= 0}
    if len(tensor_by_stream) > 1:
        (one, first), (other, second), *_ = sorted(tensor_by_stream.items())
        raise ConfigError(
            f"ensemble '{spec.name}': {who} tensors '{first}' and '{second}', whose numbers differ:"
            f" they come from the answers of {_step(one, spec.steps[one])} and of "
            f"{_step(other, spec.steps[other])}, which are decoupled"
        )
    return next(iter(tensor_by_stream), -1)


def last_step(spec: ModelSpec) -> int | None:
    """Return the step which supplies all outputs and feeds no other step, or None."""
    if spec.platform == PIPELINE:  # a pipeline's inputs and outputs may have the same names
        return len(spec.steps) - 1
    outputs = {tensor.name for tensor in spec.outputs}
    for number, step in enumerate(spec.steps):
        given = set(step.outputs.values())
        others = (s for other, s in enumerate(spec.steps) if other != number)
        if given >= outputs and given.isdisjoint(t for s in others for t in s.inputs.values()):
            return number
    return None


def composed(spec: ModelSpec, models: Sequence[ModelSpec]) -> ModelSpec:
    """Return the ensemble with the properties of its models filled in: versions, labels of
    outputs, decoupled or not, and whether client memory may be used."""
    labels = {
        tensor: output.labels
        for step, model in zip(spec.steps, models, strict=True)
        for name, tensor in step.outputs.items()
        if (output := model.output(name)) is not None
    }
    outputs = tuple(replace(o, labels=o.labels or labels.get(o.name, ())) for o in spec.outputs)
    steps = _streaming(spec, models)
    decoupled = any(step.streams for step in steps)
    config = spec.config
    if decoupled or config.model_transaction_policy is not UNSET:
        config = replace(config, model_transaction_policy=TransactionEntry(decoupled))
    parameters = spec.parameters
    if any(model.parameters.get("client_shm_mode") == "off" for model in models):
        parameters = {**parameters, "client_shm_mode": "off"}
    return replace(
        spec,
        outputs=outputs,
        decoupled=decoupled,
        config=config,
        parameters=parameters,
        steps=tuple(
            replace(step, version=model.version) for step, model in zip(steps, models, strict=True)
        ),
    )


def may_fit(source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return True if a tensor can have both shapes; -1 matches any size."""
    return len(source) == len(target) and all(
        -1 in (size, other) or size == other for size, other in zip(source, target, strict=True)
    )


def misfit(taker: ModelSpec, name: str, tensor: str, shape: tuple[int, ...]) -> str:
    """Return why a model cannot take a tensor of this shape as input `name`, or "" if it can."""
    expected = taker.input(name)
    if expected is not None and fits(expected.shape, shape) and not _too_many(taker, shape):
        return ""
    batch_limit = f" and at most {taker.max_batch_size} in a batch" if taker.max_batch_size else ""
    takes = list(expected.shape) if expected is not None else "nothing"
    return (
        f"tensor '{tensor}' has shape {list(shape)}, but input '{name}' of '{taker.name}' "
        f"takes {takes}{batch_limit}"
    )


def _too_many(taker: ModelSpec, shape: tuple[int, ...]) -> bool:
    return 0 < taker.max_batch_size < (shape[0] if shape else 0)


def _step(number: int, step: EnsembleStep) -> str:
    return f"step {number} ('{step.model}')"
