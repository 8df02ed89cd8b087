"""Which fields of config.pbtxt are supported: a table, and a walk that refuses the rest.

The walk goes over every field that is set, so a field that a later schema adds is
refused until somebody lists it here. A message is listed before its fields: an empty
`response_cache {}` or an explicit `allow_ragged_batch: false` say nothing and pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from shmserve.errors import ConfigError

SUPPORTED = frozenset(
    {
        "name",
        "platform",
        "backend",
        "version_policy",
        "version_policy.latest",
        "version_policy.latest.num_versions",
        "version_policy.all",
        "version_policy.specific",
        "version_policy.specific.versions",
        "max_batch_size",
        "input",
        "input.name",
        "input.data_type",
        "input.dims",
        "input.optional",
        "output",
        "output.name",
        "output.data_type",
        "output.dims",
        "output.label_filename",
        "optimization",
        "instance_group",
        "instance_group.name",
        "instance_group.kind",
        "instance_group.count",
        "default_model_filename",
        "parameters",
        "parameters.string_value",
        "model_transaction_policy",
        "model_transaction_policy.decoupled",
        "response_cache",
    }
)

# What to tell about a refused field besides that it is not supported
HINTS = {
    "instance_group.gpus": "it needs the gpu extra, which is not available",
    "dynamic_batching": "requests run one by one; leave the field out",
    "ensemble_scheduling": "call the models one after the other",
}


def refuse_unsupported(config: Message, model: str) -> None:
    """Check every field that is set against the table.

    Raises:
        ConfigError: it names the first field that is not supported.
    """
    for path in _set_fields(config, ""):
        if path not in SUPPORTED:
            hint = f" ({HINTS[path]})" if path in HINTS else ""
            raise ConfigError(f"model '{model}': {path} is not supported{hint}")


def _set_fields(message: Message, prefix: str) -> Iterator[str]:
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        yield path
        for child in _messages(field, value):
            yield from _set_fields(child, f"{path}.")


def _messages(field: Any, value: Any) -> list[Message]:
    """The messages a field's value holds: itself, its elements, or a map's values."""
    if field.message_type is None:
        return []
    if isinstance(value, Message):
        return [value]
    if field.message_type.GetOptions().map_entry:
        return [child for child in value.values() if isinstance(child, Message)]
    return list(value)
