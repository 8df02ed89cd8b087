"""ModelStreamInfer: many requests and many answers on one call.

Ordinary models answer once, in the order of the requests: the call's own greenlet runs one request
after another. From the first request to a decoupled model on, the stream is a `Session` with
several greenlets. One greenlet reads requests, one greenlet for each running request waits for
answers, and the call's own greenlet sends.

A bounded queue lies between these greenlets: at most four encoded answers wait for the client.
While the client does not read, the model gets no more credit and so has to stop.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic_ns
from typing import TypeGuard

import grpc
from msgspec import UNSET

from shmserve import waiting
from shmserve.core.registry import ModelEntry
from shmserve.errors import STOPPING, Cancelled, ShmserveError, Unavailable
from shmserve.frontends.changes import Changes
from shmserve.frontends.grpc.call_pools import AwaitedRequests
from shmserve.frontends.grpc.error_statuses import as_error
from shmserve.frontends.grpc.inference.model_infer import Inferences, InferMessage
from shmserve.frontends.grpc.inference.stream_answers import all_answers, encode_error, only_answer
from shmserve.frontends.grpc.rpc_methods import RpcContext, RpcMessage
from shmserve.frontends.inference import Inference
from shmserve.frontends.request_ids import request_id
from shmserve.protocol.protobuf.infer_wire import WireInferRequest

Running = Inference[InferMessage]

METHOD = "ModelStreamInfer"
_ERRORS_END_IT = ("triton_grpc_error", "true")
_AHEAD = 4  # answers that wait for being sent, for each stream


class Streams:
    """All streams of a process. `busy`: number of running requests and unsent answers. `draining`:
    True if new requests are refused."""

    def __init__(self, inferences: Inferences, max_requests: int) -> None:
        self.inferences = inferences
        self.max_requests = max_requests
        self.draining = False
        self.busy = 0

    def serve(self, requests: AwaitedRequests, context: RpcContext) -> Iterator[bytes]:
        """Yield the answers of one stream. Raise the first failure if the client asked to."""
        strict = _ERRORS_END_IT in context.invocation_metadata()
        for data in requests:
            with self.working():
                item = self.begin(data, context, strict)
                if not _is_decoupled(item):
                    yield self.answer(item, strict)
                    continue
            yield from Session(self, context, requests, strict).run(item)
            return

    def begin(self, data: RpcMessage, context: RpcContext, strict: bool) -> Running | bytes:
        """Return a request that can run, or else the encoded error message."""
        started = monotonic_ns()
        wire: WireInferRequest | None = None
        entry: ModelEntry | None = None
        try:
            if self.draining:
                raise Unavailable(STOPPING)
            wire = self.inferences.parse(data)
            entry = self.inferences.entry_of(wire)
            return self.inferences.open(wire, entry, context, started)
        except Exception as ex:
            return self.failure(wire, entry, ex, context, strict)

    def answer(self, item: Running | bytes, strict: bool) -> bytes:
        """Return the one message that answers an ordinary model's request."""
        if isinstance(item, bytes):
            return item
        try:
            return only_answer(item)
        except Exception as ex:
            return self.failure(item.source.wire, item.entry, ex, item.source.context, strict)

    def failure(
        self,
        wire: WireInferRequest | None,
        entry: ModelEntry | None,
        ex: Exception,
        context: RpcContext,
        strict: bool,
    ) -> bytes:
        """Return a failure as a message of the stream."""
        if strict:
            raise ex
        self.inferences.trace_refused(context, METHOD, ex)
        request = wire.id if wire is not None else ""
        error = as_error(ex, METHOD, request_id(request) if request else "-")
        return encode_error(wire, error, entry, final=True)

    def count(self, by: int) -> None:
        """Add `by` to the number of requests and answers in `busy`."""
        self.busy += by

    @contextmanager
    def working(self) -> Iterator[None]:
        self.count(1)
        try:
            yield
        finally:
            self.count(-1)


def _is_decoupled(item: Running | bytes) -> TypeGuard[Running]:
    return isinstance(item, Inference) and item.signature.spec.decoupled


class Session:
    """A stream whose requests run at the same time, each in a greenlet that ends with the call.
    `context`: the call. `requests`: the messages after the first. `strict`: True if the first
    failure ends the stream."""

    def __init__(
        self, streams: Streams, context: RpcContext, requests: AwaitedRequests, strict: bool
    ) -> None:
        self._streams = streams
        self._context = context
        self._following = requests
        self._strict = strict
        self._ready: deque[bytes | ShmserveError] = deque()  # answers to be sent
        self._working = 0  # greenlets that may still add to `_ready`
        self._requests = 0  # running requests to decoupled models
        self._over = False
        self._changes = Changes()  # of the four attributes above

    def run(self, first: Running) -> Iterator[bytes]:
        """Return the answers to `first`, a request to a decoupled model, and to later requests."""
        if not self._context.add_callback(self._end):
            first.failed(Cancelled("the call has ended"))
            return
        try:
            self._spawn(lambda: self._read(first))
            while (message := self._next()) is not None:
                try:
                    if isinstance(message, ShmserveError):
                        raise message
                    yield message
                finally:
                    self._streams.count(-1)
        finally:
            self._end()

    def _next(self) -> bytes | ShmserveError | None:
        self._changes.wait_while(lambda: not self._ready and bool(self._working) and not self._over)
        if not self._ready:
            return None
        message = self._ready.popleft()
        self._changes.tell()
        return message

    def _put(self, message: bytes | ShmserveError) -> bool:
        """Add a message for the client, once the queue has room. Return False if the stream is
        over, else True."""
        self._changes.wait_while(lambda: len(self._ready) >= _AHEAD and not self._over)
        if self._over:
            return False
        self._ready.append(message)
        self._streams.count(1)
        self._changes.tell()
        return True

    def _end(self) -> None:
        self._over = True
        self._streams.count(-len(self._ready))
        self._ready.clear()
        self._changes.tell()

    def _spawn(self, work: Callable[[], None]) -> None:
        self._working += 1
        waiting.start(lambda: self._guarded(work), "stream")

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except grpc.RpcError:
            self._end()  # the client has disconnected
        except Exception as ex:
            # A ShmserveError is logged once the call has ended with it
            self._put(ex if isinstance(ex, ShmserveError) else as_error(ex, METHOD, "-"))
        finally:
            self._working -= 1
            self._changes.tell()

    def _read(self, first: Running) -> None:
        self._start(first)
        for data in self._following:
            with self._streams.working():
                item = self._streams.begin(data, self._context, self._strict)
                if _is_decoupled(item):
                    self._start(item)
                else:
                    self._put(self._streams.answer(item, self._strict))

    def _start(self, item: Running) -> None:
        """Run a request in a new greenlet, once fewer than the allowed number run."""
        limit = self._streams.max_requests
        self._changes.wait_while(lambda: self._requests >= limit and not self._over)
        if self._over:
            item.failed(Cancelled("the call has ended"))
            return
        self._requests += 1
        sent = waiting.event()
        self._spawn(lambda: self._produce(item, sent))
        if item.signature.spec.config.sequence_batching is not UNSET:
            sent.wait()  # later requests of the same sequence must not overtake this request

    def _produce(self, item: Running, sent: waiting.WaitEvent) -> None:
        try:
            with self._streams.working(), self._following.working():
                for message in all_answers(item, self._strict, sent.set):
                    if not self._put(message):
                        return
        except Exception as ex:
            wire, entry = item.source.wire, item.entry
            self._put(self._streams.failure(wire, entry, ex, self._context, self._strict))
        finally:
            sent.set()
            self._requests -= 1
            self._changes.tell()
