"""One inference over gRPC: from the message's bytes to slots, and from slots to a message."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import monotonic_ns

import grpc
import msgspec
from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.errors import ShmserveError
from shmserve.frontends.grpc.call_context import Asker
from shmserve.frontends.grpc.callers import Callers
from shmserve.frontends.grpc.request_mapping import checked_version, to_request
from shmserve.frontends.oip.results import classify
from shmserve.frontends.oip.seam import Call, Dispatcher, Outcome, Receipt
from shmserve.frontends.oip.shared_memory import Regions
from shmserve.protocol.control.data_messages import OutputPlace, Parameter
from shmserve.protocol.oip.model_signature import ModelPlan, plan_of
from shmserve.protocol.oip.request import InferOutput, InferRequest
from shmserve.protocol.oip.validation import (
    CheckedInput,
    check_inputs,
    check_outputs,
    refuse_decoupled,
)
from shmserve.protocol.protobuf.infer_wire import (
    Part,
    WireInferRequest,
    encode_response,
    encode_stream_response,
    parse_request,
    response_parts,
)
from shmserve.tensor import bytes_codec

RECEIPT = "shmserve-receipt"
_FINAL = "triton_final_response"
_encode_receipt = msgspec.json.Encoder().encode


class Inference(Struct, frozen=True):
    """A request that fits its model. `empty_final`: a final answer without outputs is wanted."""

    wire: WireInferRequest
    entry: ModelEntry
    plan: ModelPlan
    request: InferRequest
    inputs: list[CheckedInput]
    wanted: tuple[InferOutput, ...]
    places: tuple[OutputPlace, ...]
    empty_final: bool
    started: int


class Inferences:
    """Runs models for the rpcs ModelInfer and ModelStreamInfer."""

    def __init__(
        self, dispatcher: Dispatcher, settings: Settings, regions: Regions, callers: Callers
    ) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._regions = regions
        self._callers = callers

    def infer(self, data: bytes, context: grpc.ServicerContext) -> bytes:
        """ModelInfer: a ModelInferRequest to a ModelInferResponse."""
        started = monotonic_ns()
        wire = self.parse(data)
        asker = self.asker(context)
        entry = self.entry_of(wire)
        item = self.prepare(wire, entry, asker, started, one_answer=True)
        call = self._begin(item, asker)
        try:
            outcome = _execute(call, item)
            answered = monotonic_ns()
            outputs, raw = _outputs(item, outcome, call.receipt)
            spec = item.plan.spec
            message = encode_response(
                spec.name, spec.version, wire.id, outcome.parameters, outputs, raw
            )
            call.receipt.send_ns = monotonic_ns() - answered
            call.answered()
            if asker.wants(RECEIPT, "1"):
                told = _encode_receipt(call.receipt.as_dict())
                context.set_trailing_metadata(((RECEIPT, told.decode()),))
            return message
        except BaseException as ex:
            call.failed(ex)
            raise
        finally:
            asker.detach(call)
            call.close()

    def asker(self, context: grpc.ServicerContext) -> Asker:
        """The client of a call."""
        return Asker(context, self._callers)

    def parse(self, data: bytes) -> WireInferRequest:
        """A ModelInferRequest.

        Raises:
            InvalidArgument: it is none, or larger than the settings allow.
        """
        return parse_request(data, self._settings)

    def entry_of(self, wire: WireInferRequest) -> ModelEntry:
        """The model version a request is for.

        Raises:
            ShmserveError: there is none, or it cannot be used now.
        """
        return self._dispatcher.ready_model(wire.model_name, checked_version(wire.model_version))

    def prepare(
        self,
        wire: WireInferRequest,
        entry: ModelEntry,
        asker: Asker,
        started: int,
        one_answer: bool = False,
    ) -> Inference:
        """Check a request; nothing is reserved yet. `one_answer`: more cannot be sent.

        Raises:
            ShmserveError: what does not fit.
        """
        try:
            plan = plan_of(entry.spec)
            if one_answer:
                refuse_decoupled(plan, "ModelInfer RPC")
            request, empty_final = to_request(wire, self._settings)
            find = partial(self._regions.find, asker.caller)
            inputs = check_inputs(plan, request, self._settings, find)
            wanted, places = check_outputs(plan, request, find)
        except BaseException as ex:
            self._dispatcher.refused(entry, ex)
            raise
        return Inference(wire, entry, plan, request, inputs, wanted, places, empty_final, started)

    def answer(self, item: Inference, asker: Asker) -> bytes:
        """The one answer of an ordinary model, as a ModelStreamInferResponse."""
        call = self._begin(item, asker)
        try:
            outcome = _execute(call, item)
            message = _stream_message(item, outcome, call.receipt, final=True)
            call.answered()
            return message
        except BaseException as ex:
            call.failed(ex)
            raise
        finally:
            asker.detach(call)
            call.close()

    def answers(self, item: Inference, asker: Asker, strict: bool) -> Iterator[bytes]:
        """All answers of a model as ModelStreamInferResponses, errors of the model among them
        (or raised, if `strict`). Closing the iterator cancels what has not come.
        """
        call = self._begin(item, asker)
        try:
            request = item.request
            names = tuple([output.name for output in request.outputs])
            for outcome in call.stream(request.id, names, request.parameters, places=item.places):
                if outcome.error is not None:
                    if strict:
                        raise outcome.error
                    yield encode_error(item.wire, outcome.error, item.entry, outcome.final)
                elif outcome.outputs or not outcome.final or item.empty_final:
                    yield _stream_message(item, outcome, call.receipt, final=outcome.final)
        except Exception as ex:
            call.failed(ex)
            raise
        finally:
            asker.detach(call)
            call.close()

    def _begin(self, item: Inference, asker: Asker) -> Call:
        """A call with every input in a slot, which ends when the client goes."""
        timeout_s = asker.timeout(self._settings.request_timeout_s)
        call = self._dispatcher.call(item.entry, timeout_s, cancellable=True)
        asker.attach(call)
        try:
            _fill(call, item)
        except BaseException as ex:
            call.failed(ex)
            asker.detach(call)
            call.close()
            raise
        call.receipt.receive_ns = monotonic_ns() - item.started
        return call


def encode_error(
    wire: WireInferRequest | None, error: ShmserveError, entry: ModelEntry | None, final: bool
) -> bytes:
    """An error within a stream: a ModelStreamInferResponse that says whose it is."""
    if wire is None:
        return encode_stream_response(error.message, None)
    name, version = (entry.spec.name, entry.spec.version) if entry else (wire.model_name, "")
    return encode_stream_response(
        error.message, encode_response(name, version, wire.id, {_FINAL: final}, (), ())
    )


def _execute(call: Call, item: Inference) -> Outcome:
    request = item.request
    names = tuple([output.name for output in request.outputs])
    return call.execute(request.id, names, request.parameters, places=item.places)


def _fill(call: Call, item: Inference) -> None:
    """Bring every input into a slot: one copy of what the message holds."""
    receipt = call.receipt
    model = item.plan.spec.name
    for checked, wire in zip(item.inputs, item.wire.inputs, strict=True):
        source = checked.source
        if checked.at is not None:
            call.add_region_input(source.name, source.datatype, source.shape, checked.at)
            continue
        reservation = call.reserve(checked.nbytes)
        if wire.contents is not None:
            wire.contents.write(reservation.view, source.datatype)
        else:
            assert wire.raw is not None
            reservation.view[:] = wire.raw
            if not checked.plan.datatype.itemsize:
                bytes_codec.check(reservation.view, checked.count, source.name, model)
        receipt.copied_in += checked.nbytes
        call.add_input(source.name, source.datatype, source.shape, reservation)


_Rows = list[tuple[str, str, tuple[int, ...], dict[str, Parameter]]]
_NO_PARAMETERS: dict[str, Parameter] = {}


def _outputs(item: Inference, outcome: Outcome, receipt: Receipt) -> tuple[_Rows, list[Part]]:
    """What a response says of its outputs, and their bytes: empty for those in client memory."""
    given = {tensor.name: tensor for tensor in outcome.outputs}
    rows: _Rows = []
    raw: list[Part] = []
    for want in item.wanted:
        tensor = given.get(want.name)
        if tensor is None:
            continue
        datatype, shape = tensor.datatype, tensor.shape
        data: memoryview | bytes = tensor.view
        if want.region is not None:
            data = b""
        elif want.classification:
            datatype, shape, data = classify(item.plan, want, tensor)
        rows.append((tensor.name, datatype, shape, _NO_PARAMETERS))
        raw.append(data)
        receipt.copied_out += len(data)
    return rows, raw


def _stream_message(item: Inference, outcome: Outcome, receipt: Receipt, final: bool) -> bytes:
    outputs, raw = _outputs(item, outcome, receipt)
    spec = item.plan.spec
    version = spec.version if outputs or not final else ""  # as Triton has it for a bare end
    parameters = {**outcome.parameters, _FINAL: final}
    return encode_stream_response(
        "", response_parts(spec.name, version, item.wire.id, parameters, outputs, raw)
    )
