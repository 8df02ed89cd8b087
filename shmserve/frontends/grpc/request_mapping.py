"""Inference requests over gRPC: rules that hold for gRPC alone. `frontends.oip` has the common
rules.

Source: Triton's gRPC frontend. The kinds of parameters are Triton's, and error texts follow
Triton's wording.
"""

from collections.abc import Callable
from math import prod

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip.request import (
    RESERVED_PREFIX,
    InferInput,
    InferOutput,
    InferRequest,
    RegionWindow,
    check_parameters,
    refuse_duplicates,
)
from shmserve.protocol.protobuf.infer_parameters import Uint64
from shmserve.protocol.protobuf.infer_wire import (
    WireInferRequest,
    WireInput,
    WireOutput,
    check_data,
)

EMPTY_FINAL = "triton_enable_empty_final_response"
_REGION = "shared_memory_region"
_OFFSET = "shared_memory_offset"
_BYTE_SIZE = "shared_memory_byte_size"
_MAX_DIGITS = 18  # versions are positive 64-bit numbers
# Parameters with a meaning, and the types of values that each parameter may have
_KINDS: dict[str, tuple[type, ...]] = {
    "sequence_id": (int, str),
    "sequence_start": (bool,),
    "sequence_end": (bool,),
    "priority": (int, Uint64),
    "timeout": (int,),
    "binary_data_output": (bool,),
    EMPTY_FINAL: (bool,),
}
_FIELDS = {
    bool: "bool_param",
    int: "int64_param",
    Uint64: "uint64_param",
    str: "string_param",
    float: "double_param",
}
_NO_PARAMETERS: dict[str, Parameter] = {}


def checked_version(version: str) -> str:
    """Return a version as the registry writes versions; empty for the newest version. Raise
    InvalidArgument if the version is no positive number."""
    if not version:
        return ""
    if not (version.isascii() and version.isdecimal()) or len(version) > _MAX_DIGITS:
        raise _no_version(version)
    number = int(version)
    if number == 0:
        raise _no_version(version)
    return str(number)


def _no_version(version: str) -> InvalidArgument:
    return InvalidArgument(  # clients search for the first half of the text
        f"failed to get model version from specified version string '{version[:64]}',"
        " version should be an integral value > 0"
    )


def to_request(wire: WireInferRequest, limits: Settings) -> tuple[InferRequest, bool]:
    """Return the request for the checks against its model, and True if the client wants empty final
    responses. Raise InvalidArgument if the request breaks a rule of gRPC."""
    check_data(wire)
    inputs = tuple([_input(source, index) for index, source in enumerate(wire.inputs)])
    outputs = tuple([_output(source, index) for index, source in enumerate(wire.outputs)])
    if len(inputs) > 1:
        refuse_duplicates("input", [item.name for item in inputs])
    if len(outputs) > 1:
        refuse_duplicates("output", [item.name for item in outputs])
    if not wire.parameters:
        return InferRequest(inputs, outputs, wire.id, _NO_PARAMETERS, True), False
    parameters, empty_final = _parameters(wire.parameters)
    return InferRequest(inputs, outputs, wire.id, parameters, True), empty_final


def announced_request(
    wire: WireInferRequest, nbytes: Callable[[str, tuple[int, ...]], int]
) -> InferRequest:
    """Return a request whose raw tensors have not arrived. `nbytes` computes the size of each
    tensor from datatype and shape. Raise InvalidArgument as `to_request` does for inputs."""
    inputs = tuple(
        [
            _input(source, index, nbytes(source.datatype, source.shape))
            for index, source in enumerate(wire.inputs)
        ]
    )
    refuse_duplicates("input", [item.name for item in inputs])
    return InferRequest(inputs, (), wire.id, _NO_PARAMETERS, True)


def _input(wire: WireInput, index: int, size: int = -1) -> InferInput:
    """Return an input. `size`: bytes of a raw tensor that has not arrived."""
    where = f"inputs[{index}]"
    for dim in wire.shape:
        if dim < 0:
            raise InvalidArgument(f"{where}.shape: dimensions must not be negative, got {dim}")
    region = _window(wire.parameters, f"{where}.parameters") if wire.parameters else None
    if region is None and size >= 0:
        return InferInput(wire.name, wire.shape, wire.datatype, where, None, size)
    if region is not None:
        return InferInput(wire.name, wire.shape, wire.datatype, where, region=region)
    if wire.contents is not None:
        size = wire.contents.nbytes(wire.datatype, prod(wire.shape))
    else:
        assert wire.raw is not None  # checked by check_data
        size = len(wire.raw)
    return InferInput(wire.name, wire.shape, wire.datatype, where, None, size)


def _output(wire: WireOutput, index: int) -> InferOutput:
    parameters = wire.parameters
    if not parameters:
        return InferOutput(wire.name)
    where = f"outputs[{index}].parameters"
    region = _window(parameters, where)
    classes = parameters.get("classification")
    if classes is None:
        return InferOutput(wire.name, region=region)
    if type(classes) is not int or classes < 1:
        raise InvalidArgument(
            f"{where}: 'classification' must be a positive int64_param, got {classes!r}"
        )
    if region is not None:
        raise InvalidArgument(f"{where}: Output can't set both '{_REGION}' and 'classification'")
    return InferOutput(wire.name, classes)


def _window(parameters: dict[str, Parameter], where: str) -> RegionWindow | None:
    name, nbytes = parameters.get(_REGION), parameters.get(_BYTE_SIZE)
    offset = parameters.get(_OFFSET, 0)
    if name is None:
        for key in (_OFFSET, _BYTE_SIZE):
            if key in parameters:
                raise InvalidArgument(f"{where}: '{key}' needs '{_REGION}'")
        return None
    if not isinstance(name, str):
        raise InvalidArgument(f"{where}: '{_REGION}' must be a string_param")
    if nbytes is None:
        raise InvalidArgument(f"{where}: '{_BYTE_SIZE}' must be specified along with '{_REGION}'")
    for key, value in ((_OFFSET, offset), (_BYTE_SIZE, nbytes)):
        if type(value) is not int or value < 0:
            raise InvalidArgument(
                f"{where}: '{key}' must be a non-negative int64_param, got {value!r}"
            )
    assert isinstance(offset, int)
    assert isinstance(nbytes, int)
    return RegionWindow(name, offset, nbytes)


def _parameters(given: dict[str, Parameter]) -> tuple[dict[str, Parameter], bool]:
    """Return the parameters for the model, and True if the client wants empty final responses."""
    kept: dict[str, Parameter] = {}
    for key, value in given.items():
        kinds = _KINDS.get(key)
        if kinds is None and key.startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"parameter '{key}': parameter keys starting with '{RESERVED_PREFIX}' are"
                " reserved for Triton usage. Only the following keys starting with"
                f" '{RESERVED_PREFIX}' are allowed: {EMPTY_FINAL}"
            )
        if type(value) not in (kinds or (bool, int, str, float)):
            expected = [_FIELDS[kind] for kind in kinds or (int, bool, str, float)]
            raise InvalidArgument(
                f"invalid value type for '{key}' parameter, expected {' or '.join(expected)},"
                f" got {_FIELDS[type(value)]}"
            )
        kept[key] = int(value) if type(value) is Uint64 else value
    empty_final = bool(kept.pop(EMPTY_FINAL, False))
    kept.pop("binary_data_output", None)  # without meaning over gRPC: answers are always binary
    check_parameters(kept)
    return kept, empty_final
