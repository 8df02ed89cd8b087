"""Requests of ModelStreamInfer: from messages to inferences or failures, and bounds of all streams
together."""

from math import prod
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
from shmserve.tensor.config_document import ConfigDocument
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec

Running = Inference[InferMessage]
Failure = bytes | Exception  # a message of the stream, or the error that ends the stream

METHOD = "ModelStreamInfer"
_MAX_SEEN = 256  # models with a largest answer
_LIMIT_BYTES = 64 << 20  # limit of the requests and answers beside which a request begins


class SessionRequest(StreamPlace):
    """A request of a stream.

    Attributes:
        inference: the request's inference; None if the request has failed.
        begun: True once the request runs.
        model: name and version of the model; empty if unknown.
        result: answer of an ordinary model, or the failure; None while unknown.
        runs: True while the request counts as a running request of its process.
    """

    __slots__ = ("begun", "inference", "model", "result", "runs")

    def __init__(self, opened: Running | Failure, nbytes: int, expected: int = 0) -> None:
        self.begun = self.runs = False
        self.inference: Running | None = None
        self.model = ("", "")
        self.result: Outcome | Failure | None = None
        if not isinstance(opened, Inference):
            self.result = opened
            super().__init__(True, nbytes)
            return
        self.inference = opened
        spec, sequence = opened.signature.spec, None
        self.model = spec.name, spec.version
        # a decoupled model without sequences may use the id as a mere parameter
        if not spec.decoupled or spec.config.sequence_batching is not UNSET:
            sequence = opened.source.wire.parameters.get("sequence_id") or None  # 0, "": none
        super().__init__(not spec.decoupled, nbytes, sequence, expected)


def _queue_limit(config: ConfigDocument) -> int:
    """Return the smallest `max_queue_size` of a model's queues; 0: no limit."""
    batching = config.dynamic_batching
    if batching is UNSET:
        return 0
    own = () if batching.priority_queue_policy is UNSET else batching.priority_queue_policy.values()
    default = () if batching.default_queue_policy is UNSET else (batching.default_queue_policy,)
    return min((p.max_queue_size for p in (*own, *default) if p.max_queue_size), default=0)


class Streams:
    """All streams of a process.

    Args:
        max_requests: limit of each stream's running requests.
        max_ordinary: limit of all streams' running requests to ordinary models; at the limit a
            stream's requests run one after another.
        max_queue: limit of a stream's running requests to one ordinary model, beside the model's
            own limit: queues that a stream fills would refuse the stream's next request.

    Attributes:
        busy: number of requests under way and of unsent answers.
        draining: True if new requests are refused.
        left: told when a request has left a stream.
    """

    def __init__(
        self, inferences: Inferences, max_requests: int, max_ordinary: int, max_queue: int
    ) -> None:
        self._inferences = inferences
        self._max_ordinary = max_ordinary
        self._max_queue = max_queue
        self._seen: dict[tuple[str, str], int] = {}  # bytes of the largest answer, by model
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
        return SessionRequest(opened, len(data), self._expected(entry.spec))

    def _expected(self, spec: ModelSpec) -> int:
        """Return the bytes of an ordinary answer: by fixed shapes, or of the largest so far."""
        if spec.decoupled:
            return 0
        fixed = (o for o in spec.outputs if min(o.shape, default=0) >= 0)
        nbytes = sum(prod(o.shape) * DATATYPES[o.datatype].itemsize for o in fixed)
        return max(nbytes, self._seen.get((spec.name, spec.version), 0))

    def finished(self, request: SessionRequest, nbytes: int) -> None:
        """Note that a request has an answer of `nbytes` bytes."""
        if nbytes > self._seen.get(request.model, 0):
            if len(self._seen) >= _MAX_SEEN:
                self._seen.clear()
            self._seen[request.model] = nbytes
        self._ended(request)

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
        if request.in_order and order.unanswered and not self._has_turn(order, request):
            return False
        # half of the share leaves room for answers larger than expected
        room = order.nbytes + request.nbytes <= self._inferences.share_beside // 2
        return room and order.has_room(_LIMIT_BYTES)

    def _has_turn(self, order: StreamOrder[SessionRequest], request: SessionRequest) -> bool:
        """Return True if the process and the model may run another request of a stream."""
        if self._ordinary >= self._max_ordinary:
            return False
        limit = self._max_queue
        if request.inference is not None:
            limit = min(limit, _queue_limit(request.inference.signature.spec.config) or limit)
        return limit > sum(r.runs and r.model == request.model for r in order.unanswered)

    def enter(self, request: SessionRequest) -> None:
        """Count a request of a stream."""
        request.runs = request.in_order
        self._ordinary += request.runs

    def leave(self, request: SessionRequest) -> None:
        """Stop counting a request of a stream."""
        self._ended(request)

    def _ended(self, request: SessionRequest) -> None:
        self._ordinary -= request.runs
        request.runs = False
        self.left.tell()
