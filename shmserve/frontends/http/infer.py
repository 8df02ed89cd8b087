"""POST /v2/models/{m}[/versions/{v}]/infer: from socket to slots and from slots to socket."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any

import falcon
import msgspec

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.frontends.http import compression as coding
from shmserve.frontends.http.buffers import BufferBody
from shmserve.frontends.http.routes.body_reader import Intake, header_length, held, open_intake
from shmserve.frontends.http.routes.callers import caller_of
from shmserve.frontends.http.routes.header_parameters import compiled, forwarded
from shmserve.frontends.http.routes.paths import checked_version
from shmserve.frontends.oip.results import Result, make_result
from shmserve.frontends.oip.seam import Call, Dispatcher, Receipt
from shmserve.frontends.oip.shared_memory import Regions
from shmserve.protocol.control.data_messages import OutputPlace
from shmserve.protocol.oip.model_signature import ModelPlan, plan_of
from shmserve.protocol.oip.raw_requests import deduce
from shmserve.protocol.oip.request import InferOutput, InferRequest, check_json_size, parse_request
from shmserve.protocol.oip import tensor_json as oip_data
from shmserve.protocol.oip.validation import (
    CheckedInput,
    check_inputs,
    check_outputs,
    refuse_decoupled,
)
from shmserve.tensor import bytes_codec

HEADER_LENGTH = "Inference-Header-Content-Length"
_STAGES = ("receive", "queue", "compute", "send")
_Checked = tuple[
    Intake, InferRequest, list[CheckedInput], tuple[InferOutput, ...], tuple[OutputPlace, ...]
]
_encode_receipt = msgspec.json.Encoder().encode


class InferResource:
    """Runs models."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings, regions: Regions) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._regions = regions
        self._forward = compiled(settings.http_header_forward_pattern)

    def on_post(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        started = monotonic_ns()
        environ = req.env
        entry = self._dispatcher.ready_model(name, checked_version(version) if version else "")
        try:
            plan = plan_of(entry.spec)
            intake, request, inputs, wanted, places = self._check(plan, environ)
        except BaseException as ex:
            self._dispatcher.refused(entry, ex)
            raise
        call = self._dispatcher.call(entry)
        try:
            receive(plan, call, inputs, intake, self._settings)
            receipt = call.receipt
            receipt.receive_ns = monotonic_ns() - started
            outcome = call.execute(
                request.id,
                tuple([output.name for output in request.outputs]),
                request.parameters,
                watch(environ),
                places,
            )
            answered = monotonic_ns()
            result = make_result(plan, request, wanted, outcome, receipt)
            _respond(environ, resp, result, call, answered)
        except BaseException as ex:
            call.failed(ex)
            call.close()
            raise

    def _check(self, plan: ModelPlan, environ: dict[str, Any]) -> _Checked:
        """Everything that can be known before memory is reserved and a model is asked."""
        refuse_decoupled(plan, "HTTP end point")
        settings = self._settings
        intake = open_intake(environ, settings)
        length = header_length(environ, intake)
        if length == 0:
            request, intake = _raw_request(plan, intake, settings)
        else:
            request = parse_request(_json_part(intake, length, settings), settings)
        find = partial(self._regions.find, partial(caller_of, environ))
        inputs = check_inputs(plan, request, settings, find)
        wanted, places = check_outputs(plan, request, find)
        _check_sizes(plan, inputs, intake)
        if self._forward is not None:
            request.parameters.update(forwarded(self._forward, environ))
        return intake, request, inputs, wanted, places


def _json_part(intake: Intake, length: int | None, settings: Settings) -> bytes:
    if length is None:
        return intake.read_rest(settings.max_json_bytes)
    check_json_size(length, settings)
    return intake.read(length)


def _raw_request(
    plan: ModelPlan, intake: Intake, settings: Settings
) -> tuple[InferRequest, Intake]:
    """A request without JSON; a body of unknown length is read first, to know its size."""
    if intake.remaining is None:
        intake = held(intake.read_rest(settings.max_tensor_bytes))
    assert intake.remaining is not None
    request = deduce(plan, intake.remaining)
    prefix = (request.inputs[0].binary_size or 0) - intake.remaining
    if prefix:
        body = intake.read_rest(settings.max_tensor_bytes)
        intake = held(bytes_codec.encode([body]))
    return request, intake


def _check_sizes(plan: ModelPlan, inputs: list[CheckedInput], intake: Intake) -> None:
    """Before anything is reserved: do the binary tensors make up the rest of the body?

    Raises:
        InvalidArgument: the body is longer or shorter than what the request tells.
    """
    remaining = intake.remaining
    if remaining is None:
        return  # found out while receiving
    for item in inputs:
        size = item.source.binary_size
        if size is not None:
            remaining -= size
            if remaining < 0:
                raise InvalidArgument(
                    f"unexpected size for input '{item.source.name}', expecting {-remaining}"
                    f" additional bytes for model '{plan.spec.name}'"
                )
    if remaining:
        raise InvalidArgument(_additional(plan))


def _additional(plan: ModelPlan) -> str:
    return f"unexpected additional input data for model '{plan.spec.name}'"


def receive(
    plan: ModelPlan, call: Call, inputs: list[CheckedInput], intake: Intake, settings: Settings
) -> None:
    """Bring every input into a slot."""
    receipt = call.receipt
    for item in inputs:
        source = item.source
        if source.data is not None:
            tensor = oip_data.decode(
                source.data, item.plan.datatype, item.count, source.where, settings
            )
            reservation = call.reserve(tensor.nbytes)
            tensor.write(reservation.view)
            receipt.copied_in += tensor.nbytes
        elif item.at is not None:
            call.add_region_input(source.name, source.datatype, source.shape, item.at)
            continue
        else:
            reservation = call.reserve(item.nbytes)
            view = reservation.view
            receipt.copied_in += intake.fill(view)
            if not item.plan.datatype.itemsize:
                bytes_codec.check(view, item.count, source.name, plan.spec.name)
        call.add_input(source.name, source.datatype, source.shape, reservation)
    if not intake.at_end():
        raise InvalidArgument(_additional(plan))


def watch(environ: dict[str, Any]) -> Callable[[], bool] | None:
    """How to see whether the client is still there; only our worker class can tell."""
    connection = environ.get("shmserve.connection")
    alive: Callable[[], bool] | None = connection.alive if connection is not None else None
    return alive


def _respond(
    environ: dict[str, Any], resp: falcon.Response, result: Result, call: Call, answered: int
) -> None:
    accept = environ.get("HTTP_ACCEPT_ENCODING")
    chosen = coding.choose(accept) if accept else ""
    if result.binary_bytes:
        resp.content_type = "application/octet-stream"
        resp.set_header(HEADER_LENGTH, str(len(result.head)))
    receipt = call.receipt
    if chosen:
        receipt.copied_out += result.binary_bytes
        resp.data = coding.compress([result.head, *result.buffers], chosen)
        resp.set_header("Content-Encoding", chosen)
    elif result.buffers:
        body = BufferBody([result.head, *result.buffers], call.close)
        resp.set_stream(body, len(result.head) + result.binary_bytes)
    else:
        resp.data = result.head
    receipt.send_ns = monotonic_ns() - answered
    if environ.get("HTTP_SHMSERVE_RECEIPT") == "1":
        set_receipt(resp, receipt)
    call.answered()
    if chosen or not result.buffers:
        call.close()


def set_receipt(resp: falcon.Response, receipt: Receipt) -> None:
    """Tell the client what its request cost."""
    told = receipt.as_dict()
    resp.set_header("shmserve-receipt", _encode_receipt(told).decode())
    times = told["ns"]
    resp.set_header(
        "Server-Timing", ", ".join(f"{stage};dur={times[stage] / 1e6:.3f}" for stage in _STAGES)
    )
