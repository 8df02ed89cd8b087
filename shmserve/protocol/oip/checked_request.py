"""Checked requests: requests that fit their models, which frontends may keep and use again."""

from msgspec import Struct

from shmserve.config import Settings
from shmserve.protocol.control.data_messages import OutputPlace
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.request import InferOutput, InferRequest
from shmserve.protocol.oip.validation import (
    CheckedInput,
    Find,
    check_inputs,
    check_outputs,
    slot_bytes,
)


class CheckedRequest(Struct, frozen=True):
    """A request that fits its model.

    Attributes:
        wanted: requested outputs, in the client's order.
        names: names of the outputs named by the client.
        places: windows of regions for outputs.
        binary_bytes: bytes of tensors after the JSON part.
        slot_bytes: bytes of the pool for the inputs, see `validation.slot_bytes`.
        in_regions: whether any input or output lies in client memory.
    """

    signature: ModelSignature
    request: InferRequest
    inputs: list[CheckedInput]
    wanted: tuple[InferOutput, ...]
    names: tuple[str, ...]
    places: tuple[OutputPlace, ...]
    binary_bytes: int
    slot_bytes: int
    in_regions: bool


def checked(
    signature: ModelSignature, request: InferRequest, limits: Settings, find: Find
) -> CheckedRequest:
    """Check a request against its model. Raise the errors of `check_inputs` and `check_outputs`."""
    inputs = check_inputs(signature, request, limits, find)
    wanted, places = check_outputs(signature, request, find)
    names = tuple([output.name for output in request.outputs])
    sizes = sum(source.binary_size or 0 for source in request.inputs)
    in_regions = bool(places) or any(item.at is not None for item in inputs)
    return CheckedRequest(
        *(signature, request, inputs, wanted, names, places),
        *(sizes, slot_bytes(inputs), in_regions),
    )
