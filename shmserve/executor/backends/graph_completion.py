"""Completion: fills in a configuration from the graph of an ONNX model or an exported program, or
refuses a contradiction.

As in Triton, nothing is added if the configuration lists inputs and outputs. Else, a graph in
which every tensor has a variable first dimension gets `max_batch_size: 4` and dynamic batching,
unless the configuration says otherwise. A scalar becomes `dims: [1]` reshaped to [].
"""

from __future__ import annotations

from typing import TypeVar

from msgspec import UNSET, Struct
from msgspec.structs import replace

from shmserve.errors import ConfigError
from shmserve.executor.backends.reshape import model_side
from shmserve.protocol.triton_config import model_config
from shmserve.protocol.triton_config.backend_kinds import ONNXRUNTIME, PYTORCH
from shmserve.repository import folder_reader, read_labels
from shmserve.tensor import config_document
from shmserve.tensor.dtypes import BY_CONFIG_NAME, DATATYPES
from shmserve.tensor.spec import ModelSpec, TensorSpec

DEFAULT_MAX_BATCH_SIZE = 4
_FORMATS = {ONNXRUNTIME: "ONNX model", PYTORCH: "exported program"}


class GraphTensor(Struct, frozen=True):
    """Input or output of a graph. `dims`: each a number, a symbol's name, or None.
    `has_dims`: False if only a session of ONNX Runtime knows
    dimensions. `element_type`: number in the ONNX schema, for ONNX Runtime."""

    name: str
    datatype: str
    element_type: int
    dims: tuple[int | str | None, ...]
    has_dims: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in self.dims)


Graph = dict[str, GraphTensor]
_Entry = TypeVar("_Entry", config_document.InputEntry, config_document.OutputEntry)


def completed(spec: ModelSpec, directory: str, inputs: Graph, outputs: Graph) -> ModelSpec:
    """Return the spec in agreement with the graph: configured tensors are checked, missing tensors
    are filled in.

    `directory`: the model's folder, which has the labels of outputs.

    Raise ConfigError if configuration and graph disagree.
    """
    if spec.decoupled:
        raise ConfigError(f"model '{spec.name}': backend '{spec.backend}' cannot be decoupled")
    config, given = choose_batch(spec, inputs, outputs), spec.max_batch_size
    batched = config.max_batch_size > 0
    input_entries = config.input or tuple(map(config_document.InputEntry, inputs))
    output_entries = config.output or tuple(map(config_document.OutputEntry, outputs))
    config = replace(
        config,
        input=tuple(_filled(e, "input", inputs.get(e.name), spec, batched) for e in input_entries),
        output=tuple(
            _filled(e, "output", outputs.get(e.name), spec, batched) for e in output_entries
        ),
    )
    labels = read_labels(model_config.of_spec(spec, folder_reader.kinds()), directory)
    whole = replace(
        spec,
        max_batch_size=config.max_batch_size,
        chosen_batch=config.max_batch_size > given,
        inputs=tuple(_spec(e, batched, optional=e.optional) for e in config.input),
        outputs=tuple(_spec(e, batched, labels=labels.get(e.name, ())) for e in config.output),
        config=config,
    )
    inner = model_side(whole)
    for kind, tensors, graph in (
        ("input", inner.inputs, inputs),
        ("output", inner.outputs, outputs),
    ):
        for tensor in tensors:
            _check(whole, kind, tensor, graph.get(tensor.name))
    absent = [name for name in inputs if whole.input(name) is None]
    if absent:
        raise ConfigError(
            f"model '{spec.name}': the configuration has {len(whole.inputs)} inputs, the "
            f"{_format(spec)} {len(inputs)}: the configuration lacks input '{absent[0]}'"
        )
    return whole


