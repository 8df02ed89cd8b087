"""HTTP/2 calls: the context seen by the rpc, and the messages received for the call."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import NoReturn, Protocol

import grpc
import numpy as np

from shmserve import waiting
from shmserve.config import Settings
from shmserve.core.scheduling.admission import CallPlace
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.errors import ShmserveError
from shmserve.frontends.changes import Changes
from shmserve.frontends.grpc.http2_engine.call_head import OK, CallHead, Metadata, trailers_only
from shmserve.frontends.grpc.http2_engine.connected_client import ConnectedClient
from shmserve.frontends.grpc.http2_engine.message_compression import inflate
from shmserve.frontends.grpc.message_heap import CountedMessage, MessageHeap, failed
from shmserve.frontends.grpc.rpc_methods import HeldAnswer, RpcMessage
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.frontends.http2 import Buffer, Connection, Fields, encode_fields
from shmserve.frontends.http2.grpc_framing import (
    GrpcMessage,
    MessageReader,
    MessageReceiver,
    WholeMessage,
)
from shmserve.protocol.protobuf.incoming_request import LARGE_BYTES

_log = logging.getLogger("shmserve.grpc")

AHEAD = 4  # limit of a stream's waiting messages; above, the client gets no credit
_FOREVER_S = float(1 << 31)  # for calls without a deadline
_OK_TRAILERS = encode_fields(OK)


class Aborted(Exception):
    """The rpc has ended its call by `Http2Call.abort`."""


class Gone(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """The call has ended before its rpc."""


class CallOwner(Protocol):
    """The connection of a call. `client`: address and credentials of the connected client. `core`:
    the connection's protocol. `settle`: has the connection send pending output at this turn's
    end."""

    client: ConnectedClient
    core: Connection
    settle: Callable[[], None]

    def cancel(self, call: Http2Call) -> None:
        """Reset the call's stream."""
        ...

    def post(self, action: Callable[[], object]) -> None:
        """Have the loop call `action`. From any thread."""
        ...

    def expired(self, call: Http2Call) -> None:
        """Handle the passed deadline of a call; on the loop."""
        ...

    def give_credit(self, call: Http2Call, count: int) -> None:
        """Let the call's client send `count` more bytes."""
        ...


