"""Single inferences over gRPC: from the message's bytes to slots, and from slots to a message."""

from __future__ import annotations

from functools import partial
from time import monotonic_ns

import msgspec

from shmserve.config import Settings
from shmserve.core.caller import UNKNOWN_CALLER, Caller
from shmserve.core.registry import ModelEntry
from shmserve.core.scheduling.sequence_names import sequence_owner
from shmserve.dispatch.caller_shares import CallerShare
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.errors import DeadlineExceeded
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.callers import CallAccess
from shmserve.frontends.grpc.error_statuses import trace_refused
from shmserve.frontends.grpc.inference.known_messages import KnownMessages, RecalledMessage
from shmserve.frontends.grpc.request_mapping import to_request
from shmserve.frontends.grpc.rpc_methods import HeldAnswer, RpcContext, RpcMessage
from shmserve.frontends.grpc.tensor_message import (
    AnnouncedInputs,
    TensorMessage,
    announced_inputs,
    ready_entry,
)
from shmserve.frontends.inference import Inference
from shmserve.frontends.oip.classification import classify
from shmserve.frontends.oip.forwarded_fields import compiled
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.frontends.request_ids import brought, traceparent
from shmserve.protocol.oip.checked_request import checked
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.validation import refuse_decoupled
from shmserve.protocol.protobuf.incoming_request import LARGE_BYTES
from shmserve.protocol.protobuf.infer_wire import (
    Part,
    WireInferRequest,
    check_size,
    parse_request,
    quick_to_read,
    response_parts,
)
from shmserve.tensor import bytes_codec
from shmserve.waiting import beside, beside_if_large

RECEIPT = "shmserve-receipt"
# smallest number of copied bytes that costs as much as checking one element of BYTES
_ELEMENT_COST = 32
_encode_receipt = msgspec.json.Encoder().encode


class InferMessage:
    """An inference request over gRPC.

    Args:
        origin: the received bytes or the cache entry of the message; None if the message is not to
            be cached.

    Attributes:
        wire: the decoded message.
        wanted: requested outputs, set by `check`.
        nbytes, share: as in `RequestSource`.
        empty_final: True if the client wants a final response even without outputs.
    """

    __slots__ = (
        "_caller", "_inputs", "_one_answer", "_origin", "_serving", "_signature", "_tensors",
        "context", "empty_final", "nbytes", "share", "started_ns", "wanted", "wire",
    )  # fmt: skip

    def __init__(
        self,
        serving: Inferences,
        wire: WireInferRequest,
        context: RpcContext,
        started_ns: int,
        one_answer: bool,
        origin: RecalledMessage | RpcMessage | None = None,
    ) -> None:
        self.wire = wire
        self._origin = origin
        self.context = context
        self._caller: Caller | None = None
        self.started_ns = started_ns
        self.nbytes = 0
        self.share: CallerShare | None = None
        self._serving = serving
        self._one_answer = one_answer

    def traceparent(self) -> str:
        return traceparent(self.context.invocation_metadata())

    def _ask_caller(self) -> Caller:
        """Return the caller, looked up at the first use."""
        if self._caller is None:
            self._caller = self._serving.access.caller(self.context)
        return self._caller

    def check(self, signature: ModelSignature) -> RunOptions:
        if self._one_answer and signature.spec.decoupled:
            refuse_decoupled(signature, "ModelInfer RPC")
        origin, context, serving = self._origin, self.context, self._serving
        if isinstance(origin, RecalledMessage):
            self._tensors, self.empty_final = origin.inputs, origin.known.empty_final
            fitting = origin.known.fitting
        else:
            self._tensors = self.wire.inputs
            request, self.empty_final = to_request(self.wire, serving.settings)
            find = partial(serving.regions.find, self._ask_caller)
            fitting = checked(signature, request, serving.settings, find)
            if origin is not None:
                serving.known.keep(origin, self.wire, fitting, self.empty_final)
        self._inputs, self.wanted, self.nbytes = fitting.inputs, fitting.wanted, fitting.slot_bytes
        self._signature = signature
        timeout_s = min(context.time_remaining(), serving.settings.request_timeout_s)
        if timeout_s <= 0:
            raise DeadlineExceeded("the call's deadline has passed")
        parameters = fitting.request.parameters
        if serving.forward is not None:
            forwarded = serving.access.forwarded_metadata(serving.forward, context)
            parameters = {**parameters, **forwarded}
        return RunOptions(
            *(fitting.request.id, fitting.names, parameters, fitting.places),
            timeout_s=timeout_s,
            caller_number=context.caller_number,
            sequence_owner=sequence_owner(self._ask_caller(), serving.settings.shared_sequences)
            if "sequence_id" in parameters
            else UNKNOWN_CALLER,
        )

    def fill(self, call: InferenceCall) -> None:
        """Copy inputs from the message into slots once. Inputs received straight into slots are
        not copied."""
        for item, wire in zip(self._inputs, self._tensors, strict=True):
            source = item.source
            if item.at is not None:
                call.add_input(source.name, source.datatype, source.shape, item.at)
                continue
            if wire.place is not None:
                reservation = call.adopt(wire.place.take())
            else:
                reservation = call.reserve(item.nbytes)
                call.receipt.copied_in += item.nbytes
            if wire.contents is not None:
                write = wire.contents.write
                beside_if_large(item.nbytes, write, reservation.view, source.datatype)
            elif wire.place is None:
                assert wire.raw is not None
                beside_if_large(item.nbytes, _copy, reservation.view, wire.raw)
            if wire.contents is None and not item.signature.datatype.itemsize:
                model = self._signature.spec.name
                view, cost = reservation.view, item.count * _ELEMENT_COST
                beside_if_large(cost, bytes_codec.check, view, item.count, source.name, model)
            call.add_input(source.name, source.datatype, source.shape, reservation)


