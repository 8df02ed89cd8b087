"""ModelStreamInfer: many requests and many answers on one call.

Requests run side by side. A stream's reader is a greenlet, each running request waits for answers
in its own greenlet, and the call's own greenlet sends. If no message waits, the reader runs a
request itself, which saves a greenlet; a new reader begins when the next message comes.

Ordinary models answer once, in the order of the requests. Until then an answer stays in slots,
counted in the caller's share of the pool, and keeps the request's place (`stream_order`). An answer
is encoded just before the stream sends the answer. Answers of decoupled models are sent as they
come: at most four encoded answers wait for the client. So while the client does not read, the
stream reads no more requests, and decoupled models get no more credit.
"""

from collections import deque
from collections.abc import Callable, Iterator

import grpc

from shmserve import waiting
from shmserve.dispatch.outcome import Outcome
from shmserve.errors import Cancelled, ResourceExhausted
from shmserve.frontends.changes import Changes
from shmserve.frontends.grpc.call_pools import AwaitedRequests
from shmserve.frontends.grpc.error_statuses import as_error
from shmserve.frontends.grpc.inference.stream_answers import all_answers, only_answer
from shmserve.frontends.grpc.inference.stream_order import StreamOrder
from shmserve.frontends.grpc.inference.stream_requests import (
    METHOD,
    Failure,
    Running,
    SessionRequest,
    Streams,
)
from shmserve.frontends.grpc.rpc_methods import RpcContext

_ERRORS_END_IT = ("triton_grpc_error", "true")
_AHEAD = 4  # answers of decoupled models that wait for being sent, for each stream


def serve(streams: Streams, requests: AwaitedRequests, context: RpcContext) -> Iterator[bytes]:
    """Yield the answers of one stream. Raise the first failure if the client asked to."""
    strict = _ERRORS_END_IT in context.invocation_metadata()
    return Session(streams, context, requests, strict).run()


