"""Checks of `dynamic_batching`: values against each other and against the rest of the file."""

from __future__ import annotations

from typing import Any

from shmserve.errors import ConfigError

_DELAY = 1  # number of TimeoutAction
_MAX_LEVELS = 1000  # each level has a queue


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