class Http2Call:
    """The context of a call (`rpc_methods.RpcContext`), with the call's messages.

    Attributes:
        active: True until the call has ended.
        reader: reads messages, on the loop; None once no message is expected any more.
        place: place in the pool of the method.
        withheld: bytes received without giving the client credit for as many new bytes yet.
        waits: True while the message of a unary call is incomplete.
        ended_by_us: True once trailers have been framed.
        admitted: True if the rules have let the caller make this call.
        caller_number: number of the caller, for turns.
        held: the answer that is being sent.
    """

    __slots__ = (
        "_callbacks", "_changes", "_copied", "_deadline", "_head_sent", "_inferences", "_messages",
        "_on_message", "_sent_all", "_settings", "_tensors", "_untaken", "active", "admitted",
        "caller_number", "ended_by_us", "head", "held", "owner", "place", "reader", "status",
        "stream_id", "trailing", "waits", "withheld",
    )  # fmt: skip

    def __init__(
        self,
        owner: CallOwner,
        stream_id: int,
        head: CallHead,
        place: CallPlace,
        now: float,
        settings: Settings,
    ) -> None:
        self.owner = owner
        self.stream_id = stream_id
        self.head = head
        self._copied: MessageHeap | None = None
        self._settings = settings
        self.reader: MessageReader | None = MessageReader(
            head.method.max_bytes, self._receiver, head.encoding != "identity"
        )
        self._tensors: TensorMessage | None = None
        self.held: HeldAnswer | None = None
        self.place = place
        self.withheld = 0
        self.waits = not head.method.streams
        self.admitted = False
        self.caller_number = owner.client.number
        self._head_sent = False
        self.ended_by_us = False
        self.trailing: Metadata = ()
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._deadline = now + head.timeout_s
        self.active = True
        self._callbacks: list[Callable[[], object]] = []
        self._inferences: set[InferenceCall] = set()
        self._messages: deque[GrpcMessage] = deque()  # of a stream, not yet taken by the rpc
        self._on_message: Callable[[], object] | None = None
        self._sent_all = False  # by the client
        self._untaken = 0  # answers of a stream that the socket has not taken completely
        # of the three attributes above, or of `active`
        self._changes = Changes() if head.method.streams else None

    def _receiver(self, size: int, compressed: bool, sparing: bool) -> MessageReceiver:
        if size < LARGE_BYTES:
            return WholeMessage(size)
        method = self.head.method
        if not method.streams:
            try:
                method.rules.admit(method, self)
            except ShmserveError as ex:
                raise failed(ex) from None
            self.admitted = True
        intake = method.tensors
        if intake is None or compressed:
            return CountedMessage(size, self._settings.max_heap_bytes)
        return TensorMessage(size, self._settings, intake, self, sparing)

    # --- for the rpc

    @property
    def client_number(self) -> int:
        return self.owner.client.number

    def peer(self) -> str:
        return self.owner.client.address

    def invocation_metadata(self) -> Metadata:
        return self.head.metadata

    def time_remaining(self) -> float:
        return min(max(self._deadline - monotonic(), 0.0), _FOREVER_S)

    def is_active(self) -> bool:
        return self.active

    def add_callback(self, callback: Callable[[], object], /) -> bool:
        # Append before checking: `end` on the loop may miss a callback from another thread, but
        # then this thread sees that the call has ended
        self._callbacks.append(callback)
        return self.active

    def attach(self, call: InferenceCall) -> None:
        self._inferences.add(call)  # add before checking, as above
        if not self.active:
            call.cancel()

    def detach(self, call: InferenceCall) -> None:
        self._inferences.discard(call)

    def set_trailing_metadata(self, trailing_metadata: Metadata, /) -> None:
        self.trailing = trailing_metadata

    def abort(self, code: grpc.StatusCode, details: str, /) -> NoReturn:
        self.status = (code, details)
        raise Aborted

    def cancel(self) -> None:
        self.owner.post(self.give_up)

    # --- for the rpc's greenlet

    def read(self, message: GrpcMessage) -> RpcMessage:
        """Return a message without `parts` as the rpc gets it. Raise ShmserveError if the message
        cannot be decompressed, or memory for the message is lacking."""
        data, limit = message.data, self._settings.max_heap_bytes
        if message.compressed:
            data = waiting.beside(
                inflate, data, self.head.encoding, self.head.method.max_bytes, limit
            )
        if len(data) < LARGE_BYTES:  # a view would keep the whole receive buffer alive
            return bytes(data)
        if not self.head.method.views:
            self._count_copy(len(data), limit)
            return waiting.beside(bytes, data)
        return data

    def _count_copy(self, nbytes: int, limit: int) -> None:
        """Count the copy of a message, for an rpc that handles one message at a time."""
        if self._copied is None:
            self._copied = MessageHeap(limit)
        self._copied.close()
        self._copied.take(nbytes)

    def drop_message(self) -> None:
        """Give back memory of the message that the rpc has not taken. Called once the rpc has run
        or cannot run. Idempotent."""
        if self._copied is not None:
            self._copied.close()
        tensors, self._tensors = self._tensors, None
        if tensors is not None:
            tensors.close()

    def requests(self) -> Iterator[RpcMessage]:
        """Yield the messages of a stream as they arrive. Raise Gone if the call has ended."""
        while True:
            self._await(lambda: bool(self._messages) or self._sent_all)
            if not self.active:
                raise Gone
            if not self._messages:
                return
            message = self._messages.popleft()
            if self.withheld and len(self._messages) < AHEAD:
                count, self.withheld = self.withheld, 0
                self.owner.give_credit(self, count)
            yield self.read(message)

    def on_message(self, callback: Callable[[], object] | None) -> bool:
        self._on_message = None if self._messages else callback
        return not self._messages

    def send(self, answer: Sequence[Buffer]) -> bool:
        """Send an answer of a stream, and wait until the socket has taken the answer. Return False
        if the call has ended, else True."""
        self._untaken += 1
        self.answer(answer, None)
        self._await(lambda: not self._untaken)
        return self.active

    def answer(
        self,
        data: Sequence[Buffer],
        trailers: Fields | None,
        held: HeldAnswer | None = None,
    ) -> None:
        """Send a message with its prefix, or no message. Trailers end the call. `held`: the answer
        to which `data` belongs; closed once no part can be sent any more."""
        if not self.active or self.ended_by_us:
            if held is not None:
                held.close()
            return
        self.held = held
        head = block = None
        if not self._head_sent and (data or trailers is None):
            head = self.head.response
        if trailers is not None:
            self.ended_by_us = True
            if self.reader is not None:
                self.stop_reading()
            if head is None and not self._head_sent:
                block = trailers_only(trailers)
            else:
                block = _OK_TRAILERS if trailers is OK else encode_fields(trailers)
        self._head_sent = True
        owner = self.owner
        owner.core.send(
            self.stream_id, monotonic(), head=head, data=data, trailers=block, token=self
        )
        owner.settle()

    def _await(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` is true or the call has ended."""
        assert self._changes is not None, "a unary call has one message and one answer"
        self._changes.wait_while(lambda: self.active and not ready())

    def _wake(self) -> None:
        if self._changes is not None:
            self._changes.tell()

    # --- for the loop

    def give_up(self) -> None:
        """End the call at once, without an answer."""
        self.owner.cancel(self)

    def put(self, message: GrpcMessage) -> None:
        """Add a message of a stream."""
        # A view would keep the whole receive buffer alive; an array belongs to this message alone
        if not isinstance(message.data.obj, np.ndarray):
            message = GrpcMessage(message.compressed, memoryview(bytes(message.data)))
        self._messages.append(message)
        callback, self._on_message = self._on_message, None
        if callback is not None:
            callback()
        self._wake()

    def put_end(self) -> None:
        """Note that the client of a stream has sent all messages."""
        self._sent_all = True
        self._wake()

    def begin(self, message: GrpcMessage | None) -> None:
        """Take the message of a unary call; None if the client sent no message. Later data of the
        client are ignored."""
        self.waits = False
        if self.reader is not None and self.reader.receiving is not None:
            self.reader.close()
        self.reader = None
        if message is not None:
            self._tensors = message.parts

    def withholds(self, count: int) -> bool:
        """Return True if the client gets no credit for `count` bytes yet, because enough messages
        wait; else return False."""
        if len(self._messages) < AHEAD:
            return False
        self.withheld += count
        return True

    def stop_reading(self) -> None:
        """Stop expecting messages."""
        if self.reader is not None:
            if self.reader.receiving is not None:
                self.reader.close()
            self.reader = None

    def let_go(self) -> None:
        """Release the memory of the answer, which is not used any more."""
        held, self.held = self.held, None
        if held is not None:
            try:
                held.close()
            except Exception:  # a bug must not stop the loop, which serves all calls
                _log.exception("unexpected error at an answer's end")

    def taken(self) -> None:
        """Note that the socket has taken the answer, or that the answer cannot be sent any more."""
        self._untaken = 0
        self._wake()

    def end(self) -> None:
        """End the call, for any reason. Idempotent."""
        self.active = self.waits = False
        if self.reader is not None:
            self.stop_reading()
        self._on_message = None
        self._messages.clear()  # its deadline may keep the call object alive for long
        if self._changes is not None:
            self._changes.tell()
        for inference in self._inferences.copy():
            inference.cancel()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _log.exception("unexpected error at a call's end")

    def expire(self) -> None:
        """Tell the owner that the deadline has passed, if the call is active."""
        if self.active:
            self.owner.expired(self)
