"""One call: what its rpc sees of it, and how the loop and a rpc in a thread talk to each other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from time import monotonic
from typing import NoReturn, Protocol

import grpc
import numpy as np

from shmserve.config import Settings
from shmserve.errors import ShmserveError
from shmserve.frontends.grpc.call_turns import CallTurn, PoolPlace
from shmserve.frontends.grpc.http2_engine.call_head import CallHead, Metadata
from shmserve.frontends.grpc.http2_engine.connected_client import ConnectedClient
from shmserve.frontends.grpc.http2_engine.message_compression import inflate
from shmserve.frontends.grpc.message_heap import CountedMessage, MessageHeap, failed
from shmserve.frontends.grpc.rpc_methods import HeldAnswer, RpcMessage
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.frontends.http2 import Buffer, Fields
from shmserve.frontends.http2.grpc_framing import (
    GrpcMessage,
    MessageReader,
    MessageReceiver,
    WholeMessage,
)
from shmserve.protocol.protobuf.incoming_request import LARGE_BYTES

_log = logging.getLogger("shmserve.grpc")

_FOREVER_S = float(1 << 31)  # as the other engine has it for calls without a deadline


class Aborted(Exception):
    """The rpc has ended its call by `Http2Call.abort`."""


class Gone(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """The call has ended before its rpc has."""


class CallOwner(Protocol):
    """What a call wants of its connection, from any thread.

    Attributes:
        client: its.
    """

    client: ConnectedClient

    def send_soon(
        self,
        call: Http2Call,
        data: Sequence[Buffer],
        trailers: Fields | None,
        held: HeldAnswer | None = None,
    ) -> None:
        """Send a message, prefix included, or none; trailers end the call. `held`: the answer that
        `data` is of, closed once nothing of it will be sent any more."""
        ...

    def cancel_soon(self, call: Http2Call) -> None:
        """Reset its stream."""
        ...

    def expired(self, call: Http2Call) -> None:
        """Its deadline has passed; in the loop."""
        ...

    def give_credit_soon(self, call: Http2Call) -> None:
        """Its client may send again."""
        ...


class Http2Call:
    """As `rpc_methods.RpcContext` says, and the call's messages.

    Attributes:
        reader: of the loop's turn; None once no message is wanted any more.
        place: its, in the rpc's pool.
        turn: its rpc, for the pool.
        on_loop: that runs as a greenlet.
        withheld: bytes that the client has sent and may not send again yet.
        waits: its one message has not come entirely.
        heard: a message of it has come.
        sparing: tensors that begin are not to be taken from what is fed, see `IncomingRequest`.
        head_sent: as it says.
        ended_by_us: its trailers are on their way.
        tensors: of its message, in slots.
        admitted: its caller was found to be one who may make it.
        caller_number: whose it is, where callers take turns.
        held: the answer that is being sent.
    """

    __slots__ = (
        "_active", "_callbacks", "_copied", "_deadline", "_lock", "_max_bytes", "_messages",
        "_settings", "_taken", "admitted", "caller_number", "ended_by_us", "head", "head_sent",
        "heard", "held", "on_loop", "owner", "place", "reader", "sparing", "status", "stream_id",
        "tensors", "trailing", "turn", "waits", "withheld",
    )  # fmt: skip

    def __init__(
        self, owner: CallOwner, stream_id: int, head: CallHead, now: float, settings: Settings
    ) -> None:
        self.owner = owner
        self.stream_id = stream_id
        self.head = head
        self._max_bytes = head.method.max_bytes
        self._copied: MessageHeap | None = None
        self._settings = settings
        self.reader: MessageReader | None = MessageReader(self._max_bytes, self._receiver)
        self.tensors: TensorMessage | None = None
        self.held: HeldAnswer | None = None
        self.place: PoolPlace | None = None
        self.turn: CallTurn | None = None
        self.on_loop = False
        self.withheld = 0
        self.waits = not head.method.streams
        self.heard = False
        self.sparing = False
        self.admitted = False
        self.caller_number = owner.client.number
        self.head_sent = False
        self.ended_by_us = False
        self.trailing: Metadata = ()
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._deadline = now + head.timeout_s
        self._lock = threading.Lock()
        self._active = True
        self._callbacks: list[Callable[[], None]] = []
        streams = head.method.streams
        self._messages: SimpleQueue[GrpcMessage | None] | None = SimpleQueue() if streams else None
        self._taken: SimpleQueue[bool] | None = SimpleQueue() if streams else None

    def _receiver(self, size: int, compressed: bool) -> MessageReceiver:
        if size < LARGE_BYTES:
            return WholeMessage(size)
        admit = self.head.method.admit
        if admit is not None:
            try:
                admit(self)
            except ShmserveError as ex:
                raise failed(ex) from None
            self.admitted = True
        intake = self.head.method.tensors
        if intake is None or compressed:
            return CountedMessage(size, self._settings.max_heap_bytes)
        message = TensorMessage(size, self._settings, intake, self)
        message.sparing = self.sparing
        return message

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
        return self._active

    def add_callback(self, callback: Callable[[], None], /) -> bool:
        with self._lock:
            if self._active:
                self._callbacks.append(callback)
            return self._active

    def set_trailing_metadata(self, trailing_metadata: Metadata, /) -> None:
        self.trailing = trailing_metadata

    def abort(self, code: grpc.StatusCode, details: str, /) -> NoReturn:
        self.status = (code, details)
        raise Aborted

    def cancel(self) -> None:
        self.owner.cancel_soon(self)

    # --- for the rpc's thread

    def read(self, message: GrpcMessage) -> RpcMessage:
        """What an rpc is given of a message.

        Raises:
            ShmserveError: it cannot be decompressed, or there is no memory for it.
        """
        if message.parts is not None:
            tensors: TensorMessage = message.parts
            return tensors
        data, most = message.data, self._settings.max_heap_bytes
        if message.compressed:
            data = inflate(data, self.head.encoding, self._max_bytes, most)
        if len(data) < LARGE_BYTES:  # a view of what was received would hold all of that
            return bytes(data)
        if not self.head.method.views:
            self._count_copy(len(data), most)
            return bytes(data)
        return data

    def _count_copy(self, nbytes: int, most: int) -> None:
        """Of a message for an rpc that looks at one after the other."""
        if self._copied is None:
            self._copied = MessageHeap(most)
        self._copied.close()
        self._copied.take(nbytes)

    def drop_message(self) -> None:
        """Its rpc has run, or never will: give back what that has not taken. Idempotent."""
        if self._copied is not None:
            self._copied.close()
        tensors, self.tensors = self.tensors, None
        if tensors is not None:
            tensors.close()

    def requests(self) -> Iterator[RpcMessage]:
        """The messages of a stream, as they come.

        Raises:
            Gone: the call has ended.
        """
        queue = self._messages
        assert queue is not None, "a unary call has one message"
        while (message := queue.get()) is not None:
            if self.withheld:
                self.owner.give_credit_soon(self)
            yield self.read(message)
        if not self._active:
            raise Gone

    def await_taken(self) -> bool:
        """Wait until the answer that was sent is with the client's system; False: it has gone."""
        assert self._taken is not None, "a unary call has one answer"
        return self._taken.get() and self._active

    # --- for the loop

    def put(self, message: GrpcMessage | None) -> None:
        """Another message of a stream; None: there is no other."""
        assert self._messages is not None, "a unary call has one message"
        # A view of what was received would hold all of that; other memory is the message's own
        if message is not None and not isinstance(message.data.obj, np.ndarray):
            message = GrpcMessage(message.compressed, memoryview(bytes(message.data)))
        self._messages.put(message)

    @property
    def queued(self) -> int:
        """Messages nobody has taken yet."""
        return self._messages.qsize() if self._messages is not None else 0

    def spared(self) -> int:
        """How many bytes at the end of what was fed last were not taken, since it was `sparing`."""
        message = self.reader.receiving if self.reader is not None else None
        self.sparing = False
        return message.stop_sparing() if isinstance(message, TensorMessage) else 0

    def stop_reading(self) -> None:
        """No message is wanted any more."""
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    def let_go(self) -> None:
        """Nothing of the answer that was sent is in use any more."""
        held, self.held = self.held, None
        if held is not None:
            held.close()

    def taken(self) -> None:
        """The answer that was sent is with the client's system, or will never be."""
        if self._taken is not None:
            self._taken.put(True)

    def end(self) -> bool:
        """It is over, for whatever reason; False: it was before."""
        with self._lock:
            if not self._active:
                return False
            self._active = False
            callbacks, self._callbacks = self._callbacks, []
        if self.reader is not None:
            self.stop_reading()
        if self._messages is not None:
            self._messages.put(None)
        if self._taken is not None:
            self._taken.put(False)
        for callback in callbacks:
            try:
                callback()
            except Exception:
                _log.exception("unexpected error at a call's end")
        return True

    def expire(self) -> None:
        """Its deadline has passed."""
        if self._active:
            self.owner.expired(self)
