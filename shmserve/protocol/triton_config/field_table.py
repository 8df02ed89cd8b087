"""Supported fields of config.pbtxt: tables, and a walk that refuses all other fields.

Each field is of one of three kinds: a field with effect, a hint without effect, or a refused
field. A hint never changes a result; the log lists hints without effect once, when the model
loads. A refusal names the field. The walk visits every field that is set, so a field of a later
schema is refused until the tables list it. The tables list messages besides their fields, so an
empty `response_cache {}` passes. An explicit default such as `allow_ragged_batch: false` counts as
not set.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from shmserve._generated import model_config_pb2 as pb
from shmserve.errors import ConfigError

# Supported fields, by the path of their message
_FIELDS = {
    "": (
        "name platform backend version_policy max_batch_size input output batch_input "
        "batch_output optimization dynamic_batching sequence_batching ensemble_scheduling "
        "instance_group default_model_filename parameters model_warmup "
        "model_transaction_policy model_operations model_repository_agents response_cache"
    ),
    "version_policy": "latest all specific",
    "version_policy.latest": "num_versions",
    "version_policy.specific": "versions",
    "input": "name data_type format dims reshape optional allow_ragged_batch",
    "input.reshape": "shape",
    "output": "name data_type dims reshape label_filename",
    "output.reshape": "shape",
    "batch_input": "kind target_name data_type source_input",
    "batch_output": "target_name kind source_input",
    "optimization": "graph",
    "optimization.graph": "level",
    "dynamic_batching": (
        "preferred_batch_size max_queue_delay_microseconds preserve_ordering priority_levels "
        "default_priority_level default_queue_policy priority_queue_policy"
    ),
    "dynamic_batching.default_queue_policy": (
        "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size"
    ),
    "dynamic_batching.priority_queue_policy": (
        "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size"
    ),
    "sequence_batching": (
        "direct oldest max_sequence_idle_microseconds iterative_sequence control_input state"
    ),
    "sequence_batching.direct": "max_queue_delay_microseconds minimum_slot_utilization",
    "sequence_batching.oldest": (
        "max_candidate_sequences preferred_batch_size max_queue_delay_microseconds "
        "preserve_ordering"
    ),
    "sequence_batching.control_input": "name control",
    "sequence_batching.control_input.control": (
        "kind int32_false_true fp32_false_true bool_false_true data_type"
    ),
    "sequence_batching.state": "input_name output_name data_type dims initial_state",
    "sequence_batching.state.initial_state": "data_type dims zero_data data_file name",
    "ensemble_scheduling": "step max_inflight_requests",
    "ensemble_scheduling.step": "model_name model_version input_map output_map",
    "instance_group": "name kind count gpus rate_limiter host_policy",
    "instance_group.rate_limiter": "resources priority",
    "instance_group.rate_limiter.resources": "name global count",
    "parameters": "string_value",
    "model_warmup": "name batch_size count inputs",
    "model_warmup.inputs": "data_type dims zero_data random_data input_data_file",
    "model_transaction_policy": "decoupled",
    "response_cache": "enable",
}
SUPPORTED = frozenset(
    f"{message}.{field}".lstrip(".")
    for message, fields in _FIELDS.items()
    for field in fields.split()
)

# Hints that change no result and have no effect here; the log lists them when the model loads.
NO_EFFECT = {
    "optimization.priority": "every instance is a process of its own",
    "optimization.cuda": "CUDA graphs and waits on events belong to TensorRT",
    "optimization.input_pinned_memory": "shared memory is pinned as a whole where a GPU reads it",
    "optimization.output_pinned_memory": "shared memory is pinned as a whole where a GPU reads it",
    "optimization.gather_kernel_buffer_threshold": "each request is copied by itself",
    "optimization.eager_batching": "a batch is gathered just before it runs",
    "sequence_batching.state.use_same_buffer_for_input_output": "a state is copied once",
    "sequence_batching.state.use_growable_memory": "each state has memory of its own size",
    "metric_tags": "metrics have the same labels for every model",
    "model_metrics": "metrics have the same buckets for every model",
}

# Messages of NO_EFFECT in which every field is a hint.
_WHOLE = (
    "optimization.cuda.",
    "optimization.input_pinned_memory.",
    "optimization.output_pinned_memory.",
    "model_metrics.",
)

# Explanations for refused fields.
HINTS = {
    "runtime": "the backend's own runtime is used",
    "input.is_shape_tensor": "shape tensors belong to TensorRT",
    "output.is_shape_tensor": "shape tensors belong to TensorRT",
    "input.is_non_linear_format_io": "the format belongs to TensorRT",
    "output.is_non_linear_format_io": "the format belongs to TensorRT",
    "optimization.execution_accelerators": "KIND_GPU chooses CUDA, there are no other accelerators",
    "ensemble_scheduling.step.model_namespace": "there is one repository, without namespaces",
    "instance_group.secondary_devices": "DLA cores belong to TensorRT",
    "instance_group.profile": "profiles belong to TensorRT",
    "instance_group.passive": "every instance takes requests",
    "cc_model_filenames": "default_model_filename is used on every device",
    "model_operations.op_library_filename": "custom operators are not loaded",
    "model_repository_agents.agents": "models are read without agents",
}


def refuse_unsupported(config: Message, model: str) -> None:
    """Check every field that is set against the tables.

    Raises:
        ConfigError: an unsupported field; the text names the first such field.
    """
    for path in _set_fields(config, ""):
        if path not in SUPPORTED and path not in NO_EFFECT and not path.startswith(_WHOLE):
            hint = f" ({HINTS[path]})" if path in HINTS else ""
            raise ConfigError(f"model '{model}': {path} is not supported{hint}")


def without_effect(config: Message) -> list[str]:
    """Return one phrase per reason, listing the hints without effect for operators."""
    reasons: dict[str, list[str]] = {}
    for path in _set_fields(config, ""):
        if path in NO_EFFECT and path not in reasons.setdefault(NO_EFFECT[path], []):
            reasons[NO_EFFECT[path]].append(path)
    return [f"{', '.join(paths)}: no effect ({why})" for why, paths in sorted(reasons.items())]


def schema_paths() -> Iterator[str]:
    """Yield every field in the schema's order, each below its message (docs/draw.py)."""
    yield from _paths(pb.ModelConfig.DESCRIPTOR, "")


def _paths(descriptor: Any, prefix: str) -> Iterator[str]:
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        yield path
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            kind = kind.fields_by_name["value"].message_type
        if kind is not None:
            yield from _paths(kind, f"{path}.")


def _set_fields(message: Message, prefix: str) -> Iterator[str]:
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        yield path
        for child in _messages(field, value):
            yield from _set_fields(child, f"{path}.")


def _messages(field: Any, value: Any) -> list[Message]:
    """Return the messages in a field's value: itself, its elements, or a map's values."""
    if field.message_type is None:
        return []
    if isinstance(value, Message):
        return [value]
    if field.message_type.GetOptions().map_entry:
        return [child for child in value.values() if isinstance(child, Message)]
    return list(value)
