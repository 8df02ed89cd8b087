"""Checks of `dynamic_batching`, `batch_input` and `batch_output`: values against each other and
against the rest of the file."""

from __future__ import annotations

from typing import Any

from shmserve._generated import model_config_pb2 as pb
from shmserve.errors import ConfigError

_DELAY = 1  # number of TimeoutAction
_MAX_LEVELS = 1000  # each level has a queue
_COUNTS = ("TYPE_INT32", "TYPE_FP32")


def check_batching(message: Any, model: str) -> None:
    """Check a ModelConfig message.

    Raises:
        ConfigError: a wrong value; the text names field and value.
    """
    where = f"model '{model}': dynamic_batching"
    batching = message.dynamic_batching
    for size in batching.preferred_batch_size:
        # max_batch_size 0 may still be replaced by the model file's value
        if size < 1 or (message.max_batch_size and size > message.max_batch_size):
            raise ConfigError(
                f"{where}.preferred_batch_size {size} is not between 1 "
                f"and max_batch_size {message.max_batch_size}"
            )
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels > _MAX_LEVELS:
        raise ConfigError(f"{where}.priority_levels {levels} is more than {_MAX_LEVELS}")
    if (levels or default) and not 1 <= default <= levels:
        raise ConfigError(
            f"{where}.default_priority_level {default} is not between 1 and "
            f"priority_levels {levels}"
        )
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            raise ConfigError(
                f"{where}.priority_queue_policy {level} is not between 1 and "
                f"priority_levels {levels}"
            )
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if batching.preserve_ordering:
        if levels > 1:
            raise ConfigError(f"{where}: preserve_ordering allows no more than one priority level")
        if any(p.timeout_action == _DELAY and p.default_timeout_microseconds for p in policies):
            raise ConfigError(f"{where}: preserve_ordering does not go with timeout_action DELAY")
    waits = any(_limits(policy) for policy in policies) or levels
    if waits and message.model_transaction_policy.decoupled:
        raise ConfigError(f"{where}: a decoupled model has no priorities and no queue policies")


def _limits(policy: Any) -> bool:
    return bool(
        policy.default_timeout_microseconds
        or policy.allow_timeout_override
        or policy.max_queue_size
    )


def check_batch_tensors(message: Any, model: str) -> None:
    """Check a ModelConfig message.

    Raises:
        ConfigError: a wrong value; the text names field and value.
    """
    if not message.batch_input and not message.batch_output:
        return
    field = "batch_input" if message.batch_input else "batch_output"
    if message.max_batch_size < 1:
        raise ConfigError(f"model '{model}': {field} needs max_batch_size")
    for other in ("sequence_batching", "ensemble_scheduling"):
        if message.HasField(other):
            raise ConfigError(f"model '{model}': {field} does not go with {other}")
    if message.model_transaction_policy.decoupled:
        raise ConfigError(f"model '{model}': {field} does not go with a decoupled model")
    inputs = {tensor.name: tensor for tensor in message.input}
    outputs = {tensor.name: tensor for tensor in message.output}
    taken = set(inputs)
    for entry in message.batch_input:
        _check_source(entry, inputs, f"model '{model}': batch_input")
        if pb.DataType.Name(entry.data_type) not in _COUNTS:
            raise ConfigError(
                f"model '{model}': batch_input.data_type {pb.DataType.Name(entry.data_type)} is "
                f"not {' or '.join(_COUNTS)}"
            )
        for name in entry.target_name:
            if name in taken:
                raise ConfigError(
                    f"model '{model}': batch_input.target_name '{name}' is another input already"
                )
            taken.add(name)
    scattered: set[str] = set()
    for entry in message.batch_output:
        _check_source(entry, inputs, f"model '{model}': batch_output")
        for name in entry.target_name:
            if name not in outputs or name in scattered:
                fault = "is there twice" if name in scattered else "is no output"
                raise ConfigError(f"model '{model}': batch_output.target_name '{name}' {fault}")
            scattered.add(name)
    flat = [inputs[name] for name in inputs if inputs[name].allow_ragged_batch]
    for tensor in [*flat, *(outputs[name] for name in outputs if name in scattered)]:
        if not tensor.data_type or not tensor.dims or tensor.HasField("reshape"):
            raise ConfigError(
                f"model '{model}': '{tensor.name}' needs data_type and dims and no reshape, since "
                f"a model with {field} has it flat"
            )


def _check_source(entry: Any, inputs: dict[str, Any], where: str) -> None:
    """Check an entry of either field: as in Triton, one source input and at least one target."""
    if len(entry.source_input) != 1:
        raise ConfigError(f"{where}: source_input has {len(entry.source_input)} names, not 1")
    if entry.source_input[0] not in inputs:
        raise ConfigError(f"{where}.source_input '{entry.source_input[0]}' is no input")
    if not inputs[entry.source_input[0]].dims:
        raise ConfigError(f"{where}.source_input '{entry.source_input[0]}' needs dims")
    if not entry.target_name or not all(entry.target_name):
        raise ConfigError(f"{where}.target_name is missing")
