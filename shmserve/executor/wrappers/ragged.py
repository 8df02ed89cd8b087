"""Ragged batches: requests of different shapes as one request (`batch_input`, `batch_output`).

As in Triton, an input with `allow_ragged_batch` is passed flat, with the elements of all requests
in a row. A `batch_input` gives the model the element counts or shapes of the requests. An output
with `batch_output` comes back flat, and each request gets its part in the shape of its input. All
other tensors are concatenated by rows.

Only for backends that take a batch as one request. A flat tensor has the dims [ 1 ] reshaped to [
], so the model sees one dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from msgspec.structs import replace

from shmserve.errors import ConfigError
from shmserve.executor.backend import Backend, BatchForm, Context, Output, Request, Response
from shmserve.executor.tensors.batch import split, split_rows
from shmserve.executor.tensors.memory_input import MemoryInput
from shmserve.executor.wrappers import sequence_backend
from shmserve.executor.wrappers.sequence_requests import StackedRequest
from shmserve.tensor.config_document import (
    BatchInputEntry,
    ConfigDocument,
    InputEntry,
    OutputEntry,
    ReshapeEntry,
)
from shmserve.tensor.dtypes import BY_CONFIG_NAME
from shmserve.tensor.spec import ModelSpec, Shape, TensorSpec

Array = np.ndarray[Any, Any]
_FLAT: Shape = (1,)


def load(backend: Backend, context: Context) -> tuple[Backend, ModelSpec]:
    """Load a backend as `sequence_backend.load` does. For a model with `batch_input` or
    `batch_output`, return a `RaggedBackend` around the loaded backend. Raise ConfigError if the
    model does not take a batch as one tensor."""
    outer = context.spec
    if not outer.config.batch_input and not outer.config.batch_output:
        return sequence_backend.load(backend, context)
    inner = replace(context, spec=_model_side(outer))
    loaded, spec = sequence_backend.load(backend, inner)
    if loaded.batching is not BatchForm.STACKED:
        loaded.close()
        raise ConfigError(
            f"model '{outer.name}': batch_input and batch_output need a model that takes a batch "
            "as one tensor (`infer_batch`)"
        )
    xp = context.xp if loaded.device == context.device else np
    return RaggedBackend(loaded, outer.config, xp), _client_side(spec, outer)


def batch_input(kind: str, shapes: Sequence[Shape], dtype: np.dtype[Any]) -> Array:
    """Return the array of a `batch_input`.

    Args:
        kind: kind of the `batch_input`, as in config.pbtxt.
        shapes: shape of the source input in each request of the batch, batch dimension first.
        dtype: element type of the array.

    Returns:
        BATCH_ITEM_SHAPE: an array of shape [rows, dims]. Other kinds: an array of one dimension.
    """
    counts = [prod(shape) for shape in shapes]
    if kind == "BATCH_ELEMENT_COUNT":
        return np.array(counts, dtype)
    if kind == "BATCH_ACCUMULATED_ELEMENT_COUNT":
        return np.cumsum(counts).astype(dtype)
    if kind == "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
        return np.cumsum([0, *counts]).astype(dtype)
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":  # only the length has a meaning
        return np.zeros(max(counts), dtype)
    items = np.array([shape[1:] for shape in shapes for _ in range(shape[0])], dtype)
    return items.reshape(-1) if kind == "BATCH_ITEM_SHAPE_FLATTEN" else items


class RaggedBackend:
    """Loaded backend that takes a batch as one request, and is given requests of different
    shapes."""

    batching = BatchForm.LISTED
    reads_on_device = False  # inputs are gathered on the host

    def __init__(self, backend: Backend, config: ConfigDocument, xp: Any) -> None:
        self._backend = backend
        self._xp = xp
        self._batch_inputs = config.batch_input
        self._flat = {entry.name for entry in config.input if entry.allow_ragged_batch}
        self._sources = {  # output name -> name of the source input
            name: entry.source_input[0]
            for entry in config.batch_output
            for name in entry.target_name
        }
        self.chooses_device = backend.chooses_device
        self.device = backend.device
        self.load = backend.load
        self.close = backend.close

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        """Run requests that agree in all but the shapes of their ragged inputs."""
        whole = StackedRequest(requests, self._inputs(requests), self._xp)
        responses = self._backend.execute([whole])
        copied = [sum(len(tensor.buffer) for tensor in r.inputs.values()) for r in requests]
        return split(responses, partial(self._taken_apart, requests), copied)

    def _inputs(self, requests: Sequence[Request]) -> dict[str, MemoryInput]:
        inputs = {}
        for name, tensor in requests[0].inputs.items():
            arrays = [request.inputs[name].numpy() for request in requests]
            if name in self._flat:
                arrays = [array.reshape(-1, 1) for array in arrays]
            whole = np.concatenate(arrays)
            inputs[name] = MemoryInput(name, tensor.datatype, whole, self._xp)
        for entry in self._batch_inputs:
            shapes = [request.inputs[entry.source_input[0]].shape for request in requests]
            kind = BY_CONFIG_NAME[entry.data_type]
            array = batch_input(entry.kind, shapes, kind.numpy)
            for name in entry.target_name:
                whole = array if array.ndim > 1 else array.reshape(-1, 1)
                inputs[name] = MemoryInput(name, kind.name, whole.copy(), self._xp)
        return inputs

    def _taken_apart(self, requests: Sequence[Request], output: Output) -> list[Any]:
        """Return each request's part of an output."""
        source = self._sources.get(output.name)
        if source is None:
            sizes = [next(iter(request.inputs.values())).shape[0] for request in requests]
            return split_rows(output, sizes)
        shapes = [request.inputs[source].shape for request in requests]
        flat = replace(output, array=output.array.reshape(-1))
        parts = split_rows(flat, [prod(shape) for shape in shapes], "elements")
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _model_side(spec: ModelSpec) -> ModelSpec:
    """Return the spec as the backend sees it: ragged tensors are flat, each `batch_input` is an
    input."""
    config = spec.config
    flat = {entry.name for entry in config.input if entry.allow_ragged_batch}
    flat |= {name for entry in config.batch_output for name in entry.target_name}
    dims = {entry.name: len(entry.dims) for entry in config.input}
    batch_inputs = [
        _batch_input_entry(entry, name, dims[entry.source_input[0]])
        for entry in config.batch_input
        for name in entry.target_name
    ]
    scalar = ReshapeEntry()
    outer = replace(
        config,
        batch_input=(),
        batch_output=(),
        input=(
            *(
                replace(e, dims=_FLAT, reshape=scalar) if e.name in flat else e
                for e in config.input
            ),
            *batch_inputs,
        ),
        output=tuple(
            replace(e, dims=_FLAT, reshape=scalar) if e.name in flat else e for e in config.output
        ),
    )
    added = [
        TensorSpec(e.name, BY_CONFIG_NAME[e.data_type].name, (-1, *e.dims)) for e in batch_inputs
    ]
    return replace(
        spec,
        inputs=(*(_flattened(t, flat) for t in spec.inputs), *added),
        outputs=tuple(_flattened(t, flat) for t in spec.outputs),
        config=outer,
    )


