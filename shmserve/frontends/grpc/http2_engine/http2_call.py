"""One call: what its rpc sees of it, and how the loop and the rpc's thread talk to each other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from time import monotonic
from typing import NoReturn, Protocol

import grpc

from shmserve.frontends.grpc.http2_engine.call_head import CallHead, Metadata
from shmserve.frontends.grpc.http2_engine.message_compression import inflate
from shmserve.frontends.http2 import Buffer, Fields
from shmserve.frontends.http2.grpc_framing import GrpcMessage, MessageReader

_log = logging.getLogger("shmserve.grpc")

_FOREVER_S = float(1 << 31)  # as the other engine has it for calls without a deadline


class Aborted(Exception):
    """The rpc has ended its call by `Http2Call.abort`."""


class Gone(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """The call has ended before its rpc has."""


class CallOwner(Protocol):
    """What a call wants of its connection, from any thread."""

    def peer(self) -> str: ...

    def send_soon(self, call: Http2Call, data: Sequence[Buffer], trailers: Fields | None) -> None:
        """Send a message, prefix included, or none; trailers end the call."""
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
        reader: of the loop's thread; None once no message is wanted any more.
        run: its rpc, in the pool.
        withheld: bytes that the client has sent and may not send again yet.
        waits: its one message has not come entirely.
        head_sent: as it says.
        ended_by_us: its trailers are on their way.
    """

    __slots__ = (
        "_active",
        "_callbacks",
        "_deadline",
        "_lock",
        "_max_bytes",
        "_messages",
        "_metadata",
        "_taken",
        "ended_by_us",
        "head",
        "head_sent",
        "owner",
        "reader", "run", "status",
        "stream_id",
        "trailing",
        "waits",
        "withheld",
    )  # fmt: skip

    def __init__(
        self, owner: CallOwner, stream_id: int, head: CallHead, now: float, max_bytes: int
    ) -> None:
        self.owner = owner
        self.stream_id = stream_id
        self.head = head
        self.reader: MessageReader | None = MessageReader(max_bytes)
        self.run: Future[None] | None = None
        self.withheld = 0
        self.waits = not head.method.streams
        self.head_sent = False
        self.ended_by_us = False
        self.trailing: Metadata = ()
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._max_bytes = max_bytes
        self._deadline = now + head.timeout_s
        self._metadata: Metadata | None = None
        self._lock = threading.Lock()
        self._active = True
        self._callbacks: list[Callable[[], None]] = []
        streams = head.method.streams
        self._messages: SimpleQueue[GrpcMessage | None] | None = SimpleQueue() if streams else None
        self._taken: SimpleQueue[bool] | None = SimpleQueue() if streams else None

    # --- for the rpc

    def peer(self) -> str:
        return self.owner.peer()

    def invocation_metadata(self) -> Metadata:
        if self._metadata is None:
            self._metadata = self.head.metadata()
        return self._metadata

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

    def read(self, message: GrpcMessage) -> bytes:
        """A message's bytes.

        Raises:
            ShmserveError: it cannot be decompressed.
        """
        if message.compressed:
            return inflate(message.data, self.head.encoding, self._max_bytes)
        return bytes(message.data)

    def requests(self) -> Iterator[bytes]:
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
        if message is not None and not isinstance(message.data.obj, bytearray):
            # A view of what was received would hold all of that
            message = GrpcMessage(message.compressed, memoryview(bytes(message.data)))
        self._messages.put(message)

    @property
    def queued(self) -> int:
        """Messages nobody has taken yet."""
        return self._messages.qsize() if self._messages is not None else 0

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
        self.reader = None
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
