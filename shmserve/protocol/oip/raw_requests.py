"""Raw requests: the body is the tensor, and the model's configuration gives everything else.

Source: binary tensor data extension, "Raw Binary Request".
"""

from __future__ import annotations

from math import prod

from shmserve.errors import InvalidArgument
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.request import InferInput, InferRequest
from shmserve.tensor.bytes_codec import LENGTH_BYTES

Shape = tuple[int, ...]


def deduce(signature: ModelSignature, nbytes: int) -> InferRequest:
    """Return the request for a raw body of `nbytes` bytes: batch 1, outputs binary.

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