def _batch_input_entry(entry: BatchInputEntry, name: str, dims: int) -> InputEntry:
    if entry.kind == "BATCH_ITEM_SHAPE":
        return InputEntry(name, entry.data_type, dims=(dims,))
    return InputEntry(name, entry.data_type, dims=_FLAT, reshape=ReshapeEntry())


def _flattened(tensor: TensorSpec, flat: set[str]) -> TensorSpec:
    return replace(tensor, shape=(-1, *_FLAT)) if tensor.name in flat else tensor


def _client_side(loaded: ModelSpec, client_spec: ModelSpec) -> ModelSpec:
    """Return a loaded spec as clients see it: ragged tensors have their own shape, the inputs of
    `batch_input` are left out."""
    config = client_spec.config
    flat = {entry.name for entry in config.input if entry.allow_ragged_batch}
    flat |= {name for entry in config.batch_output for name in entry.target_name}
    added = {name for entry in config.batch_input for name in entry.target_name}
    inputs: dict[str, InputEntry] = {entry.name: entry for entry in config.input}
    outputs: dict[str, OutputEntry] = {entry.name: entry for entry in config.output}

    def own(tensor: TensorSpec) -> TensorSpec:
        if tensor.name not in flat:
            return tensor
        entry = inputs.get(tensor.name) or outputs[tensor.name]
        return replace(tensor, shape=(-1, *entry.dims))

    return replace(
        loaded,
        inputs=tuple(own(tensor) for tensor in loaded.inputs if tensor.name not in added),
        outputs=tuple(own(tensor) for tensor in loaded.outputs),
        config=replace(
            loaded.config,
            batch_input=config.batch_input,
            batch_output=config.batch_output,
            input=tuple(
                inputs[e.name] if e.name in flat else e
                for e in loaded.config.input
                if e.name not in added
            ),
            output=tuple(outputs[e.name] if e.name in flat else e for e in loaded.config.output),
        ),
    )
