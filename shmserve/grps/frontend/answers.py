"""Answers of a model, as GRPS messages."""

import logging
from math import prod
from typing import Any

import msgspec
import numpy as np

from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.errors import GENERIC, Code, InvalidArgument, ModelFailure, of_exception
from shmserve.grps.frontend.payloads import DTYPES, OUTPUT
from shmserve.grps.protocol import message_wire
from shmserve.grps.protocol.grps_message import (
    GenericTensor,
    GrpsDataType,
    GrpsMessage,
    failure,
    success,
)
from shmserve.grps.protocol.model_parameters import MESSAGE, takes_message
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES

log = logging.getLogger(__name__)

_TEXTS = ("str_data", "bin_data")


def refusal(ex: Exception, what: str) -> GrpsMessage:
    """Return the answer to a failed request. An unexpected error's text goes to the log only."""
    error = of_exception(ex)
    is_bug = error.code is Code.INTERNAL and not isinstance(error, ModelFailure)
    if is_bug or error is not ex:
        log.error("%s failed", what, exc_info=ex)
    return failure(error.message or GENERIC, error.http_status)


def to_message(signature: ModelSignature, outcome: Outcome, kind: str) -> GrpsMessage:
    """Convert an outcome to a message, whose large parts are views of the outcome. `kind`: kind of
    payload that the client asked with. Raise ModelFailure if the outcome does not fit into a GRPS
    message."""
    if takes_message(signature.spec):
        try:
            message = message_wire.parse(message_bytes(signature, outcome))
        except InvalidArgument:
            raise _no_message(signature) from None
        if message.status is None:
            message = msgspec.structs.replace(message, status=success())
        return message
    if kind in _TEXTS:
        text = _text(signature, outcome, kind)
        if text is not None:
            return text
    tensors = [_tensor(signature, output) for output in outcome.outputs]
    return GrpsMessage(success(), gtensors=tensors)


def to_wire(signature: ModelSignature, outcome: Outcome, kind: str) -> list[bytes | memoryview]:
    """Return the wire form of an outcome as a message, in parts. Raise ModelFailure if the outcome
    does not fit into a GRPS message."""
    if not takes_message(signature.spec):
        return message_wire.parts(to_message(signature, outcome, kind))
    view = message_bytes(signature, outcome)
    try:
        _, has_status = message_wire.glance(view)
    except InvalidArgument:
        raise _no_message(signature) from None
    # Protocol buffers merge later fields into earlier ones, so a missing status may stand first.
    return [view] if has_status else [_SUCCESS, view]


_SUCCESS = message_wire.encode(GrpsMessage(success()))


def message_bytes(signature: ModelSignature, outcome: Outcome) -> memoryview:
    """Return the message from the outcome of a model that takes messages."""
    for output in outcome.outputs:
        if output.name == MESSAGE:
            return output.view
    raise _no_message(signature)


def _no_message(signature: ModelSignature) -> ModelFailure:
    return ModelFailure(f"model '{signature.spec.name}' gave no GRPS message")


def _text(signature: ModelSignature, outcome: Outcome, kind: str) -> GrpsMessage | None:
    """Return text for text and bytes for bytes if the model gave a single piece; else None."""
    name = signature.spec.parameters.get(OUTPUT, "")
    if not name and len(outcome.outputs) != 1:
        return None
    output = next((o for o in outcome.outputs if not name or o.name == name), None)
    if output is None:
        return None
    data: Any = output.view
    if output.datatype == "BYTES":
        if prod(output.shape) != 1:
            return None
        bytes_codec.check(data, 1, output.name, signature.spec.name)
        data = data[bytes_codec.LENGTH_BYTES :]
    elif output.datatype != "UINT8" or kind == "str_data":
        return None
    if kind == "bin_data":
        return GrpsMessage(success(), bin_data=data)
    return GrpsMessage(success(), str_data=_decoded(signature, output.name, data))


def _decoded(signature: ModelSignature, name: str, data: memoryview | bytes) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise ModelFailure(
            f"output '{name}' of model '{signature.spec.name}' holds bytes that are no UTF-8 text"
        ) from None


def _tensor(signature: ModelSignature, output: OutputTensor) -> GenericTensor:
    dtype = DTYPES[output.datatype]
    name, shape = output.name, output.shape
    if dtype is GrpsDataType.DT_STRING:
        count = prod(shape)
        elements = bytes_codec.decode(output.view, count, name, signature.spec.name, "output")
        texts = [_decoded(signature, name, element) for element in elements]
        return GenericTensor(name, dtype, shape, {dtype: texts})
    array = np.frombuffer(output.view, DATATYPES[output.datatype].numpy)
    if dtype in (GrpsDataType.DT_FLOAT16, GrpsDataType.DT_FLOAT32):
        array = array.astype(np.float32, copy=False)
    elif output.datatype == "BOOL":
        array = array.view(np.uint8)
    elif output.datatype == "UINT64":
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise ModelFailure(f"output '{name}' has a value that GRPS cannot carry (UINT64)")
        array = array.view(np.int64)
    return GenericTensor(name, dtype, shape, {dtype: array})
