"""An inference request as its JSON says, unchecked: the result of both parsers."""

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shmserve.protocol.control.data_messages import Parameter

MAX_INT64 = (1 << 63) - 1
UInt = Annotated[int, Meta(ge=0, le=MAX_INT64)]
_NO_DATA = msgspec.Raw(b"")


class InputParameters(Struct, frozen=True, gc=False):
    """Known parameters of an input. Unknown parameters are ignored, as in Triton."""

    binary_data_size: UInt | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: UInt = 0
    shared_memory_byte_size: UInt | UnsetType = UNSET


class OutputParameters(Struct, frozen=True, gc=False):
    """Known parameters of a requested output."""

    classification: UInt = 0
    binary_data: bool | UnsetType = UNSET
    shared_memory_region: str | UnsetType = UNSET
    shared_memory_offset: UInt = 0
    shared_memory_byte_size: UInt | UnsetType = UNSET


class JsonInput(Struct, frozen=True):
    name: str
    shape: tuple[UInt, ...]
    datatype: str
    parameters: InputParameters = InputParameters()
    data: msgspec.Raw = _NO_DATA


class JsonOutput(Struct, frozen=True):
    name: str
    parameters: OutputParameters = OutputParameters()


class JsonRequest(Struct, frozen=True):
    inputs: tuple[JsonInput, ...]
    outputs: tuple[JsonOutput, ...] = ()
    id: str = ""
    parameters: dict[str, Parameter] = {}
