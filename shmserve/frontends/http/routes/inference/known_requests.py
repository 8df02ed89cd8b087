"""JSON parts of requests, remembered byte for byte with what reading and checking them gave.

Clients send the same again and again, and only their tensors differ. What depends on more than
the bytes and the model version, windows of regions and whose they are, is looked up again
whenever the registry, or who asks, is another than the last time.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
from msgspec import Struct

from shmserve.config import Settings
from shmserve.protocol.control.data_messages import OutputPlace, RegionRef
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.request import InferOutput, InferRequest, RegionWindow, parse_request
from shmserve.protocol.oip.validation import (
    CheckedInput,
    Find,
    check_inputs,
    check_outputs,
    locate_inputs,
    locate_outputs,
    slot_bytes,
)
from shmserve.tensor.spec import ModelSpec

_MOST_KNOWN = 256
_LONGEST = 4096  # bytes; what is longer costs its reader little in comparison


class CheckedRequest(Struct, frozen=True):
    """A request that fits its model.

    Attributes:
        wanted: the outputs the client wants, in its order.
        names: of those it has named.
        binary_bytes: how much follows the JSON part.
        slot_bytes: what its inputs take of the pool, see `validation.slot_bytes`.
        in_regions: whether anything of it lies in client memory.
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
    """A request, compared with its model; raises what `check_inputs` and `check_outputs` do."""
    inputs = check_inputs(signature, request, limits, find)
    wanted, places = check_outputs(signature, request, find)
    names = tuple([output.name for output in request.outputs])
    sizes = sum(source.binary_size or 0 for source in request.inputs)
    in_regions = bool(places) or any(item.at is not None for item in inputs)
    return CheckedRequest(
        *(signature, request, inputs, wanted, names, places),
        *(sizes, slot_bytes(inputs), in_regions),
    )


class Regions(Protocol):
    """The caller's regions. `as_of`: while it is equal, `find` finds the same."""

    def find(self, spec: ModelSpec, window: RegionWindow) -> RegionRef: ...

    def as_of(self) -> object: ...


class _Known(Struct):
    """`located`: with the windows of regions, and as of when they were that."""

    request: CheckedRequest
    located: tuple[object, CheckedRequest] | None = None


class KnownRequests:
    """Of one process; for any thread. `limits` are always the same."""

    def __init__(self, limits: Settings) -> None:
        self._limits = limits
        self._known: dict[tuple[str, bytes], _Known] = {}

    def check(self, signature: ModelSignature, text: bytes, regions: Regions) -> CheckedRequest:
        """As `parse_request` and `checked`, whose errors it raises."""
        key = (signature.spec.name, text)
        known = self._known.get(key)
        if known is not None and known.request.signature is signature:
            return _located(known, regions) if known.request.in_regions else known.request
        fresh = checked(signature, parse_request(text, self._limits), self._limits, regions.find)
        if len(text) <= _LONGEST and _is_repeatable(fresh.request):
            if len(self._known) >= _MOST_KNOWN:
                self._known = {}
            self._known[key] = _Known(fresh)
        return fresh


def _is_repeatable(request: InferRequest) -> bool:
    """Whether the same bytes are likely to come again: without an id and with the tensors
    elsewhere."""
    return not request.id and all(source.data is None for source in request.inputs)


def _located(known: _Known, regions: Regions) -> CheckedRequest:
    as_of, located = regions.as_of(), known.located  # what changes meanwhile counts the next time
    if located is not None and located[0] == as_of:
        return located[1]
    request = known.request
    spec = request.signature.spec
    found = msgspec.structs.replace(
        request,
        inputs=locate_inputs(spec, request.inputs, regions.find),
        places=locate_outputs(spec, request.wanted, regions.find),
    )
    known.located = (as_of, found)
    return found
