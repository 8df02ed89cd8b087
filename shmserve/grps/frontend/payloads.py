"""Payloads of GRPS requests, as inputs of a model.

Tensors go to the inputs of their names, nameless tensors to the inputs in the model's order. Text
and bytes go to the model's single input for text or bytes. A model that takes the message gets the
message. docs/grps.md has the table.
"""

from __future__ import annotations

from math import prod
from typing import Any, Protocol

import numpy as np
from msgspec import Struct

from shmserve.config import Settings
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.errors import InvalidArgument, TooLarge
from shmserve.grps.protocol import message_wire
from shmserve.grps.protocol.grps_message import GenericTensor, GrpsDataType, GrpsMessage
from shmserve.grps.protocol.json_reader import FIELDS
from shmserve.grps.protocol.model_parameters import MESSAGE, takes_message
from shmserve.protocol import bounds
from shmserve.protocol.oip.model_signature import InputSignature, ModelSignature
from shmserve.protocol.oip.raw_requests import deduce
from shmserve.protocol.oip.request import InferInput, InferRequest
from shmserve.protocol.oip.validation import UNKNOWN_ID, CheckedInput, check_inputs
from shmserve.protocol.protobuf.wire import encode_varint
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES
from shmserve.waiting import beside_if_large

# parameters: names of the input and output for text and bytes
INPUT, OUTPUT = "grps_input", "grps_output"
_BIN_DATA = b"\x1a"  # key of the field on the wire
_PREFIX = f"[request id: {UNKNOWN_ID}] "

# datatypes with a GRPS data type of their own
_PLAIN = {
    "UINT8": GrpsDataType.DT_UINT8,
    "INT8": GrpsDataType.DT_INT8,
    "INT16": GrpsDataType.DT_INT16,
    "INT32": GrpsDataType.DT_INT32,
    "INT64": GrpsDataType.DT_INT64,
    "FP16": GrpsDataType.DT_FLOAT16,
    "FP32": GrpsDataType.DT_FLOAT32,
    "FP64": GrpsDataType.DT_FLOAT64,
    "BYTES": GrpsDataType.DT_STRING,
}
_WIDENED = {
    "BOOL": GrpsDataType.DT_UINT8,
    "UINT16": GrpsDataType.DT_INT32,
    "UINT32": GrpsDataType.DT_INT64,
    "UINT64": GrpsDataType.DT_INT64,
}
# datatype of a model -> GRPS's element type for its values; datatypes not listed above are small
# floats
DTYPES = dict.fromkeys(DATATYPES, GrpsDataType.DT_FLOAT32) | _PLAIN | _WIDENED


class Body(Protocol):
    """Bytes that are still to be received; `remaining` is their number, None if unknown."""

    remaining: int | None

    def fill(self, view: memoryview) -> int: ...


class Payload(Struct, frozen=True):
    """The payload of a request.

    Attributes:
        wire: bytes of the message, if the message came in protobuf's wire form.
        body: bin_data that has not been received yet.
    """

    message: GrpsMessage
    wire: bytes | None = None
    body: Body | None = None


def fill(
    call: InferenceCall, signature: ModelSignature, payload: Payload, settings: Settings
) -> None:
    """Check a request against its model and copy the inputs into slots.

    Raises:
        InvalidArgument: the request does not fit the model.
        TooLarge: a tensor is larger than `max_tensor_bytes`.
    """
    if takes_message(signature.spec):
        _fill_message(call, payload, settings)
        return
    message = payload.message
    if payload.body is not None or message.bin_data is not None or message.str_data is not None:
        _fill_text(call, signature, payload, settings)
    elif message.gtensors is not None:
        _fill_tensors(call, signature, message, settings)
    else:
        kind = message.which or "no payload"
        raise InvalidArgument(
            f"model '{signature.spec.name}' takes tensors; the request has {kind}:"
            " send gtensors (gmap is for models that take the GRPS message)"
        )


