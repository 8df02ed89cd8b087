"""Requests of the Open Inference Protocol: the JSON part as frozen values.

The fast path is a single typed msgspec decoder that does not parse tensor data (`msgspec.Raw`). If
the decoder refuses the text, `strict_parser` runs: it accepts NaN and Infinity tokens, which
msgspec does not know, and names the wrong field.
"""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, TooLarge, UnreadableMessage
from shmserve.protocol import bounds
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.decoding import json_decoder
from shmserve.protocol.oip import strict_parser
from shmserve.protocol.oip.json_request import MAX_INT64, JsonInput, JsonOutput, JsonRequest

RESERVED_PREFIX = "triton_"


class RegionWindow(Struct, frozen=True, gc=False):
    """A window of a registered shared-memory region."""

    region: str
    offset: int
    nbytes: int


class InferInput(Struct, frozen=True):
    """An input. Exactly one of `data`, `binary_size` and `region` is set. `data`: JSON text of the
    array, or the parsed list if the text was not plain JSON. `where`: name of the field in
    messages, e.g. ``inputs[0]``."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    where: str
    data: msgspec.Raw | list[Any] | None = None
    binary_size: int | None = None
    region: RegionWindow | None = None


class InferOutput(Struct, frozen=True, gc=False):
    """A requested output. `binary` is None if the request's default applies."""

    name: str
    classification: int = 0
    binary: bool | None = None
    region: RegionWindow | None = None


class InferRequest(Struct, frozen=True):
    """The JSON part of an inference request. `parameters` are the parameters for the model."""

    inputs: tuple[InferInput, ...]
    outputs: tuple[InferOutput, ...] = ()
    id: str = ""
    parameters: dict[str, Parameter] = {}
    binary_output: bool = False


_decode = json_decoder(JsonRequest)


def parse_request(text: bytes, limits: Settings) -> InferRequest:
    """Parse the JSON part of an inference request. Raise InvalidArgument for malformed text; the
    message names the field. Raise TooLarge for more JSON than `max_json_bytes`."""
    if len(text) > limits.max_json_bytes:
        check_json_size(len(text), limits)
    try:
        wire = _decode(text)
    except UnreadableMessage:
        wire = strict_parser.parse(text)
    if len(wire.inputs) > bounds.MAX_INPUTS or len(wire.outputs) > bounds.MAX_INPUTS:
        raise InvalidArgument(
            f"the request has {len(wire.inputs)} inputs and {len(wire.outputs)} outputs, at most"
            f" {bounds.MAX_INPUTS} of each are allowed"
        )
    inputs = tuple([_input(item, index) for index, item in enumerate(wire.inputs)])
    outputs = tuple([_output(item, index) for index, item in enumerate(wire.outputs)])
    if len(inputs) > 1:
        refuse_duplicates("input", [item.name for item in inputs])
    if len(outputs) > 1:
        refuse_duplicates("output", [item.name for item in outputs])
    if not wire.parameters:
        return InferRequest(inputs, outputs, wire.id)
    parameters, binary_output = _parameters(wire.parameters)
    return InferRequest(inputs, outputs, wire.id, parameters, binary_output)


def check_json_size(size: int, limits: Settings) -> None:
    """Refuse more JSON than `max_json_bytes` with `TooLarge`."""
    if size > limits.max_json_bytes:
        raise TooLarge(
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of"
            f" {limits.max_json_bytes} bytes. It exceeds the maximum allowed value of"
            f" {limits.max_json_bytes} bytes (setting max_json_bytes)"
        )


def _input(wire: JsonInput, index: int) -> InferInput:
    where = f"inputs[{index}]"
    parameters = wire.parameters
    size, name = parameters.binary_data_size, parameters.shared_memory_region
    # The slow path gives a list. An empty list is data, empty text is no data.
    data = wire.data if isinstance(wire.data, list) or len(memoryview(wire.data)) else None
    if (data is not None) + (size is not UNSET) + (name is not UNSET) != 1:
        raise InvalidArgument(_source_error(where, data is not None, size, name))
    if size is not UNSET:
        return InferInput(wire.name, wire.shape, wire.datatype, where, None, size)
    if name is UNSET:
        return InferInput(wire.name, wire.shape, wire.datatype, where, data)
    nbytes = parameters.shared_memory_byte_size
    if nbytes is UNSET:
        raise InvalidArgument(
            f"{where}.parameters: 'shared_memory_region' needs 'shared_memory_byte_size'"
        )
    region = RegionWindow(name, parameters.shared_memory_offset, nbytes)
    return InferInput(wire.name, wire.shape, wire.datatype, where, region=region)


