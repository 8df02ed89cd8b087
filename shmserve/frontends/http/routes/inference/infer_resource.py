"""POST /v2/models/{m}[/versions/{v}]/infer: from socket to slots and from slots to socket."""

from __future__ import annotations

import re
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.dispatch.caller_shares import CallerShare
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import InvalidArgument
from shmserve.frontends import request_ids
from shmserve.frontends.caller_numbers import IN_ENVIRON, of_host
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import compression
from shmserve.frontends.http.path_values import checked_version
from shmserve.frontends.http.request_caller import caller_of
from shmserve.frontends.http.routes.inference.body_heap import RAW_COST
from shmserve.frontends.http.routes.inference.body_reader import (
    BodyReader,
    header_length,
    held,
    open_body,
)
from shmserve.frontends.http.routes.inference.known_requests import KnownRequests, checked
from shmserve.frontends.http.server.header_fields import header_fields
from shmserve.frontends.http.server.response import BufferBody
from shmserve.frontends.inference import Inference
from shmserve.frontends.oip.forwarded_fields import compiled, forwarded
from shmserve.frontends.oip.results import make_result
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.protocol.control.data_messages import Parameter, RegionRef
from shmserve.protocol.oip import tensor_json
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.raw_requests import deduce
from shmserve.protocol.oip.request import InferRequest, RegionWindow, check_json_size
from shmserve.protocol.oip.validation import CheckedInput, refuse_decoupled
from shmserve.tensor import bytes_codec
from shmserve.tensor.spec import ModelSpec
from shmserve.waiting import LARGE, beside, beside_if_large

HEADER_LENGTH = "Inference-Header-Content-Length"
_STAGES = ("receive", "queue", "compute", "send")
_encode_receipt = msgspec.json.Encoder().encode


class InferResource:
    """Runs models."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, regions: SharedMemory) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._regions = regions
        self._forward = compiled(settings.http_header_forward_pattern)
        self._known = KnownRequests(settings)

    def on_post(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        source = InferBody(req.env, self._settings, self._regions, self._forward, self._known)
        entry = self._dispatcher.ready_model(name, checked_version(version) if version else "")
        inference = Inference(self._dispatcher, entry, source)
        try:
            _respond(resp, inference)
        except BaseException as ex:
            inference.failed(ex)
            inference.close()
            raise


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
            if source.data is not None:
                tensor = beside_if_large(_json_size(item), self._decoded, item)
                reservation = call.reserve(tensor.nbytes)
                tensor.write(reservation.view)
                receipt.copied_in += tensor.nbytes
            elif item.at is not None:
                call.add_region_input(source.name, source.datatype, source.shape, item.at)
                continue
            else:
                reservation = call.reserve(item.nbytes)
                view = reservation.view
                receipt.copied_in += reader.fill(view)
                if not item.signature.datatype.itemsize:
                    model = self._signature.spec.name
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


def _respond(resp: falcon.Response, inference: Inference[InferBody]) -> None:
    outcome = inference.run()
    answered = monotonic_ns()
    source, receipt = inference.source, inference.receipt
    environ = source.environ
    result = make_result(inference.signature, source.request, source.wanted, outcome, receipt)
    accept = environ.get("HTTP_ACCEPT_ENCODING")
    chosen = compression.choose(accept) if accept else ""
    if result.binary_bytes:
        resp.content_type = "application/octet-stream"
        resp.set_header(HEADER_LENGTH, str(len(result.head)))
    if chosen:
        receipt.copied_out += result.binary_bytes
        resp.data = beside(compression.compress, [result.head, *result.buffers], chosen)
        resp.set_header("Content-Encoding", chosen)
    elif result.buffers:
        body = BufferBody([result.head, *result.buffers], inference.close)
        resp.set_stream(body, len(result.head) + result.binary_bytes)
    else:
        resp.data = result.head
    receipt.send_ns = monotonic_ns() - answered
    if request_ids.IN_ENVIRON in environ:
        resp.set_header(request_ids.HEADER, request_ids.request_id(environ[request_ids.IN_ENVIRON]))
    if environ.get("HTTP_SHMSERVE_RECEIPT") == "1":
        set_receipt(resp, receipt)
    inference.answered()
    if chosen or not result.buffers:
        inference.close()


def set_receipt(resp: falcon.Response, receipt: Receipt) -> None:
    """Tell the client what its request cost."""
    costs = receipt.as_dict()
    resp.set_header("shmserve-receipt", _encode_receipt(costs).decode())
    times = costs["ns"]
    resp.set_header(
        "Server-Timing", ", ".join(f"{stage};dur={times[stage] / 1e6:.3f}" for stage in _STAGES)
    )
