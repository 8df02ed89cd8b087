"""Reshape (`reshape` of config.pbtxt): clients see `dims`, the model sees the reshaped tensor.

No bytes move: the same elements get another shape. The batch dimension takes no part. A variable
dimension keeps its place among the variable dimensions. Between two variable dimensions both
shapes have the same number of elements (checked when the configuration is read).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct

from shmserve.executor.backend import Backend, InputTensor, Output, Request, Response, Responses
from shmserve.tensor.config_document import InputEntry, OutputEntry
from shmserve.tensor.spec import ModelSpec, Shape, TensorSpec


class _Change(Struct, frozen=True):
    """Dimensions of a tensor without the batch, for clients (`outer`) and for the model
    (`inner`)."""

    outer: Shape
    inner: Shape


def _filled(shape: Shape, old: Shape, new: Shape) -> Shape:
    """Return `new` with the sizes from `shape`, which has dimensions `old`, maybe after a batch."""
    batch, rest = shape[: len(shape) - len(old)], shape[len(shape) - len(old) :]
    sizes = iter([size for size, dim in zip(rest, old, strict=True) if dim == -1])
    return (*batch, *(next(sizes) if dim == -1 else dim for dim in new))


def model_side(spec: ModelSpec) -> ModelSpec:
    """Return the spec as the model sees it: the same object if no tensor is reshaped."""
    inputs, outputs = _changes(spec.config.input), _changes(spec.config.output)
    if not inputs and not outputs:
        return spec
    return msgspec.structs.replace(
        spec,
        inputs=tuple(_reshaped(tensor, inputs) for tensor in spec.inputs),
        outputs=tuple(_reshaped(tensor, outputs) for tensor in spec.outputs),
    )


def _reshaped(tensor: TensorSpec, changes: Mapping[str, _Change]) -> TensorSpec:
    change = changes.get(tensor.name)
    if change is None:
        return tensor
    batch = tensor.shape[: len(tensor.shape) - len(change.outer)]
    return msgspec.structs.replace(tensor, shape=(*batch, *change.inner))


def _changes(entries: Iterable[InputEntry | OutputEntry]) -> dict[str, _Change]:
    return {
        entry.name: _Change(entry.dims, entry.reshape.shape)
        for entry in entries
        if entry.reshape is not UNSET
    }


def wrapped(backend: Backend, spec: ModelSpec) -> Backend:
    """Return the loaded backend, with the reshapes of its configuration around it, if any."""
    inputs, outputs = _changes(spec.config.input), _changes(spec.config.output)
    return _Reshaping(backend, inputs, outputs) if inputs or outputs else backend


class _Reshaping:
    """Backend whose requests and responses have the client's shapes. Members without a shape are
    those of the backend."""

    def __init__(
        self, backend: Backend, inputs: dict[str, _Change], outputs: dict[str, _Change]
    ) -> None:
        self._backend = backend
        self._inputs = inputs
        self._outputs = outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        inner = [
            _ReshapedRequest(request, self._inputs, self._outputs, self._response)
            for request in requests
        ]
        return [self._response(response) for response in self._backend.execute(inner)]

    def _response(self, response: Response) -> Response:
        if response.error is not None:
            return response
        outputs = tuple(self._output(output) for output in response.outputs)
        return msgspec.structs.replace(response, outputs=outputs)

    def _output(self, output: Output) -> Output:
        change = self._outputs.get(output.name)
        if change is None or len(output.array.shape) < len(change.inner):
            return output
        shape = _filled(output.array.shape, change.inner, change.outer)
        if prod(shape) != output.array.size:  # against the configuration: unchanged
            return output
        return Output(output.name, output.datatype, output.array.reshape(shape))


class _ReshapedResponses:
    """Responses of a decoupled model, each reshaped before it is sent."""

    def __init__(self, source: Responses, reshaped: Callable[[Response], Response]) -> None:
        self._reshaped = reshaped
        self._send = source.send
        self.fail = source.fail
        self.abandoned = source.abandoned

    def send(self, response: Response | None, final: bool = False) -> None:
        self._send(None if response is None else self._reshaped(response), final)


class _ReshapedInput:
    """Input in the shape of the model. Members without a shape are those of the client's input."""

    def __init__(self, source: InputTensor, shape: Shape) -> None:
        self._source = source
        self.shape = shape
        self.on_device = lambda: source.on_device().reshape(shape)
        self.private_on_device = lambda: source.private_on_device().reshape(shape)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def numpy(self) -> np.ndarray[Any, Any]:
        return self._source.numpy().reshape(self.shape)

    def private(self) -> np.ndarray[Any, Any]:
        return self._source.private().reshape(self.shape)


class _ReshapedRequest:
    """Request with the model's shapes; all else is passed on to the client's request."""

    def __init__(
        self,
        source: Request,
        inputs: dict[str, _Change],
        outputs: dict[str, _Change],
        reshaped: Callable[[Response], Response],
    ) -> None:
        self._source = source
        self._outputs = outputs
        self.responses: Responses | None = None
        if source.responses is not None:
            self.responses = _ReshapedResponses(source.responses, reshaped)
        self.inputs: Mapping[str, InputTensor] = {
            name: _ReshapedInput(
                tensor, _filled(tensor.shape, inputs[name].outer, inputs[name].inner)
            )
            if name in inputs
            else tensor
            for name, tensor in source.inputs.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def offer(self, name: str, datatype: str, shape: Shape) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = self._offered(self._source.offer, name, datatype, shape)
        return array

    def offer_on_device(self, name: str, datatype: str, shape: Shape) -> Any:
        return self._offered(self._source.offer_on_device, name, datatype, shape)

    def _offered(self, offer: Callable[..., Any], name: str, datatype: str, shape: Shape) -> Any:
        change = self._outputs.get(name)
        if change is None:
            return offer(name, datatype, shape)
        return offer(name, datatype, _filled(shape, change.inner, change.outer)).reshape(shape)