def _fill_message(call: InferenceCall, payload: Payload, settings: Settings) -> None:
    body = payload.body
    if payload.wire is not None:
        parts: list[bytes | memoryview] = [payload.wire]
    else:
        parts = beside_if_large(_elements(payload.message), message_wire.parts, payload.message)
    size = message_wire.size_of(parts)
    rest = 0
    if body is not None:
        rest = body.remaining or 0
        parts.append(_BIN_DATA + encode_varint(rest))
        size += len(parts[-1])
    if size + rest > settings.max_tensor_bytes:
        raise TooLarge(
            f"the message has {size + rest} bytes, at most {settings.max_tensor_bytes} are allowed"
            " (setting max_tensor_bytes)"
        )
    reservation = call.reserve(size + rest)
    view, at = reservation.view, 0
    for part in parts:
        view[at : at + len(part)] = part
        at += len(part)
    call.receipt.copy_in(size + (body.fill(view[at:]) if body is not None else 0))
    call.add_input(MESSAGE, "UINT8", (size + rest,), reservation)


# -------------------------------------------------------------- text and bytes


def _fill_text(
    call: InferenceCall, signature: ModelSignature, payload: Payload, settings: Settings
) -> None:
    target = _text_input(signature, payload)
    bytes_kind = target.datatype.name == "BYTES"
    body = payload.body
    message = payload.message
    data: Any = message.bin_data
    if message.str_data is not None:
        data = message.str_data.encode()
    size = (body.remaining or 0) if body is not None else len(data)
    if bytes_kind:
        shape = tuple(1 if dim < 0 else dim for dim in target.shape)
        source = InferInput(target.name, shape, "BYTES", "the text", None, size + 4)
        if prod(shape) != 1:
            raise _no_text(signature, payload)
    else:
        alone = ModelSignature(
            signature.spec, {target.name: target}, signature.required, signature.outputs, ()
        )
        source = deduce(alone, size).inputs[0]
    (item,) = _checked(signature, InferRequest((source,)), settings)
    reservation = call.reserve(item.nbytes)
    view = reservation.view
    if bytes_kind:
        view[:4] = size.to_bytes(4, "little")
        view = view[4:]
    if body is not None:
        call.receipt.copy_in(body.fill(view))
    else:
        view[:] = data
        call.receipt.copy_in(size)
    call.add_input(source.name, source.datatype, source.shape, reservation)


def _text_input(signature: ModelSignature, payload: Payload) -> InputSignature:
    name = signature.spec.parameters.get(INPUT, "")
    if not name and len(signature.inputs) == 1:
        name = next(iter(signature.inputs))
    spec = signature.inputs.get(name)
    kinds = ("BYTES",) if payload.message.str_data is not None else ("BYTES", "UINT8")
    if spec is None or spec.datatype.name not in kinds:
        raise _no_text(signature, payload)
    return spec


def _no_text(signature: ModelSignature, payload: Payload) -> InvalidArgument:
    kind = payload.message.which or "bin_data"
    expected = ", ".join(
        f"{item.name} {item.datatype.name} {list(item.shape)}" for item in signature.inputs.values()
    )
    return InvalidArgument(
        f"model '{signature.spec.name}' has no one place for {kind}; its inputs are {expected}:"
        " send gtensors"
    )


# --------------------------------------------------------------------- tensors


def _fill_tensors(
    call: InferenceCall, signature: ModelSignature, message: GrpsMessage, settings: Settings
) -> None:
    tensors = list(message.gtensors or ())
    if len(tensors) > bounds.MAX_INPUTS:
        raise InvalidArgument(
            f"the request has {len(tensors)} tensors, at most {bounds.MAX_INPUTS} are allowed"
        )
    names = _names(signature, tensors)
    sources = beside_if_large(_elements(message), _sources, signature, names, tensors)
    for item, tensor in zip(
        _checked(signature, InferRequest(sources), settings), tensors, strict=True
    ):
        source = item.source
        reservation = call.reserve(item.nbytes)
        beside_if_large(item.nbytes, _write, reservation.view, item, tensor)
        call.receipt.copy_in(item.nbytes)
        call.add_input(source.name, source.datatype, source.shape, reservation)