def _source_error(where: str, data: bool, size: int | UnsetType, region: str | UnsetType) -> str:
    given = [
        name
        for name, is_set in (
            ("'data'", data),
            ("'binary_data_size'", size is not UNSET),
            ("'shared_memory_region'", region is not UNSET),
        )
        if is_set
    ]
    but = f"But set {' '.join(given)}" if given else "But no field is set"
    return (
        f"{where}: Input must set only one of the following fields: 'data', 'binary_data_size' in"
        f" 'parameters', 'shared_memory_region' in 'parameters'. {but}"
    )


def _output(wire: JsonOutput, index: int) -> InferOutput:
    parameters = wire.parameters
    binary = None if parameters.binary_data is UNSET else parameters.binary_data
    name = parameters.shared_memory_region
    if name is UNSET:
        return InferOutput(wire.name, parameters.classification, binary)
    where = f"outputs[{index}]"
    if parameters.classification:
        raise InvalidArgument(
            f"{where}: Output can't set both 'shared_memory_region' and 'classification'"
        )
    if binary:
        raise InvalidArgument(
            f"{where}: Output can't set both 'shared_memory_region' and 'binary_data'"
        )
    nbytes = parameters.shared_memory_byte_size
    if nbytes is UNSET:
        raise InvalidArgument(
            f"{where}.parameters: 'shared_memory_region' needs 'shared_memory_byte_size'"
        )
    return InferOutput(
        wire.name, 0, None, RegionWindow(name, parameters.shared_memory_offset, nbytes)
    )


def refuse_duplicates(kind: str, names: list[str]) -> None:
    """Refuse a second tensor with the same name. `kind` is "input" or "output". Raise
    InvalidArgument if a name occurs twice."""
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:  # clients' tests look for either wording of a repeated output
            more = ""
            if kind == "output":
                more = f". Duplicate output name '{name}' is not allowed in a request"
            raise InvalidArgument(
                f"{kind}s[{index}]: {kind} '{name}' already exists in request{more}"
            )
        seen.add(name)


def _parameters(given: dict[str, Parameter]) -> tuple[dict[str, Parameter], bool]:
    """Return the parameters for the model, and True if outputs are binary by default."""
    if len(given) > bounds.MAX_INPUTS:
        raise InvalidArgument(
            f"the request has {len(given)} parameters, at most {bounds.MAX_INPUTS} are allowed"
        )
    check_parameters(given)
    if "binary_data_output" not in given:
        return given, False
    rest = {key: value for key, value in given.items() if key != "binary_data_output"}
    return rest, bool(given["binary_data_output"])


def check_parameters(given: dict[str, Parameter]) -> None:
    """Check the request parameters whose meaning the protocol fixes. Raise InvalidArgument for a
    reserved key, or a value of the wrong type or range."""
    for key, value in given.items():
        if key.startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"parameter '{key}': parameter keys starting with '{RESERVED_PREFIX}' are reserved"
                " for Triton usage and should not be specified"
            )
        if key in ("sequence_start", "sequence_end", "binary_data_output"):
            if not isinstance(value, bool):
                raise InvalidArgument(f"parameter '{key}' must be true or false, got {value!r}")
        elif key in ("priority", "timeout"):
            if not _is_uint(value):
                raise InvalidArgument(
                    f"parameter '{key}' must be a non-negative integer, got {value!r}"
                )
        elif key == "sequence_id" and not (isinstance(value, str) or _is_uint(value)):
            raise InvalidArgument(
                f"parameter '{key}' must be a non-negative integer or a string, got {value!r}"
            )
        elif type(value) is int and not -MAX_INT64 - 1 <= value <= 2 * MAX_INT64 + 1:
            raise InvalidArgument(f"parameter '{key}' does not fit 64 bits, got {value}")


def _is_uint(value: Parameter) -> bool:
    return type(value) is int and 0 <= value <= 2 * MAX_INT64 + 1