class Session:
    """Stream of a call. `context`: the call. `requests`: the call's messages. `strict`: True if the
    first failure ends the stream."""

    def __init__(
        self, streams: Streams, context: RpcContext, requests: AwaitedRequests, strict: bool
    ) -> None:
        self._streams = streams
        self._context = context
        self._requests = requests
        self._strict = strict
        self._order: StreamOrder[SessionRequest] = StreamOrder(streams.max_requests)
        self._ready: deque[SessionRequest | Failure] = deque()  # to be sent
        self._ahead = 0  # answers and failures in `_ready`
        self._working = 0  # greenlets that may still add to `_ready`
        self._over = False
        self._changes = Changes()  # of the four attributes above
        self._reader = 0  # number of the greenlet that reads

    def run(self) -> Iterator[bytes]:
        """Yield the answers to all requests."""
        try:
            if self._context.add_callback(self._end):
                self._spawn(self._read)
            while (item := self._next()) is not None:
                try:
                    message = self._answer(item) if isinstance(item, SessionRequest) else item
                    if isinstance(message, Exception):
                        raise message
                    yield message
                finally:
                    self._count(-1)
        finally:
            self._end()
            self._drop_all()

    def _next(self) -> SessionRequest | Failure | None:
        self._changes.wait_while(lambda: not self._ready and bool(self._working) and not self._over)
        if self._over or not self._ready:
            return None
        item = self._ready.popleft()
        if not isinstance(item, SessionRequest):
            self._ahead -= 1
            self._changes.tell()
        return item

    def _answer(self, request: SessionRequest) -> Failure:
        """Return the answer of an ordinary model, and free the request's place."""
        inference, result = request.inference, request.result
        if inference is not None and isinstance(result, Outcome):
            try:
                result = only_answer(inference, result)
            except Exception as ex:
                result = self._streams.failed(inference, ex, self._strict)
        request.inference = request.result = None  # their memory is free while the answer is sent
        self._leave(request)
        assert isinstance(result, Failure)
        return result

    def _put(self, message: Failure) -> bool:
        """Add a message for the client, once the queue has room. Return False if the stream is
        over, else True."""
        self._changes.wait_while(lambda: self._ahead >= _AHEAD and not self._over)
        if self._over:
            return False
        self._ready.append(message)
        self._ahead += 1
        self._count(1)
        self._changes.tell()
        return True

    def _end(self) -> None:
        """Have all greenlets of the stream end. The loop calls this at the call's end."""
        self._over = True
        self._changes.tell()
        self._streams.left.tell()

    def _drop_all(self) -> None:
        """Give up all requests except running requests, which give up when they end."""
        self._count(-self._ahead)
        self._ready.clear()
        self._ahead = 0
        for request in list(self._order.places):
            if request.result is not None or not request.begun:
                self._drop(request)

    def _drop(self, request: SessionRequest) -> None:
        if request.inference is not None:
            request.inference.failed(Cancelled("the call has ended"))
            request.inference.close()
        self._leave(request)
        self._count(-1)

    def _leave(self, request: SessionRequest) -> None:
        self._order.leave(request)
        self._streams.leave(request)

    def _count(self, by: int) -> None:
        """Add `by` to the number of requests under way and of unsent answers."""
        self._streams.busy += by
        self._requests.work(by)

    def _spawn(self, work: Callable[[], None]) -> None:
        self._working += 1
        waiting.start(lambda: self._guarded(work), "stream")

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except grpc.RpcError:
            self._end()  # the client has disconnected
        except Exception as ex:
            self._put(as_error(ex, METHOD, "-"))
        finally:
            self._working -= 1
            self._changes.tell()

    # --- in greenlets of their own

    def _read(self) -> None:
        reader = self._reader
        while self._reader == reader:
            try:
                data = next(self._requests, None)
            except grpc.RpcError:
                raise
            except Exception as ex:  # the answers to earlier messages come first
                self._count(1)
                self._take(SessionRequest(as_error(ex, METHOD, "-"), 0))
                return
            if data is None:
                return
            self._enter(data)
            del data  # large messages are not to be kept while the stream waits

    def _read_elsewhere(self) -> None:
        """Let another greenlet read while the reader runs a request."""
        self._reader += 1
        self._spawn(self._read)

    def _enter(self, data: bytes | memoryview) -> None:
        """Begin the request of a message, once the stream has room and the sequence allows it."""
        streams, order = self._streams, self._order
        self._count(1)
        request = streams.begin(data, self._context, self._strict)
        streams.left.wait_while(lambda: not self._over and not streams.has_room(order, request))
        self._take(request)

    def _take(self, request: SessionRequest) -> None:
        """Give a request a place, and begin the request unless an earlier one must pass first."""
        self._streams.enter(request)
        begins = self._order.enter(request)
        if self._over:
            self._drop(request)
        elif begins:
            self._begin(request, by_reader=True)

    def _begin(self, request: SessionRequest, by_reader: bool = False) -> None:
        request.begun = True
        inference, reader = request.inference, self._reader
        if inference is None:
            self._finished(request)
        elif not request.in_order:
            self._spawn(lambda: self._produce(request, inference))
        elif by_reader and self._requests.on_message(self._read_elsewhere):
            self._run(request, inference)
            if self._reader == reader:
                self._requests.on_message(None)
        else:
            self._spawn(lambda: self._run(request, inference))

    def _passed(self, request: SessionRequest) -> None:
        """Let the next request of the request's sequence begin."""
        following = self._order.passed(request)
        if following is not None and not self._over:
            self._begin(following)

    def _run(self, request: SessionRequest, inference: Running) -> None:
        """Run a request to an ordinary model."""
        try:
            request.result = inference.run(lambda ex: self._await_share(request, ex))
        except BaseException as ex:
            inference.failed(ex)
            inference.close()
            request.inference = None
            if not isinstance(ex, Exception):
                raise
            request.result = self._streams.failed(inference, ex, self._strict)
        self._finished(request)

    def _await_share(self, request: SessionRequest, ex: ResourceExhausted) -> bool:
        """Wait while answers of the stream that are sent earlier fill the caller's share. Return
        False if the request's own answer is the next to be sent: later answers wait for it. Raise
        the error if the stream has no other request."""
        order = self._order
        if len(order.places) == 1:
            raise ex
        if order.is_next(request):
            return False
        self._streams.left.wait_while(lambda: not self._over and not order.is_next(request))
        return not self._over

    def _finished(self, request: SessionRequest) -> None:
        """Send the answers that are due now."""
        if self._over:
            self._drop(request)
            return
        self._passed(request)
        result = request.result
        outputs = result.outputs if isinstance(result, Outcome) else ()
        nbytes = sum([len(tensor.view) for tensor in outputs])
        self._streams.finished(request, nbytes)
        due = self._order.finish(request, nbytes)
        if due:
            self._ready += due
            self._changes.tell()

    def _produce(self, request: SessionRequest, inference: Running) -> None:
        """Run a request to a decoupled model."""
        sent = None if request.sequence is None else lambda: self._passed(request)
        try:
            for message in all_answers(inference, self._strict, sent):
                if not self._put(message):
                    return
        except Exception as ex:
            self._put(self._streams.failed(inference, ex, self._strict))
        finally:
            self._passed(request)
            self._leave(request)
            self._count(-1)
