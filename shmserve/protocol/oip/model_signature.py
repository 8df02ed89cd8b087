"""Model signature: inputs and outputs for the checks of requests, made once per version."""

from __future__ import annotations

from math import prod

from msgspec import Struct

from shmserve.protocol.oip.request import InferOutput
from shmserve.tensor.dtypes import DATATYPES, Datatype
from shmserve.tensor.spec import ModelSpec, TensorSpec


class InputSignature(Struct, frozen=True):
    """An input of a model. `count` is the number of elements, or -1 if the shape is variable."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    count: int


class ModelSignature(Struct, frozen=True):
    """Signature of a model version."""

    spec: ModelSpec
    inputs: dict[str, InputSignature]
    required: frozenset[str]
    outputs: dict[str, TensorSpec]
    all_outputs: tuple[InferOutput, ...]  # outputs of a request without "outputs"


def make_signature(spec: ModelSpec) -> ModelSignature:
    """Return the signature of a model version."""
    inputs = {
        tensor.name: InputSignature(
            tensor.name,
            DATATYPES[tensor.datatype],
            tensor.shape,
            prod(tensor.shape) if min(tensor.shape, default=0) >= 0 else -1,
        )
        for tensor in spec.inputs
    }
    outputs = {tensor.name: tensor for tensor in spec.outputs}
    required = frozenset(tensor.name for tensor in spec.inputs if not tensor.optional)
    all_outputs = tuple(InferOutput(name) for name in outputs)
    return ModelSignature(spec, inputs, required, outputs, all_outputs)
