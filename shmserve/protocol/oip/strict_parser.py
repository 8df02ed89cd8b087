"""The slow path of request parsing: the standard library's JSON, then field by field.

The slow path runs only after the typed decoder has refused the text. Either the text is wrong, and
the message names the first wrong field. Or the text holds NaN or Infinity tokens, which Triton's
clients send and msgspec does not know.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from shmserve.errors import InvalidArgument
from shmserve.protocol import bounds
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip import json_request as wire

# Levels around a "data" array: the request, "inputs" and the input itself.
_OUTER_LEVELS = 3
# Largest number in a region's window. The lookup of the region refuses a window outside the
# region.
_MAX_UINT64 = (1 << 64) - 1
_SHOWN = 64  # characters of a client's value that a message repeats
_IN_WORDS: dict[type, str] = {dict: "an object", list: "an array", str: "a string"}
_T = TypeVar("_T")
Pairs = Callable[[list[tuple[str, Any]]], dict[str, Any]]
_STRINGS = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEP = np.zeros(256, np.int8)  # change of the depth at a bracket
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1


def parse(text: bytes) -> wire.JsonRequest:
    """Parse a request. Raise `InvalidArgument` naming the first wrong field."""
    document = loads(text)
    if not isinstance(document, dict):
        raise InvalidArgument(f"the request must be a JSON object, got {_show(document)}")
    if "inputs" not in document:
        raise InvalidArgument("the request has no 'inputs'")
    inputs = _array(document["inputs"], "inputs")
    outputs = _array(document.get("outputs", []), "outputs")
    return wire.JsonRequest(
        tuple([_input(item, f"inputs[{index}]") for index, item in enumerate(inputs)]),
        tuple([_output(item, f"outputs[{index}]") for index, item in enumerate(outputs)]),
        _typed(document.get("id", ""), str, "id"),
        _parameters(document.get("parameters", {}), "parameters"),
    )


def loads(text: bytes | memoryview, pairs: Pairs | None = None) -> Any:
    """Parse JSON with the standard library. Every failure is an `InvalidArgument`. NaN, Infinity
    and -Infinity are accepted; numbers outside the range of a double are refused. `pairs` makes an
    object of its members, for callers that refuse duplicate keys."""
    data = bytes(text)
    try:
        characters = data.decode()
    except UnicodeDecodeError as ex:
        raise InvalidArgument(f"the request JSON is not UTF-8 (at byte {ex.start})") from None
    check_nesting(data, bounds.MAX_JSON_NESTING)
    try:
        document = json.loads(characters, parse_float=_finite, object_pairs_hook=pairs)
        if "\\ud" in characters or "\\uD" in characters:
            # Lone surrogates are not Unicode and could not be sent back.
            json.dumps(document, ensure_ascii=False).encode()
    except json.JSONDecodeError as ex:
        raise InvalidArgument(
            f"failed to parse the request JSON: {ex.msg} at character {ex.pos}"
        ) from None
    except UnicodeEncodeError:
        raise InvalidArgument("a string of the request JSON is not valid Unicode") from None
    except RecursionError:
        raise InvalidArgument(_too_deep(bounds.MAX_JSON_NESTING)) from None
    except ValueError as ex:
        raise InvalidArgument(f"failed to parse the request JSON: {ex}") from None
    return document


def check_nesting(text: bytes, limit: int, outer: int = _OUTER_LEVELS) -> None:
    """Refuse text whose arrays and objects are nested too deep, before any recursion. The limit
    applies within "data"; `outer` more levels are allowed around it."""
    allowed = limit + outer
    if text.count(b"[") + text.count(b"{") <= allowed:
        return
    brackets = _STRINGS.sub(b"", text).translate(None, _NOT_BRACKETS)
    depth = np.cumsum(_STEP[np.frombuffer(brackets, np.uint8)], dtype=np.int32)
    if depth.max(initial=0) > allowed:
        raise InvalidArgument(_too_deep(limit))


def _too_deep(limit: int) -> str:
    return f"JSON nesting depth exceeds maximum allowed limit ({limit})"


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number {text[:_SHOWN]} is out of range")
    return value


def _input(value: Any, where: str) -> wire.JsonInput:
    item = _typed(value, dict, where)
    for key in ("name", "shape", "datatype"):
        if key not in item:
            raise InvalidArgument(f"{where} has no '{key}'")
    name = _typed(item["name"], str, f"{where}.name")
    shape = _typed(item["shape"], list, f"{where}.shape")
    dims = tuple([_dimension(dim, f"{where}.shape[{axis}]") for axis, dim in enumerate(shape)])
    datatype = _typed(item["datatype"], str, f"{where}.datatype")
    parameters = _input_parameters(item.get("parameters", {}), f"{where}.parameters")
    if "data" not in item:
        return wire.JsonInput(name, dims, datatype, parameters)
    data = _typed(item["data"], list, f"{where}.data")
    return wire.JsonInput(name, dims, datatype, parameters, cast("msgspec.Raw", data))


def _dimension(value: Any, where: str) -> int:
    if type(value) is not int or value < 0:
        raise InvalidArgument(
            "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as"
            f" unsigned-integer: {where} must be a non-negative integer, got {_show(value)}"
        )
    return uint(value, where)


def _input_parameters(value: Any, where: str) -> wire.InputParameters:
    item = _typed(value, dict, where)
    return wire.InputParameters(_size(item, "binary_data_size", where), *_region(item, where))


def _output(value: Any, where: str) -> wire.JsonOutput:
    item = _typed(value, dict, where)
    if "name" not in item:
        raise InvalidArgument(f"{where} has no 'name'")
    name = _typed(item["name"], str, f"{where}.name")
    where = f"{where}.parameters"
    parameters = _typed(item.get("parameters", {}), dict, where)
    binary = parameters.get("binary_data", UNSET)
    if binary is not UNSET and not isinstance(binary, bool):
        raise InvalidArgument(f"{where}.binary_data must be true or false, got {_show(binary)}")
    classes = uint(parameters.get("classification", 0), f"{where}.classification")
    return wire.JsonOutput(
        name, wire.OutputParameters(classes, binary, *_region(parameters, where))
    )


def _region(item: dict[str, Any], where: str) -> tuple[Any, int, Any]:
    name = "shared_memory_region"
    return (
        _typed(item[name], str, f"{where}.{name}") if name in item else UNSET,
        uint(item.get("shared_memory_offset", 0), f"{where}.shared_memory_offset", _MAX_UINT64),
        _size(item, "shared_memory_byte_size", where, _MAX_UINT64),
    )


def _size(
    item: dict[str, Any], name: str, where: str, most: int = wire.MAX_INT64
) -> int | UnsetType:
    return uint(item[name], f"{where}.{name}", most) if name in item else UNSET


def _parameters(value: Any, where: str) -> dict[str, Parameter]:
    item = _typed(value, dict, where)
    for key, entry in item.items():
        if not isinstance(entry, bool | int | float | str):
            raise InvalidArgument(
                f"parameter '{key}' has invalid type. It should be either 'int', 'bool',"
                f" 'double' or 'string', got {_show(entry)}"
            )
    return cast("dict[str, Parameter]", item)


def _array(value: Any, where: str) -> list[Any]:
    # one element beyond the limit, so that the caller refuses the list
    return _typed(value, list, where)[: bounds.MAX_INPUTS + 1]


def _typed(value: Any, kind: type[_T], where: str) -> _T:
    if not isinstance(value, kind):
        raise InvalidArgument(f"{where} must be {_IN_WORDS[kind]}, got {_show(value)}")
    return value


def uint(value: Any, where: str, most: int = wire.MAX_INT64) -> int:
    """Return a non-negative integer of at most `most`, such as a number of bytes or of a device.
    Raise InvalidArgument for another value; the text names `where` and the value."""
    if type(value) is not int or value < 0:
        raise InvalidArgument(f"{where} must be a non-negative integer, got {_show(value)}")
    if value > most:
        raise InvalidArgument(f"{where} must be at most {most}, got {_show(value)}")
    return value


def _show(value: Any) -> str:
    """Return a value as shortened JSON; containers are shown only by their kind."""
    if isinstance(value, dict | list):
        return _IN_WORDS[type(value)]
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
