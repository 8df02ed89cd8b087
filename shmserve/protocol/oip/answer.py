"""Answers of the Open Inference Protocol: values to the JSON part of a response.

JSON data is always flat. NaN and Infinity are written as bare tokens, as Triton's clients expect.
64-bit integers keep every bit. FP32 is written as the equal double.
"""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType

from shmserve.errors import InvalidArgument
from shmserve.protocol.control.data_messages import Parameter
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES

_encoder = msgspec.json.Encoder()
encode = _encoder.encode

JsonData = msgspec.Raw | list[Any]


class BinarySize(Struct, frozen=True, gc=False):
    """Parameters of an output whose bytes follow the JSON part."""

    binary_data_size: int


class InferAnswerOutput(Struct, frozen=True):
    """An output: `data`, or `parameters` with a binary size, or neither if it lies in a region."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: BinarySize | UnsetType = UNSET
    data: JsonData | UnsetType = UNSET


class InferAnswer(Struct, frozen=True):
    """The JSON part of a response."""

    model_name: str
    model_version: str
    outputs: list[InferAnswerOutput]
    id: str | UnsetType = UNSET
    parameters: Mapping[str, Parameter] | msgspec.Raw | UnsetType = UNSET


def answer_parameters(
    parameters: Mapping[str, Parameter],
) -> Mapping[str, Parameter] | msgspec.Raw:
    """Return a model's parameters for the JSON part. Floats may be infinite or NaN."""
    finite = all(np.isfinite(v) for v in parameters.values() if isinstance(v, float))
    return parameters if finite else msgspec.Raw(json.dumps(dict(parameters)).encode())


def json_data(
    view: memoryview | bytes, datatype: str, shape: tuple[int, ...], name: str, model: str
) -> JsonData:
    """Return a tensor's bytes as the flat JSON array of its elements. Raise InvalidArgument for a
    datatype or a string that has no JSON form."""
    kind = DATATYPES[datatype]
    if not kind.json_ok:
        raise InvalidArgument(no_json_form("sending", datatype, f"output {name}"))
    if not kind.itemsize:
        return _strings(bytes_codec.decode(view, prod(shape), name, model, "output"), name)
    array = np.frombuffer(view, kind.numpy)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return msgspec.Raw(json.dumps(array.tolist(), separators=(",", ":")).encode())
    elements: list[Any] = array.tolist()
    return elements


def no_json_form(verb: str, datatype: str, where: str) -> str:
    """Return the error for a datatype without a JSON form (`verb`: sending, receiving)."""
    return (
        f"{verb} {datatype} data via JSON is not supported."
        f" Please use the binary data format for {where}"
    )


def _strings(elements: list[bytes], name: str) -> list[str]:
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"output {name} holds bytes that are no UTF-8 and have no JSON form."
            f" Please use the binary data format for output {name}"
        ) from None
