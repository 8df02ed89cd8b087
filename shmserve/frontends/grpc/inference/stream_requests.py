"""Requests of ModelStreamInfer: from messages to inferences or failures, and bounds of all streams
together."""

from time import monotonic_ns

from msgspec import UNSET

from shmserve.core.registry import ModelEntry
from shmserve.dispatch.outcome import Outcome
from shmserve.errors import STOPPING, Unavailable
from shmserve.frontends.changes import Changes
from shmserve.frontends.grpc.error_statuses import as_error
from shmserve.frontends.grpc.inference.model_infer import Inferences, InferMessage
from shmserve.frontends.grpc.inference.stream_answers import encode_error
from shmserve.frontends.grpc.inference.stream_order import StreamOrder, StreamPlace
from shmserve.frontends.grpc.rpc_methods import RpcContext
from shmserve.frontends.inference import Inference
from shmserve.frontends.request_ids import request_id
from shmserve.protocol.protobuf.infer_wire import WireInferRequest

Running = Inference[InferMessage]
Failure = bytes | Exception  # a message of the stream, or the error that ends the stream

METHOD = "ModelStreamInfer"
_LIMIT_BYTES = 64 << 20  # limit of the requests and answers beside which a request begins


class SessionRequest(StreamPlace):
    """A request of a stream.

    Attributes:
        inference: the request's inference; None if the request has failed.
        begun: True once the request runs.
        result: answer of an ordinary model, or the failure; None while unknown.
    """

    __slots__ = ("begun", "inference", "result")

    def __init__(self, opened: Running | Failure, nbytes: int) -> None:
        self.begun = False
        self.inference: Running | None = None
        self.result: Outcome | Failure | None = None
        if not isinstance(opened, Inference):
            self.result = opened
            super().__init__(True, nbytes)
            return
        self.inference = opened
        spec, sequence = opened.signature.spec, None
        # a decoupled model without sequences may use the id as a mere parameter
        if not spec.decoupled or spec.config.sequence_batching is not UNSET:
            sequence = opened.source.wire.parameters.get("sequence_id") or None  # 0, "": none
        super().__init__(not spec.decoupled, nbytes, sequence)


class Streams:
    """All streams of a process.

    Args:
        max_requests: limit of each stream's running requests.
        max_ordinary: limit of all streams' running requests to ordinary models; at the limit a
            stream's requests run one after another.

    Attributes:
        busy: number of requests under way and of unsent answers.
        draining: True if new requests are refused.
        left: told when a request has left a stream.
    """

    def __init__(self, inferences: Inferences, max_requests: int, max_ordinary: int) -> None:
        self._inferences = inferences
        self._max_ordinary = max_ordinary
        self._ordinary = 0
        self.max_requests = max_requests
        self.draining = False
        self.busy = 0
        self.left = Changes()

    def begin(self, data: bytes | memoryview, context: RpcContext, strict: bool) -> SessionRequest:
        """Return the request of a message, ready to run or failed already."""
        started = monotonic_ns()
        wire: WireInferRequest | None = None
        entry: ModelEntry | None = None
        try:
            if self.draining:
                raise Unavailable(STOPPING)
            wire = self._inferences.parse(data)
            entry = self._inferences.entry_of(wire)
            opened: Running | Failure = self._inferences.open(wire, entry, context, started)
        except Exception as ex:
            opened = self._failure(wire, entry, ex, context, strict)
        return SessionRequest(opened, len(data))

    def failed(self, inference: Running, ex: Exception, strict: bool) -> Failure:
        """Return the failure of an inference."""
        source = inference.source
        return self._failure(source.wire, inference.entry, ex, source.context, strict)

    def _failure(
        self,
        wire: WireInferRequest | None,
        entry: ModelEntry | None,
        ex: Exception,
        context: RpcContext,
        strict: bool,
    ) -> Failure:
        """Return a failure as a message of the stream; if `strict`, as the error to end with."""
        if strict:
            return ex
        self._inferences.trace_refused(context, METHOD, ex)
        request = wire.id if wire is not None else ""
        error = as_error(ex, METHOD, request_id(request) if request else "-")
        return encode_error(wire, error, entry, final=True)

    def has_room(self, order: StreamOrder[SessionRequest], request: SessionRequest) -> bool:
        """Return True if a stream may begin another request."""
        if not order.places:
            return True
        if request.in_order and self._ordinary >= self._max_ordinary:
            return False
        # a quarter of the share leaves room for answers larger than requests
        return order.has_room(min(_LIMIT_BYTES, self._inferences.share_beside // 4))

    def enter(self, request: SessionRequest) -> None:
        """Count a request of a stream."""
        self._ordinary += request.in_order

    def leave(self, request: SessionRequest) -> None:
        """Stop counting a request of a stream."""
        self._ordinary -= request.in_order
        self.left.tell()
