"""Calls to other models in the native dialect: arrays in, arrays out, errors raised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from shmserve.errors import Internal
from shmserve.executor.backend import Request
from shmserve.executor.backends.dlpack import to_array
from shmserve.executor.calling import CallAnswer, CalledTensor, ModelCall, OtherModels
from shmserve.protocol.control.data_messages import Parameter
from shmserve.tensor.dtypes import from_numpy


class CallOptions(Struct, frozen=True):
    """Options of a call, with the fields of `ModelCall`."""

    outputs: tuple[str, ...] = ()
    version: str | int = ""
    parameters: dict[str, Parameter] = {}
    timeout_s: float | None = None


def one_answer(
    models: OtherModels,
    request: Request,
    model: str,
    inputs: Mapping[str, Any],
    options: CallOptions,
) -> dict[str, Any]:
    """Call a model for one answer, and return the outputs by name."""
    running = models.begin(_call(request, model, inputs, options, stream=False), [request])
    answer = running.next()
    assert answer is not None
    return _outputs(answer)


def all_answers(
    models: OtherModels,
    request: Request,
    model: str,
    inputs: Mapping[str, Any],
    options: CallOptions,
) -> Iterator[dict[str, Any]]:
    """Call a model, and yield the outputs by name of each answer that has outputs."""
    running = models.begin(_call(request, model, inputs, options, stream=True), [request])
    try:
        while (answer := running.next()) is not None:
            if answer.outputs or answer.error is not None:
                yield _outputs(answer)
    finally:
        running.abandoned()


def _call(
    request: Request, model: str, inputs: Mapping[str, Any], options: CallOptions, stream: bool
) -> ModelCall:
    return ModelCall(
        model,
        [_input(model, name, value) for name, value in inputs.items()],
        str(options.version),
        options.outputs,
        request.id,
        options.parameters,
        options.timeout_s,
        stream,
    )


def _input(model: str, name: str, value: Any) -> CalledTensor:
    where = f"input '{name}' for model '{model}'"
    array = to_array(value, where)
    kind = from_numpy(array.dtype)
    if kind is None:
        raise Internal(f"{where}: no datatype for {array.dtype}")
    return CalledTensor(name, kind.name, array)


def _outputs(answer: CallAnswer) -> dict[str, Any]:
    if answer.error is not None:
        try:
            raise answer.error
        finally:
            del answer  # breaks the cycle of answer, error and traceback
    return {tensor.name: tensor.array for tensor in answer.outputs}
