"""`ConfigDocument`s: made from a normalised ModelConfig message, and completed by a model."""

from typing import Any, TypeVar

import msgspec
from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from shmserve.errors import ConfigError
from shmserve.tensor.config_document import ConfigDocument, InputEntry, OutputEntry
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec, TensorSpec

_Entry = TypeVar("_Entry", InputEntry, OutputEntry)
_WIDE = {FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64}


def document_of(config: Message) -> ConfigDocument:
    """Return the document of a message, with defaults as Triton shows them."""
    raw = json_format.MessageToDict(
        config, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return msgspec.convert(_ordered(raw, config.DESCRIPTOR), ConfigDocument)


def completed(spec: ModelSpec) -> ModelSpec:
    """Return the spec with a document that has the spec's inputs, outputs and batch size. Backends
    call this function after completing a spec from the model itself. Values from the configuration
    stay."""
    inputs = {entry.name: entry for entry in spec.config.input}
    outputs = {entry.name: entry for entry in spec.config.output}
    batched = spec.max_batch_size > 0
    config = msgspec.structs.replace(
        spec.config,
        max_batch_size=spec.max_batch_size,
        input=tuple(
            _filled(inputs.get(t.name) or InputEntry(t.name, optional=t.optional), t, batched)
            for t in spec.inputs
        ),
        output=tuple(
            _filled(outputs.get(t.name) or OutputEntry(t.name), t, batched) for t in spec.outputs
        ),
    )
    return msgspec.structs.replace(spec, config=config)


def _filled(entry: _Entry, tensor: TensorSpec, batched: bool) -> _Entry:
    """Return an entry of the configuration with the missing values taken from the model."""
    untyped = entry.data_type == "TYPE_INVALID"
    return msgspec.structs.replace(
        entry,
        data_type=DATATYPES[tensor.datatype].config_name if untyped else entry.data_type,
        dims=entry.dims or (tensor.shape[1:] if batched else tensor.shape),
    )


def require_complete(spec: ModelSpec) -> None:
    """Check that the configuration fully describes each tensor it mentions. Raise ConfigError for a
    tensor without data_type or dims; the text names the tensor."""
    for kind, tensors, entries in (
        ("input", spec.inputs, spec.config.input),
        ("output", spec.outputs, spec.config.output),
    ):
        described = {tensor.name for tensor in tensors}
        for entry in entries:
            if entry.name not in described:
                raise ConfigError(
                    f"model '{spec.name}': {kind} '{entry.name}': data_type or dims is missing"
                )


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
