"""Generate extension: one flat JSON object in, one flat JSON object per answer out.

A key that names an input of the model is that input, whatever the name. Of the other keys, `id` is
the request's id and `parameters` is an object whose keys count as if they stood outside. Every
other key is a request parameter. In an answer, an output of one element appears as that element.
"""

import functools
import json
import math
from collections.abc import Iterable
from typing import Any

import msgspec

from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import InvalidArgument
from shmserve.protocol import bounds
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip import strict_parser
from shmserve.protocol.oip.answer import json_data
from shmserve.protocol.oip.model_signature import InputSignature, ModelSignature
from shmserve.protocol.oip.request import InferInput, InferRequest, check_parameters
from shmserve.tensor.dtypes import DATATYPES

_encode = msgspec.json.Encoder().encode
_SHOWN = 64  # characters of a client's value quoted in an error message


def parse_generate(signature: ModelSignature, text: bytes) -> InferRequest:
    """Return the inference request of a generate request. Raise InvalidArgument if the request is
    malformed; the message names the key."""
    document = strict_parser.loads(text, functools.partial(_members_once, signature))
    if not isinstance(document, dict):
        raise InvalidArgument(f"the request must be a JSON object, got {_show(document)}")
    inputs: list[InferInput] = []
    parameters: dict[str, Parameter] = {}
    request_id = ""
    for key, value in _members(signature, document):
        spec = signature.inputs.get(key)
        if spec is not None:
            if any(given.name == key for given in inputs):
                raise _twice(key)
            inputs.append(_input(spec, value))
        elif key == "id":
            if not isinstance(value, str):
                raise InvalidArgument(f"id must be a string, got {_show(value)}")
            request_id = value
        elif isinstance(value, bool | int | float | str):
            parameters[key] = value
        else:
            within = "" if key in document else "Converting keyword: 'parameters': "
            raise InvalidArgument(
                f"{within}parameter '{key}' has invalid type. It is no input of model"
                f" '{signature.spec.name}',"
                f" and must be a boolean, a number or a string, got {_show(value)}"
            )
    if len(parameters) > bounds.MAX_INPUTS:
        raise InvalidArgument(
            f"the request has {len(parameters)} parameters, at most {bounds.MAX_INPUTS} are allowed"
        )
    check_parameters(parameters)
    return InferRequest(tuple(inputs), (), request_id, parameters)


def _members_once(signature: ModelSignature, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the members of a JSON object. Raise InvalidArgument if an input occurs twice; of any
    other repeated key the last value counts."""
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen and key in signature.inputs:
                raise _twice(key)
            seen.add(key)
    return members


def _twice(name: str) -> InvalidArgument:
    return InvalidArgument(f"input '{name}' already exists in request")


def _members(signature: ModelSignature, document: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    for key, value in document.items():
        if key == "parameters" and key not in signature.inputs:
            if not isinstance(value, dict):
                raise InvalidArgument(
                    f"Expected JSON object for keyword: 'parameters', got {_show(value)}"
                )
            yield from value.items()
        else:
            yield key, value


def _input(spec: InputSignature, value: Any) -> InferInput:
    shape = _fitted(_shape(value, spec.name), spec.shape)
    data = value if isinstance(value, list) else [value]
    return InferInput(spec.name, shape, spec.datatype.name, f"input '{spec.name}'", data)


def _fitted(shape: tuple[int, ...], input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a value, extended to the dimensions of its input (`input_shape`; -1: any
    size).

    Dimensions of size one, such as the batch, are added in front. If the extended shape does not
    fit, the elements fill the fixed dimensions and the last variable dimension takes the rest. If
    the elements cannot fill the dimensions, the shape keeps its added ones and is refused when all
    shapes are checked.
    """
    if len(shape) >= len(input_shape):
        return shape or (1,)
    padded = (1,) * (len(input_shape) - len(shape)) + shape
    if all(size in (-1, given) for size, given in zip(input_shape, padded, strict=True)):
        return padded
    rest, fitted = math.prod(shape), [1] * len(input_shape)
    for axis in sorted(range(len(input_shape)), key=lambda i: (input_shape[i] < 0, -i)):
        size = input_shape[axis] if input_shape[axis] >= 0 else rest
        if size == 0 or rest % size:
            return padded
        fitted[axis], rest = size, rest // size
    return tuple(fitted) if rest == 1 else padded


def _shape(value: Any, name: str) -> tuple[int, ...]:
    """Return the shape of nested arrays; () for a scalar. Raise InvalidArgument if an array holds
    arrays of different lengths, or arrays beside elements."""
    shape: tuple[int, ...] = ()
    level = [value]
    while any(type(item) is list for item in level):
        sizes = {len(item) if type(item) is list else -1 for item in level}
        if len(sizes) > 1:
            raise InvalidArgument(f"the arrays of input '{name}' have different lengths")
        shape += (sizes.pop(),)
        level = [element for item in level for element in item]
    return shape


def encode_outcome(
    signature: ModelSignature, request_id: str, outcome: Outcome, receipt: Receipt
) -> bytes:
    """Return an answer as a flat JSON object. The bytes of all outputs count as copied. Raise
    ShmserveError if the outcome is an error. Raise InvalidArgument if an output has no JSON
    form."""
    if outcome.error is not None:
        raise outcome.error
    spec = signature.spec
    members: dict[str, Any] = {"model_name": spec.name, "model_version": spec.version}
    if request_id:
        members["id"] = request_id
    for key, parameter in outcome.parameters.items():
        finite = not isinstance(parameter, float) or math.isfinite(parameter)
        members[key] = parameter if finite else msgspec.Raw(json.dumps(parameter).encode())
    for tensor in outcome.outputs:
        members[tensor.name] = _value(tensor, spec.name)
        receipt.copied_out += len(tensor.view)
    return _encode(members)


def _value(tensor: OutputTensor, model: str) -> Any:
    if not DATATYPES[tensor.datatype].json_ok:
        raise InvalidArgument(_no_form(tensor, f"datatype {tensor.datatype} has no JSON form"))
    try:
        data = json_data(tensor.view, tensor.datatype, tensor.shape, tensor.name, model)
    except InvalidArgument:
        raise InvalidArgument(_no_form(tensor, "its bytes are no UTF-8")) from None
    if isinstance(data, msgspec.Raw):  # JSON with NaN or Infinity, which msgspec cannot write
        text = bytes(memoryview(data))
        return msgspec.Raw(text[1:-1]) if text.count(b",") == 0 else data
    return data[0] if len(data) == 1 else data


def _no_form(tensor: OutputTensor, reason: str) -> str:
    return (
        f"output '{tensor.name}' cannot be sent by generate: {reason}. Use infer with binary data"
    )


def encode_error(message: str) -> bytes:
    """Return the JSON of an error in the middle of a stream."""
    return _encode({"error": message})


def is_answer(outcome: Outcome) -> bool:
    """Return False for a final outcome without outputs, parameters and error: such an outcome only
    ends a stream."""
    return bool(outcome.outputs or outcome.parameters or outcome.error or not outcome.final)


def _show(value: Any) -> str:
    return json.dumps(value)[:_SHOWN]