def _names(signature: ModelSignature, tensors: list[GenericTensor]) -> list[str]:
    """Return the name of the input for each tensor."""
    names = [tensor.name for tensor in tensors]
    if not any(names):
        input_names = list(signature.inputs)
        if len(names) > len(input_names):
            raise InvalidArgument(
                f"the request has {len(names)} tensors without names, model"
                f" '{signature.spec.name}' has {len(input_names)} inputs"
            )
        return input_names[: len(names)]
    if not all(names):
        raise InvalidArgument("give all tensors names, or none of them")
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgument(f"tensor '{name}' is there twice")
    return names


def _elements(message: GrpsMessage) -> int:
    """Return the number of elements in a message's tensors, a measure of the time to check or
    encode them."""
    tensors = message.gtensors or ()
    return sum(len(values) for tensor in tensors for values in tensor.flat.values())


def _sources(
    signature: ModelSignature, names: list[str], tensors: list[GenericTensor]
) -> tuple[InferInput, ...]:
    return tuple(
        _source(signature, name, tensor) for name, tensor in zip(names, tensors, strict=True)
    )


def _source(signature: ModelSignature, name: str, tensor: GenericTensor) -> InferInput:
    """Return a tensor in the form that input checks take, with the size of its elements."""
    dtype = tensor.dtype
    if dtype not in GrpsDataType.__members__.values() or dtype == GrpsDataType.DT_INVALID:
        raise InvalidArgument(f"tensor '{name}' has no dtype that is known: {dtype}")
    other_kinds = [kind for kind, values in tensor.flat.items() if kind != dtype and len(values)]
    if other_kinds:
        field = FIELDS[GrpsDataType(other_kinds[0])]
        raise InvalidArgument(f"tensor '{name}' is {GrpsDataType(dtype).name}, but {field} is set")
    values = tensor.flat.get(dtype, ())
    count = prod(tensor.shape)
    if len(values) != count:
        raise InvalidArgument(
            f"tensor '{name}' has shape {list(tensor.shape)}, which is {count} elements, but"
            f" {FIELDS[GrpsDataType(dtype)]} has {len(values)}"
        )
    spec = signature.inputs.get(name)
    datatype = _datatype(dtype, spec)
    if datatype == "BYTES":
        nbytes = sum(4 + len(value.encode()) for value in values)
    else:
        nbytes = count * DATATYPES[datatype].itemsize
    return InferInput(name, tensor.shape, datatype, f"tensor '{name}'", None, nbytes)


def _datatype(dtype: int, spec: InputSignature | None) -> str:
    """Return the datatype of the input if GRPS carries that datatype in this element type; else
    the datatype of the element type."""
    if spec is not None and DTYPES[spec.datatype.name] == dtype:
        return spec.datatype.name
    return next(name for name, kind in _PLAIN.items() if kind == dtype)


def _write(view: memoryview, item: CheckedInput, tensor: GenericTensor) -> None:
    values = tensor.flat.get(tensor.dtype, ())
    if isinstance(values, list):
        bytes_codec.write([value.encode() for value in values], view)
        return
    if not item.count:
        return
    target = np.frombuffer(view, item.signature.datatype.numpy)
    array = np.asarray(values)
    kind = target.dtype.kind
    if kind in "iub" and array.dtype != target.dtype:
        limits = None if kind == "b" else np.iinfo(target.dtype)
        low, high = (0, 1) if limits is None else (int(limits.min), int(limits.max))
        if int(array.min()) < low or int(array.max()) > high:
            raise InvalidArgument(
                f"tensor '{item.source.name}' has a value that is not in {low} to {high}"
                f" ({item.source.datatype})"
            )
    with np.errstate(over="ignore"):  # values too large for FP16 become Infinity
        target[:] = array


def _checked(
    signature: ModelSignature, request: InferRequest, settings: Settings
) -> list[CheckedInput]:
    try:
        return check_inputs(signature, request, settings, _no_regions)
    except InvalidArgument as ex:  # GRPS requests have no id
        raise type(ex)(ex.message.removeprefix(_PREFIX)) from None


def _no_regions(*_: Any) -> Any:
    raise AssertionError("GRPS requests name no regions")
