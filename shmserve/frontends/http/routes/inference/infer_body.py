"""An inference request over HTTP: from the socket to slots.

JSON parts are remembered byte for byte, with what reading and checking them gave: clients send the
same again and again, and only their tensors differ. What depends on more than the bytes and the
model version, windows of regions and whose they are, is looked up again whenever the registry or
the caller is another than the last time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from shmserve.config import Settings
from shmserve.dispatch.caller_shares import CallerShare
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import InvalidArgument
from shmserve.frontends import request_ids
from shmserve.frontends.caller_numbers import IN_ENVIRON, of_host
from shmserve.frontends.http.request_caller import caller_of
from shmserve.frontends.http.routes.inference.body_heap import RAW_COST
from shmserve.frontends.http.routes.inference.body_reader import (
    BodyReader,
    header_length,
    held,
    open_body,
)
from shmserve.frontends.http.server.header_fields import header_fields
from shmserve.frontends.oip.forwarded_fields import forwarded
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.protocol.control.data_messages import OutputPlace, Parameter, RegionRef
from shmserve.protocol.oip import tensor_json
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.raw_requests import deduce
from shmserve.protocol.oip.request import (
    InferOutput,
    InferRequest,
    RegionWindow,
    check_json_size,
    parse_request,
)
from shmserve.protocol.oip.validation import (
    CheckedInput,
    Find,
    check_inputs,
    check_outputs,
    locate_inputs,
    locate_outputs,
    refuse_decoupled,
    slot_bytes,
)
from shmserve.tensor import bytes_codec
from shmserve.tensor.spec import ModelSpec
from shmserve.waiting import LARGE, beside, beside_if_large

_MOST_KNOWN = 256
_LONGEST = 4096  # bytes; what is longer costs its reader little in comparison


class InferBody:
    """An inference request over HTTP.

    Attributes:
        environ: of WSGI.
        nbytes, share: as `RequestSource` has them.
        request, wanted: what the client asks for, once it was checked.
    """

    __slots__ = (
        "_forward",
        "_inputs",
        "_known",
        "_reader",
        "_regions",
        "_settings",
        "_signature",
        "environ",
        "nbytes",
        "request",
        "share",
        "started_ns",
        "wanted",
    )

    def __init__(
        self,
        environ: dict[str, Any],
        settings: Settings,
        regions: SharedMemory | None = None,
        forward: re.Pattern[str] | None = None,
        known: KnownRequests | None = None,
    ) -> None:
        self.started_ns = monotonic_ns()
        self.environ = environ
        self.nbytes = 0
        self.share: CallerShare | None = None
        self._settings = settings
        self._regions = regions
        self._known = known
        self._forward = forward

    def check(self, signature: ModelSignature) -> RunOptions:
        environ, settings = self.environ, self._settings
        if signature.spec.decoupled:
            refuse_decoupled(signature, "HTTP end point")
        reader = open_body(environ, settings)
        length = header_length(environ, reader)
        if length == 0:
            raw, reader = _raw_request(signature, reader, settings)
            found = checked(signature, raw, settings, self.find)
        else:
            if length is None:
                text = reader.read_rest(settings.max_json_bytes, "max_json_bytes")
            else:
                if length > settings.max_json_bytes:
                    check_json_size(length, settings)
                text = reader.read(length)
            assert self._known is not None
            check = self._known.check
            if len(text) < LARGE:
                found = check(signature, text, self)
            else:
                found = beside(check, signature, text, self)
        self._inputs, self.wanted, request = found.inputs, found.wanted, found.request
        self.nbytes = found.slot_bytes
        if reader.remaining != found.binary_bytes:
            _check_sizes(signature, self._inputs, reader)
        parameters = request.parameters
        if self._forward is not None:
            parameters = self.with_headers(parameters)
        self._signature, self._reader, self.request = signature, reader, request
        on_wait, number = client_of(environ)
        return RunOptions(
            *(request.id, found.names, parameters, found.places, on_wait),
            caller_number=number,
        )

    def traceparent(self) -> str:
        given: str = self.environ.get(request_ids.TRACEPARENT_IN_ENVIRON, "")
        return given

    def with_headers(self, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
        """Parameters and, on top of them, the header fields that are forwarded."""
        if self._forward is None:
            return parameters
        return {**parameters, **forwarded(self._forward, header_fields(self.environ))}

    def find(self, spec: ModelSpec, window: RegionWindow) -> RegionRef:
        """A window of a region of the caller's; raises as `SharedMemory.find`."""
        assert self._regions is not None
        return self._regions.find(lambda: caller_of(self.environ), spec, window)

    def as_of(self) -> object:
        """While this is equal, `find` finds the same."""
        assert self._regions is not None
        return self._regions.as_of(caller_of(self.environ))

    def fill(self, call: InferenceCall) -> None:
        reader, receipt = self._reader, call.receipt
        for item in self._inputs:
            source = item.source
            if item.at is not None:
                call.add_region_input(source.name, source.datatype, source.shape, item.at)
                continue
            if source.data is not None:
                tensor = beside_if_large(_json_size(item), self._decoded, item)
                copied = tensor.nbytes
                reservation = call.reserve(copied)
                tensor.write(reservation.view)
            else:
                reservation = call.reserve(item.nbytes)
                copied = reader.fill(reservation.view)
            receipt.copied_in += copied
            if source.data is None and not item.signature.datatype.itemsize:
                view, model = reservation.view, self._signature.spec.name
                size = item.nbytes
                beside_if_large(size, bytes_codec.check, view, item.count, source.name, model)
            call.add_input(source.name, source.datatype, source.shape, reservation)
        if reader.remaining != 0 and not reader.at_end():
            raise InvalidArgument(_additional(self._signature))

    def _decoded(self, item: CheckedInput) -> tensor_json.JsonTensor:
        source, datatype = item.source, item.signature.datatype
        assert source.data is not None
        return tensor_json.decode(source.data, datatype, item.count, source.where)