class Inferences:
    """Runs models for the rpcs ModelInfer and ModelStreamInfer. `forward`: pattern of the
    metadata to forward as parameters; None if nothing is forwarded."""

    def __init__(
        self, dispatcher: DispatchApi, settings: Settings, regions: SharedMemory, access: CallAccess
    ) -> None:
        self.settings = settings
        # compression would need a copy of the output slots
        self._views = settings.grpc_compression == "none"
        self.regions = regions
        self.known = KnownMessages()
        self.forward = compiled(settings.grpc_header_forward_pattern)
        self.access = access
        self._dispatcher = dispatcher

    def infer(self, data: RpcMessage, context: RpcContext) -> bytes | HeldAnswer:
        """ModelInfer: run a ModelInferRequest and return the ModelInferResponse."""
        started = monotonic_ns()
        inference = self._open_one(data, context, started)
        wire = inference.source.wire
        if isinstance(data, TensorMessage) and data.announced is not None:
            source, announced = inference.source, data.announced
            source.share, announced.share = announced.share, None
        try:
            outcome = inference.run()
            answered = monotonic_ns()
            outputs, raw = outputs_of(inference, outcome)
            spec = inference.signature.spec
            parts = response_parts(
                spec.name, spec.version, wire.id, outcome.parameters, outputs, raw
            )
            size = sum([len(part) for part in parts])
            check_size(size)
            held = self._views and size >= LARGE_BYTES
            copied = 0
            if held:
                answer: HeldAnswer | bytes = HeldAnswer(parts, size, inference.close)
            else:
                copied = sum([len(part) for part in raw])
                answer = beside_if_large(size, b"".join, parts)
            if isinstance(data, TensorMessage):
                inference.receipt.copied_in += data.copied
            inference.account.answered(copied, monotonic_ns() - answered)
            if (RECEIPT, "1") in context.invocation_metadata():
                costs = _encode_receipt(inference.receipt.as_dict())
                own = (RECEIPT, costs.decode())
                context.set_trailing_metadata((*brought(context.invocation_metadata()), own))
        except BaseException as ex:
            inference.failed(ex)
            inference.close()
            raise
        if not held:
            inference.close()
        return answer

    def _open_one(
        self, data: RpcMessage, context: RpcContext, started_ns: int
    ) -> Inference[InferMessage]:
        """Open a ModelInfer request, as `open`, with the cache of known messages."""
        recalled = self.known.find(data)
        if recalled is not None:
            wire = recalled.known.wire
            entry = self._dispatcher.ready_model(wire.model_name, recalled.known.version)
            if recalled.known.fitting.signature.spec is entry.spec:
                message = InferMessage(self, wire, context, started_ns, True, recalled)
                return Inference(self._dispatcher, entry, message, context)
        wire = self.parse(data)
        message = InferMessage(self, wire, context, started_ns, True, data)
        return Inference(self._dispatcher, self.entry_of(wire), message, context)

    @property
    def share_beside(self) -> int:
        """Bytes of the pool that one caller's requests may hold together through this process."""
        return self._dispatcher.shares.beside

    def trace_refused(self, context: RpcContext, name: str, ex: Exception) -> None:
        """Record a span for a failed request of a stream, which goes on."""
        trace_refused(self._dispatcher, context.invocation_metadata(), name, ex)

    def parse(self, data: RpcMessage) -> WireInferRequest:
        """Read a ModelInferRequest. Raise InvalidArgument if the bytes are no ModelInferRequest, or
        the settings do not allow its size."""
        rest, raw = (data.fields, data.raw) if isinstance(data, TensorMessage) else (data, ())
        if quick_to_read(rest):
            return parse_request(rest, raw)
        return beside(parse_request, rest, raw)

    def entry_of(self, wire: WireInferRequest) -> ModelEntry:
        """Return the model version of a request. Raise ShmserveError if the model version does not
        exist or cannot be used now."""
        return ready_entry(wire, self._dispatcher)

    def announced(self, head: memoryview, context: RpcContext) -> AnnouncedInputs | None:
        """Return the inputs that the head of a ModelInferRequest announces, None if the head does
        not tell. Raise ShmserveError if the request is refused."""
        number = context.caller_number
        cached = self.known.announced(bytes(head))
        if cached is not None:
            entry = self._dispatcher.ready_model(cached.wire.model_name, cached.version)
            fitting = cached.fitting
            if fitting.signature.spec is entry.spec:
                request, nbytes = fitting.request, fitting.inputs[0].nbytes
                return AnnouncedInputs(
                    *(self._dispatcher, entry, request, self.settings, number, nbytes)
                )
        return announced_inputs(head, self._dispatcher, self.settings, number)

    def open(
        self, wire: WireInferRequest, entry: ModelEntry, context: RpcContext, started_ns: int
    ) -> Inference[InferMessage]:
        """Check a request. No memory is reserved yet. Raise ShmserveError if the request does not
        fit its model."""
        message = InferMessage(self, wire, context, started_ns, one_answer=False)
        return Inference(self._dispatcher, entry, message, context)


def _copy(place: memoryview, data: Part) -> None:
    place[:] = data


_Rows = list[tuple[str, str, tuple[int, ...]]]


def outputs_of(inference: Inference[InferMessage], outcome: Outcome) -> tuple[_Rows, list[Part]]:
    """Return name, datatype and shape of each output for the response, and the bytes of each
    output: empty for outputs in client memory."""
    tensors = {tensor.name: tensor for tensor in outcome.outputs}
    rows: _Rows = []
    raw: list[Part] = []
    for requested in inference.source.wanted:
        tensor = tensors.get(requested.name)
        if tensor is None:
            continue
        datatype, shape = tensor.datatype, tensor.shape
        data: memoryview | bytes = tensor.view
        if requested.region is not None:
            data = b""
        elif requested.classification:
            signature, size = inference.signature, tensor.view.nbytes
            datatype, shape, data = beside_if_large(size, classify, signature, requested, tensor)
        rows.append((tensor.name, datatype, shape))
        raw.append(data)
    return rows, raw
