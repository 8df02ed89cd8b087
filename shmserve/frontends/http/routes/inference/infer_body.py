"""Inference requests over HTTP: from the socket to slots.

Checked JSON parts are cached by their bytes: clients repeat JSON parts, and only the tensors
differ. Windows of regions depend on more than the bytes and the model version: on the registered
regions and their owner. So windows are looked up again if the registry or the caller has changed
since the last time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.caller import UNKNOWN_CALLER
from shmserve.core.scheduling.sequence_names import sequence_owner
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
from shmserve.protocol.control.data_messages import Parameter, RegionRef
from shmserve.protocol.oip import tensor_json
from shmserve.protocol.oip.checked_request import CheckedRequest, checked
from shmserve.protocol.oip.model_signature import ModelSignature, deduce
from shmserve.protocol.oip.request import (
    InferRequest,
    RegionWindow,
    check_json_size,
    parse_request,
)
from shmserve.protocol.oip.validation import (
    CheckedInput,
    locate_inputs,
    locate_outputs,
    refuse_decoupled,
)
from shmserve.tensor import bytes_codec
from shmserve.tensor.spec import ModelSpec
from shmserve.waiting import LARGE, beside, beside_if_large

_MAX_CACHED = 256
_MAX_CACHED_BYTES = 4096  # bytes; parsing a longer JSON part adds little to the cost of reading


class InferBody:
    """An inference request over HTTP. `environ`: environment of WSGI. `nbytes`, `share`: see
    `RequestSource`. `request`, `wanted`: the checked request, and the requested outputs; set by
    `check`."""

    __slots__ = (
        "_forward", "_inputs", "_known", "_reader", "_regions", "_settings", "_signature",
        "environ", "nbytes", "request", "share", "started_ns", "wanted",
    )  # fmt: skip

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
            fitting = checked(signature, raw, settings, self.find)
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
                fitting = check(signature, text, self)
            else:
                fitting = beside(check, signature, text, self)
        self._inputs, self.wanted, request = fitting.inputs, fitting.wanted, fitting.request
        self.nbytes = fitting.slot_bytes
        if reader.remaining != fitting.binary_bytes:
            _check_sizes(signature, self._inputs, reader)
        parameters = request.parameters
        if self._forward is not None:
            parameters = self.with_headers(parameters)
        self._signature, self._reader, self.request = signature, reader, request
        on_wait, number = client_of(environ)
        return RunOptions(
            request.id,
            fitting.names,
            parameters,
            fitting.places,
            on_wait,
            caller_number=number,
            sequence_owner=sequence_owner(caller_of(environ), settings.shared_sequences)
            if "sequence_id" in parameters
            else UNKNOWN_CALLER,
        )

    def traceparent(self) -> str:
        given: str = self.environ.get(request_ids.TRACEPARENT_IN_ENVIRON, "")
        return given

    def with_headers(self, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
        """Return parameters with the forwarded fields, which replace parameters of equal names."""
        if self._forward is None:
            return parameters
        return {**parameters, **forwarded(self._forward, header_fields(self.environ))}

    def find(self, spec: ModelSpec, window: RegionWindow) -> RegionRef:
        """Return a window of a region of the caller. Raise the errors of `SharedMemory.find`."""
        assert self._regions is not None
        return self._regions.find(lambda: caller_of(self.environ), spec, window)

    def as_of(self) -> object:
        """Return a stamp. While the stamp stays equal, `find` gives equal results."""
        assert self._regions is not None
        return self._regions.as_of(caller_of(self.environ))

    def fill(self, call: InferenceCall) -> None:
        reader, receipt = self._reader, call.receipt
        for item in self._inputs:
            source = item.source
            if item.at is not None:
                call.add_input(source.name, source.datatype, source.shape, item.at)
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
    """Return the approximate size of an input's JSON in bytes."""
    data = item.source.data
    return memoryview(data).nbytes if isinstance(data, msgspec.Raw) else 8 * item.count


def _raw_request(
    signature: ModelSignature, reader: BodyReader, settings: Settings
) -> tuple[InferRequest, BodyReader]:
    """Return a request without JSON, and the reader of its tensor. A body of unknown length is
    read first to learn the size."""
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
    """Check that the binary tensors make up the rest of the body, before slots are reserved. Raise
    InvalidArgument if the body is longer or shorter than the request announces."""
    remaining = reader.remaining
    if remaining is None:
        return  # unknown length: checked while receiving
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
    """Return a function that tells whether the client is still connected, and the caller's number.
    The function is None unless this server's worker class handles the connection."""
    connection = environ.get("shmserve.connection")
    alive: Callable[[], bool] | None = connection.alive if connection is not None else None
    number: int | None = environ.get(IN_ENVIRON)
    return alive, of_host(environ.get("REMOTE_ADDR", "")) if number is None else number


class Regions(Protocol):
    """Regions of the caller. While `as_of` stays equal, `find` gives equal results."""

    def find(self, spec: ModelSpec, window: RegionWindow) -> RegionRef: ...

    def as_of(self) -> object: ...


class _CachedRequest(Struct):
    """A cached request. `located`: a stamp (`as_of`), and the request with the windows found at the
    time of the stamp; None before the first look-up."""

    request: CheckedRequest
    located: tuple[object, CheckedRequest] | None = None

    def locate(self, regions: Regions) -> CheckedRequest:
        """Return the request with its present windows."""
        # read first, so a change during the look-up counts the next time
        as_of, located = regions.as_of(), self.located
        if located is not None and located[0] == as_of:
            return located[1]
        request, spec = self.request, self.request.signature.spec
        current = msgspec.structs.replace(
            request,
            inputs=locate_inputs(spec, request.inputs, regions.find),
            places=locate_outputs(spec, request.wanted, regions.find),
        )
        self.located = (as_of, current)
        return current


class KnownRequests:
    """Cache of the checked requests of one process, for any thread."""

    def __init__(self, limits: Settings) -> None:
        self._limits = limits
        self._cached: dict[tuple[str, bytes], _CachedRequest] = {}

    def check(self, signature: ModelSignature, text: bytes, regions: Regions) -> CheckedRequest:
        """Return a JSON part, checked. Raise the errors of `parse_request` and `checked`."""
        key = (signature.spec.name, text)
        cached = self._cached.get(key)
        if cached is not None and cached.request.signature is signature:
            return cached.locate(regions) if cached.request.in_regions else cached.request
        fresh = checked(signature, parse_request(text, self._limits), self._limits, regions.find)
        if len(text) <= _MAX_CACHED_BYTES and _is_repeatable(fresh.request):
            if len(self._cached) >= _MAX_CACHED:
                self._cached = {}
            self._cached[key] = _CachedRequest(fresh)
        return fresh


def _is_repeatable(request: InferRequest) -> bool:
    """Return True if equal bytes may come again: no id, and no tensor data in the JSON part."""
    return not request.id and all(source.data is None for source in request.inputs)
