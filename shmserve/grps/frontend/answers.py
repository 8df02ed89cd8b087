"""What a model answers, as a GRPS message."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import numpy as np

from shmserve.errors import Code, InvalidArgument, ModelFailure, ShmserveError
from shmserve.frontends.oip.seam import Outcome, OutputTensor
from shmserve.grps.frontend.payloads import DTYPES, OUTPUT
from shmserve.grps.protocol import message_wire as grps_wire
from shmserve.grps.protocol.message import (
    DataType,
    GenericTensor,
    GrpsMessage,
    failure,
    success,
)
from shmserve.grps.protocol.model_parameters import MESSAGE, takes_message
from shmserve.protocol.oip.model_signature import ModelPlan
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES, element_count

log = logging.getLogger(__name__)

GENERIC = "internal server error"
_TEXTS = ("str_data", "bin_data")


def refusal(ex: Exception, what: str) -> GrpsMessage:
    """The answer to a request that failed; a defect's text goes to the log only."""
    if not isinstance(ex, ShmserveError):
        log.error("unexpected error in %s", what, exc_info=ex)
        return failure(GENERIC)
    if ex.code is Code.INTERNAL and not isinstance(ex, ModelFailure):
        log.error("%s failed", what, exc_info=ex)
    return failure(ex.message or GENERIC, ex.http_status)


def to_message(plan: ModelPlan, outcome: Outcome, kind: str) -> GrpsMessage:
    """An outcome as a message; large parts stay views of it. `kind`: what was asked with.

    Raises:
        ModelFailure: it cannot be told.
    """
    if takes_message(plan.spec):
        try:
            message = grps_wire.parse(message_bytes(plan, outcome))
        except InvalidArgument:
            raise _no_message(plan) from None
        if message.status is None:
            message = msgspec.structs.replace(message, status=success())
        return message
    if kind in _TEXTS:
        found = _text(plan, outcome, kind)
        if found is not None:
            return found
    tensors = [_tensor(plan, output) for output in outcome.outputs]
    return GrpsMessage(success(), gtensors=tensors)


def to_wire(plan: ModelPlan, outcome: Outcome, kind: str) -> list[bytes | memoryview]:
    """An outcome as a message's wire form, in parts.

    Raises:
        ModelFailure: it cannot be told.
    """
    if not takes_message(plan.spec):
        return grps_wire.parts(to_message(plan, outcome, kind))
    view = message_bytes(plan, outcome)
    try:
        has_status = grps_wire.glance(view).has_status
    except InvalidArgument:
        raise _no_message(plan) from None
    # What follows is merged into what stands before it, as protocol buffers do
    return [view] if has_status else [_SUCCESS, view]


_SUCCESS = grps_wire.encode(GrpsMessage(success()))


def message_bytes(plan: ModelPlan, outcome: Outcome) -> memoryview:
    """The message that a model which takes messages gave."""
    for output in outcome.outputs:
        if output.name == MESSAGE:
            return output.view
    raise _no_message(plan)


def _no_message(plan: ModelPlan) -> ModelFailure:
    return ModelFailure(f"model '{plan.spec.name}' gave no GRPS message")


def _text(plan: ModelPlan, outcome: Outcome, kind: str) -> GrpsMessage | None:
    """Text for text and bytes for bytes, if the model gave one piece of it."""
    name = plan.spec.parameters.get(OUTPUT, "")
    if not name and len(outcome.outputs) != 1:
        return None
    output = next((o for o in outcome.outputs if not name or o.name == name), None)
    if output is None:
        return None
    data: Any = output.view
    if output.datatype == "BYTES":
        if element_count(output.shape) != 1:
            return None
        bytes_codec.check(data, 1, output.name, plan.spec.name)
        data = data[bytes_codec.LENGTH_BYTES :]
    elif output.datatype != "UINT8" or kind == "str_data":
        return None
    if kind == "bin_data":
        return GrpsMessage(success(), bin_data=data)
    return GrpsMessage(success(), str_data=_decoded(plan, output.name, data))


def _decoded(plan: ModelPlan, name: str, data: memoryview | bytes) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise ModelFailure(
            f"output '{name}' of model '{plan.spec.name}' holds bytes that are no UTF-8 text"
        ) from None


def _tensor(plan: ModelPlan, output: OutputTensor) -> GenericTensor:
    dtype = DTYPES[output.datatype]
    name, shape = output.name, output.shape
    if dtype is DataType.DT_STRING:
        count = element_count(shape)
        elements = bytes_codec.decode(output.view, count, name, plan.spec.name, "output")
        texts = [_decoded(plan, name, element) for element in elements]
        return GenericTensor(name, dtype, shape, {dtype: texts})
    array = np.frombuffer(output.view, DATATYPES[output.datatype].numpy)
    if output.datatype in ("FP16", "BF16"):
        array = array.astype(np.float32)
    elif output.datatype == "BOOL":
        array = array.view(np.uint8)
    elif output.datatype == "UINT64":
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise ModelFailure(f"output '{name}' has a value that GRPS cannot carry (UINT64)")
        array = array.view(np.int64)
    return GenericTensor(name, dtype, shape, {dtype: array})