def choose_batch(spec: ModelSpec, inputs: Graph, outputs: Graph) -> config_document.ConfigDocument:
    """Return the configuration with the batch that the graph allows, if the configuration leaves
    this to the graph. Raise ConfigError if the configuration wants batches that the graph forbids.
    Tensors without known dimensions allow batches."""
    config, graphs = spec.config, {"input": inputs, "output": outputs}
    if config.input and config.output:
        return config
    tensors = [tensor for tensor in (*inputs.values(), *outputs.values()) if tensor.has_dims]
    fixed = [tensor for tensor in tensors if not tensor.shape or tensor.shape[0] != -1]
    if fixed and config.max_batch_size:
        raise ConfigError(
            f"model '{spec.name}': max_batch_size is {config.max_batch_size}, but "
            f"'{fixed[0].name}' has shape {list(fixed[0].shape)} in the {_format(spec)}: "
            "no variable batch dimension"
        )
    # If dims include the graph's first dimension, the model has no batch dimension
    whole = any(
        len(entry.dims) == len(graphs[kind][entry.name].shape) and entry.reshape is UNSET
        for kind, entries in (("input", config.input), ("output", config.output))
        for entry in entries
        if entry.name in graphs[kind] and entry.dims
    )
    if fixed or (whole and not config.max_batch_size):
        return config
    config = replace(config, max_batch_size=config.max_batch_size or DEFAULT_MAX_BATCH_SIZE)
    scheduled = (config.dynamic_batching, config.sequence_batching) != (UNSET, UNSET)
    if config.max_batch_size > 1 and not scheduled:
        config = replace(config, dynamic_batching=config_document.BatchingEntry())
    return config


def _filled(
    entry: _Entry, kind: str, tensor: GraphTensor | None, spec: ModelSpec, batched: bool
) -> _Entry:
    """Return the configuration entry of a tensor with missing fields filled in."""
    if tensor is None:
        text = f"{kind} '{entry.name}' is not in the {_format(spec)}"
        raise ConfigError(f"model '{spec.name}': {text}")
    if entry.data_type == "TYPE_INVALID":
        entry = replace(entry, data_type=DATATYPES[tensor.datatype].config_name)
    if not entry.dims:
        entry = replace(entry, dims=tensor.shape[batched:] or (1,))
        scalar = not tensor.shape[batched:]
    else:  # a scalar, as a configuration writes it
        scalar = entry.dims == (1,) and not tensor.shape
    return replace(entry, reshape=config_document.ReshapeEntry()) if scalar else entry


def _spec(
    entry: config_document.InputEntry | config_document.OutputEntry,
    batched: bool,
    optional: bool = False,
    labels: tuple[str, ...] = (),
) -> TensorSpec:
    shape = (-1, *entry.dims) if batched else entry.dims
    datatype = BY_CONFIG_NAME[entry.data_type].name
    return TensorSpec(entry.name, datatype, shape, optional, labels)


def _format(spec: ModelSpec) -> str:
    return _FORMATS.get(spec.backend, "model")


def _check(spec: ModelSpec, kind: str, tensor: TensorSpec, graph: GraphTensor | None) -> None:
    where, form = f"model '{spec.name}': {kind} '{tensor.name}'", _format(spec)
    if graph is None:
        raise ConfigError(f"{where} is not in the {form}")
    if tensor.datatype != graph.datatype:
        raise ConfigError(f"{where} is {tensor.datatype}, but {graph.datatype} in the {form}")
    if tensor.optional:
        raise ConfigError(f"{where}: optional is not supported by backend '{spec.backend}'")
    if not graph.has_dims:
        return
    if spec.max_batch_size and (not graph.shape or graph.shape[0] != -1):
        raise ConfigError(
            f"{where} has shape {list(graph.shape)} in the {form}, which has no "
            "variable batch dimension for max_batch_size"
        )
    # dimensions fixed by the graph must be equal; the configuration may narrow variable dimensions
    fits = len(tensor.shape) == len(graph.shape) and all(
        dim in (-1, want) for want, dim in zip(tensor.shape, graph.shape, strict=True)
    )
    if not fits:
        raise ConfigError(
            f"{where} has shape {list(tensor.shape)}, but {list(graph.shape)} in the {form}"
        )
