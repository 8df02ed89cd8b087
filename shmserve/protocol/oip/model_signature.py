"""Model signature: inputs and outputs for the checks of requests, made once per version.

The signature also gives the request of a raw body, which is the tensor and nothing else ("Raw
Binary Request" of the binary tensor data extension).
"""

from math import prod

from msgspec import Struct

from shmserve.errors import InvalidArgument
from shmserve.protocol.oip.request import InferInput, InferOutput, InferRequest
from shmserve.tensor.bytes_codec import LENGTH_BYTES
from shmserve.tensor.dtypes import DATATYPES, Datatype
from shmserve.tensor.spec import ModelSpec, TensorSpec

Shape = tuple[int, ...]


class InputSignature(Struct, frozen=True):
    """An input of a model. `count` is the number of elements, or -1 if the shape is variable."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    count: int


class ModelSignature(Struct, frozen=True):
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


def deduce(signature: ModelSignature, nbytes: int) -> InferRequest:
    """Return the request for a raw body of `nbytes` bytes: batch 1, outputs binary. Raise
    InvalidArgument if the model or the number of bytes does not suit a raw body.

    The body of a BYTES input is a single element. `binary_size` then includes the 4-byte length
    that the caller puts before the body.
    """
    model = signature.spec.name
    if len(signature.inputs) != 1:
        raise InvalidArgument(
            "Raw request must only have 1 input (found 1) to be deduced but got"
            f" {len(signature.inputs)} inputs in '{model}' model configuration"
        )
    (spec,) = signature.inputs.values()
    batch = (1,) if signature.spec.max_batch_size > 0 else ()
    dims = spec.shape[len(batch) :]
    itemsize = spec.datatype.itemsize
    if itemsize:
        shape = batch + _shape(spec.name, model, dims, nbytes, itemsize)
    elif dims == (1,):
        shape = (*batch, 1)
        nbytes += LENGTH_BYTES
    else:
        raise InvalidArgument(
            f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
        )
    source = InferInput(spec.name, shape, spec.datatype.name, "the raw body", None, nbytes)
    return InferRequest((source,), binary_output=True)


def _shape(name: str, model: str, dims: Shape, nbytes: int, itemsize: int) -> Shape:
    variable = dims.count(-1)
    if variable > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{name}' can not be deduced because there are more than"
            " one variable-sized dimension"
        )
    unit = prod(tuple(dim for dim in dims if dim >= 0)) * itemsize
    if not variable:
        return dims  # the check of the request refuses a wrong size
    if unit == 0 or nbytes % unit:
        raise InvalidArgument(
            f"The shape of the raw input '{name}' for model '{model}' can not be deduced:"
            f" {nbytes} bytes are not a multiple of {unit}"
        )
    return tuple(nbytes // unit if dim < 0 else dim for dim in dims)