def _json_size(item: CheckedInput) -> int:
    """About how many bytes of JSON an input is."""
    data = item.source.data
    return memoryview(data).nbytes if isinstance(data, msgspec.Raw) else 8 * item.count


def _raw_request(
    signature: ModelSignature, reader: BodyReader, settings: Settings
) -> tuple[InferRequest, BodyReader]:
    """A request without JSON; a body of unknown length is read first, to know its size."""
    if reader.remaining is None:
        reader = held(reader.read_rest(settings.max_tensor_bytes, "max_tensor_bytes", RAW_COST))
    assert reader.remaining is not None
    request = deduce(signature, reader.remaining)
    prefix = (request.inputs[0].binary_size or 0) - reader.remaining
    if prefix:
        body = reader.read_rest(settings.max_tensor_bytes, "max_tensor_bytes", RAW_COST)
        reader = held(bytes_codec.encode([body]))
    return request, reader


def _check_sizes(signature: ModelSignature, inputs: list[CheckedInput], reader: BodyReader) -> None:
    """Before anything is reserved: do the binary tensors make up the rest of the body?

    Raises:
        InvalidArgument: the body is longer or shorter than what the request tells.
    """
    remaining = reader.remaining
    if remaining is None:
        return  # found out while receiving
    for item in inputs:
        size = item.source.binary_size
        if size is not None:
            remaining -= size
            if remaining < 0:
                raise InvalidArgument(
                    f"unexpected size for input '{item.source.name}', expecting {-remaining}"
                    f" additional bytes for model '{signature.spec.name}'"
                )
    if remaining:
        raise InvalidArgument(_additional(signature))


def _additional(signature: ModelSignature) -> str:
    return f"unexpected additional input data for model '{signature.spec.name}'"


def client_of(environ: dict[str, Any]) -> tuple[Callable[[], bool] | None, int]:
    """How to see whether the client is still there, which only our worker class can tell, and the
    number of the caller."""
    connection = environ.get("shmserve.connection")
    alive: Callable[[], bool] | None = connection.alive if connection is not None else None
    number: int | None = environ.get(IN_ENVIRON)
    return alive, of_host(environ.get("REMOTE_ADDR", "")) if number is None else number


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
    """A request that came before. `located`: the same with the windows of its regions, and the
    state of the registry they were found in."""

    request: CheckedRequest
    located: tuple[object, CheckedRequest] | None = None

    def locate(self, regions: Regions) -> CheckedRequest:
        """Return the request with its windows as they are now."""
        as_of, located = regions.as_of(), self.located  # a later change counts the next time
        if located is not None and located[0] == as_of:
            return located[1]
        request, spec = self.request, self.request.signature.spec
        found = msgspec.structs.replace(
            request,
            inputs=locate_inputs(spec, request.inputs, regions.find),
            places=locate_outputs(spec, request.wanted, regions.find),
        )
        self.located = (as_of, found)
        return found


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
            return known.locate(regions) if known.request.in_regions else known.request
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
