"""Trace entries: a trace as entries of Triton's trace files, or as a line of the log.

A file is a JSON array. Each trace has an id and several entries: the model and request, one entry
for each moment, and one for each tensor. docs/statistics.md has an example.
"""

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np

from shmserve.dispatch.traced_request import Trace, TracedTensor
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES

_FRONTENDS = {"http": "HTTP", "grpc": "GRPC"}
_OF_FRONTENDS = {"RECV_START", "RECV_END", "SEND_START", "SEND_END"}


def entries_of(
    trace: Trace, number: int, protocol: str, parent: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield the entries of a trace with this id, then the entries of its steps, whose ids
    follow."""
    spec = trace.entry.spec
    head: dict[str, Any] = {
        "id": number,
        "model_name": spec.name,
        "model_version": int(spec.version),
    }
    if trace.request_id:
        head["request_id"] = trace.request_id
    if parent:
        head["parent_id"] = parent
    yield head
    for name, ns in _moments(trace, "" if parent else protocol):
        yield {"id": number, "timestamps": [{"name": name, "ns": ns}]}
    for tensor in trace.tensors:
        yield {"id": number, "activity": tensor.activity, "tensor": _shown(tensor)}
    own, number = number, number + 1
    for step in trace.steps:
        if step.times:
            yield from entries_of(step, number, protocol, own)
            number += len(step.whole)


def line_of(trace: Trace, protocol: str, process: str) -> dict[str, Any]:
    """Return a trace as one object for the log, without tensors."""
    line: dict[str, Any] = {
        "model": trace.entry.spec.name,
        "version": trace.entry.spec.version,
        "request": trace.request_id,
        **_context(trace),
        "protocol": protocol,
        "process": process,
        "executor": trace.executor,
        "timestamps": dict(_moments(trace, protocol)),
    }
    steps = [line_of(step, "", process) for step in trace.steps if step.times]
    return {**line, "steps": steps} if steps else line


def _context(trace: Trace) -> dict[str, str]:
    """Return the ids of the parent span, if any."""
    parent = trace.parent
    return {} if parent is None else {"trace_id": parent.trace_id, "parent_id": parent.span_id}


def _moments(trace: Trace, protocol: str) -> Iterator[tuple[str, int]]:
    """Yield the moments under Triton's names. Moments of a frontend are named after the frontend,
    or left out without a frontend."""
    frontend = _FRONTENDS.get(protocol)
    for name, ns in trace.times if trace.settings.on else ():
        if name not in _OF_FRONTENDS:
            yield name, ns
        elif frontend == "GRPC" and name.startswith("RECV_"):
            yield f"GRPC_WAITREAD_{name[len('RECV_') :]}", ns
        elif frontend:
            yield f"{frontend}_{name}", ns


def _shown(tensor: TracedTensor) -> dict[str, str]:
    return {
        "name": tensor.name,
        "data": _text(tensor),
        "shape": ",".join(map(str, tensor.shape)),
        "dtype": tensor.datatype,
    }


def _text(tensor: TracedTensor) -> str:
    """Return the elements separated by commas. As in Triton, return "" for datatypes without a
    JSON form."""
    kind = DATATYPES[tensor.datatype]
    if not kind.itemsize:
        elements = bytes_codec.decode(tensor.data, prod(tensor.shape), tensor.name, "")
        return ",".join(f'"{element.decode(errors="replace")}"' for element in elements)
    if not kind.json_ok:
        return ""
    array = np.frombuffer(tensor.data, kind.numpy)
    if tensor.datatype == "BOOL":
        array = array.astype(np.uint8)
    return ",".join(array.astype(str).tolist())
