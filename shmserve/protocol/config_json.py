"""The JSON form of a model's configuration: the body of ``GET /v2/models/{m}/config``.

As Triton prints it: names of the schema in its order, enums as names, int64 as JSON
numbers (protobuf's own JSON writes strings), defaults included, and normalised, that
is with what the server assumes where the file says nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from shmserve.errors import ConfigError
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec, TensorSpec

_WIDE = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}

# Fields of a tensor that a model file cannot tell, with the schema's defaults
_INPUT_REST = {
    "is_shape_tensor": False,
    "allow_ragged_batch": False,
    "optional": False,
    "is_non_linear_format_io": False,
}
_OUTPUT_REST = {"label_filename": "", "is_shape_tensor": False, "is_non_linear_format_io": False}


def to_json(config: Message) -> str:
    """The JSON text of a (normalised) ModelConfig message."""
    return msgspec.json.encode(_plain(config)).decode()


def completed(spec: ModelSpec) -> str:
    """`spec.config_json` with the inputs, outputs and batch size that `spec` has by now.

    Backends call it after they completed a spec from the model itself; tensors that
    the configuration told already keep their entries.
    """
    config: dict[str, Any] = msgspec.json.decode(spec.config_json)
    batched = spec.max_batch_size > 0
    config["max_batch_size"] = spec.max_batch_size
    for key, tensors, rest in (
        ("input", spec.inputs, {"format": "FORMAT_NONE"}),
        ("output", spec.outputs, {}),
    ):
        told = {entry["name"]: entry for entry in config.get(key, [])}
        config[key] = [
            _merged(told.get(tensor.name, {}), _tensor(tensor, batched, key, rest))
            for tensor in tensors
        ]
    return msgspec.json.encode(config).decode()


def _merged(told: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """An entry of the configuration, completed by what the model tells."""
    if told.get("data_type") == "TYPE_INVALID":
        told = {**told, "data_type": found["data_type"]}
    if told and not told["dims"]:
        told = {**told, "dims": found["dims"]}
    return {**found, **told}


def require_complete(spec: ModelSpec) -> None:
    """Check that the configuration tells all of each tensor it mentions.

    Raises:
        ConfigError: it names the tensor that lacks its data_type or dims.
    """
    config = msgspec.json.decode(spec.config_json)
    for key, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        known = {tensor.name for tensor in tensors}
        for entry in config.get(key, []):
            if entry["name"] not in known:
                raise ConfigError(
                    f"model '{spec.name}': {key} '{entry['name']}': data_type or dims is missing"
                )


def _tensor(tensor: TensorSpec, batched: bool, key: str, extra: dict[str, Any]) -> dict[str, Any]:
    head: dict[str, Any] = {
        "name": tensor.name,
        "data_type": DATATYPES[tensor.datatype].config_name,
        **extra,
        "dims": list(tensor.shape[1:] if batched else tensor.shape),
    }
    if key == "input":
        return {**head, **_INPUT_REST, "optional": tensor.optional}
    return {**head, **_OUTPUT_REST}


def _plain(message: Message) -> dict[str, Any]:
    raw = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _ordered(raw, message.DESCRIPTOR)


def _ordered(raw: dict[str, Any], descriptor: Any) -> dict[str, Any]:
    return {
        field.name: _value(raw[field.name], field)
        for field in descriptor.fields
        if field.name in raw
    }


def _value(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, list):
        return [_value(element, field) for element in value]
    if field.cpp_type in _WIDE:
        return int(value)
    if field.message_type is None:
        return value
    if field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _value(element, inner) for key, element in value.items()}
    return _ordered(value, field.message_type)
