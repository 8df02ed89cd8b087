"""A client's connection: the socket, and the protocol's timers. Everything runs on the loop."""

import logging
import select
import socket
from functools import partial
from time import monotonic

from shmserve.frontends.grpc.http2_engine.connected_client import ConnectedClient
from shmserve.frontends.grpc.http2_engine.connection_calls import ConnectionCalls
from shmserve.frontends.grpc.http2_engine.event_loop import READABLE, WRITABLE
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.http2_engine.transports import PEEK_BYTES, ConnectionTransport
from shmserve.frontends.http2 import (
    Connection,
    ConnectionTerminated,
    DataReceived,
    ErrorCode,
    Event,
    RequestReceived,
    StreamReset,
    TrailersReceived,
)
from shmserve.frontends.http2.frames import HEAD_BYTES

_log = logging.getLogger("shmserve.grpc")

_RECEIVE_BYTES = 64 << 10
_RECEIVES = 32  # receives of a connection in a turn; then other connections follow
_SENDS = 16
_LAST_WORDS_S = 2.0  # seconds for the client to read the last frames
_CLOSES_FIRST_S = 1.0  # seconds for a client to close a drained connection
_TOO_OLD = "the connection is old (grpc_max_connection_age_s)"
_GIVES_WAY = "an idle connection makes room for another (max_connections, descriptors)"
_ENDED = select.EPOLLHUP | select.EPOLLERR


class ServerConnection:
    """A client's connection, from accept until the socket is closed. `due`: time of the next
    `tick`, as computed by the latest `look`. `touched`: True if something has happened since the
    latest `look`."""

    def __init__(self, transport: ConnectionTransport, serving: Serving, drains_at: float) -> None:
        self._transport = transport
        self._sock = transport.sock
        self._fd = transport.sock.fileno()
        self._serving = serving
        self._loop = serving.loop
        self._drains_at = drains_at
        self._ends_at = float("inf")
        self._core = Connection(serving.limits, monotonic())
        client = ConnectedClient(self._sock)
        self._calls = ConnectionCalls(
            self._core, serving, client, self._settle_later, self._receive_again
        )
        self._active_at = monotonic()
        self._busy = False  # True if the connection was in use at the latest settling
        self._next_head = memoryview(bytearray(HEAD_BYTES))
        self._events = READABLE
        self._settling = False
        self._closed = False
        self.due = 0.0
        self.touched = True
        self._loop.hub.handle(self._fd, self._ready)
        self._settle_later()

    @property
    def idle_since(self) -> float:
        """The time since which the connection is idle; infinite while the connection is in use."""
        return float("inf") if self._calls.in_use else self._active_at

    # --- what comes in

    def _ready(self, events: int) -> None:
        try:
            if events & _ENDED and self._calls.begun.waiting:
                self.lose()  # epoll would report the end until it is read, and nothing is read now
            elif events & ~WRITABLE:
                self._receive()
        except OSError:
            self.lose()
        except Exception:
            _log.exception("unexpected error with a connection")
            self.lose()
        if self._calls.opened or self._calls.incoming:
            self._calls.expect_messages()
        # Usually there is nothing to send until a call has its answer
        if self._core.has_news or self._events != READABLE or self._calls.begun.waiting:
            self._settle_later()
        else:
            self.touched = True
            self._loop.touch(monotonic())

    def _receive(self) -> None:
        transport, now = self._transport, monotonic()
        self._calls.entered = False
        for _ in range(_RECEIVES):
            try:
                if self._calls.begun.waiting or not self._receive_once(now):
                    return
            except BlockingIOError:
                return
        if transport.pending:  # epoll does not report bytes that TLS has buffered
            self._receive_again()

    def _receive_again(self) -> None:
        if not self._closed:
            self._loop.post(partial(self._ready, READABLE))

    def _receive_once(self, now: float) -> bool:
        """Receive once. Return True if more data may be available, else False."""
        core = self._core
        payload = core.payload_due if core.reader.left else None
        if payload is not None:
            call = self._calls.by_stream.get(payload[0])
            reader = call.reader if call is not None else None
            message = reader.receiving if reader is not None else None
            place = message.space() if message is not None else None
            if call is not None and place:
                return self._receive_payload(call, place, payload[1], now)
        if self._calls.receiving:  # receive no bytes that belong into a slot
            limit = min(core.reader.missing if payload is None else payload[1], _RECEIVE_BYTES)
        elif self._calls.expects_tensors and (head := self._transport.peek()) is not None:
            return self._receive_head(head, now)
        else:
            limit = _RECEIVE_BYTES
        data = self._transport.receive(limit)
        if not data:
            self.lose()
            return False
        if events := core.receive(data, now):
            self._handle(events)
        return not self._closed and (len(data) == limit or self._transport.pending)

    def _receive_head(self, head: bytes, now: float) -> bool:
        """Handle peeked bytes. Bytes of a tensor that begins in `head` stay in the socket, to be
        received into the tensor's slot. Return True if more data may be available, else False."""
        if not head:
            self.lose()
            return False
        events, count = self._core.receive(head, now), len(head)
        reader, last = self._core.reader, events[-1] if events else None
        begun_stream = reader.payload.id if reader.left and reader.payload is not None else 0
        if type(last) is DataReceived and last.stream_id == begun_stream:
            del events[-1]
            if events:
                self._handle(events)
            back = self._calls.data(last, sparing=True)
            self._core.payload_returned(back)
            count -= back
        elif events:
            self._handle(events)
        if not self._closed:
            self._transport.receive(count)
        is_all = count == len(head) < PEEK_BYTES
        return not self._closed and not is_all

    def _receive_payload(
        self, call: Http2Call, place: memoryview, remaining: int, now: float
    ) -> bool:
        """Receive payload straight into `place`. Together with the last bytes, receive the head of
        the next frame, so that no payload of that frame is received with the head and copied.
        Return True if more data may be available, else False."""
        core, size = self._core, min(remaining, len(place))
        places, capacity = [place[:size]], size
        if size == remaining:
            places.append(self._next_head)
            capacity += HEAD_BYTES
        count = self._transport.receive_into(places)[0]
        if not count:
            self.lose()
            return False
        taken = min(count, size)
        events = core.payload_received(taken, now)
        self._calls.filled(call, taken)
        if count > size:
            events += core.receive(self._next_head[: count - size], now)
        if events:
            self._handle(events)
        return not self._closed and (count == capacity or self._transport.more)

    def _handle(self, events: list[Event]) -> None:
        calls = self._calls
        for event in events:
            if type(event) is DataReceived:
                calls.data(event)
            elif type(event) is RequestReceived:
                calls.open(event)
            elif type(event) is TrailersReceived:
                calls.ended(event.stream_id)
            elif type(event) is StreamReset:
                calls.reset(event.stream_id)
            elif type(event) is ConnectionTerminated:
                _log.info("connection of %s ended: %s", calls.client.address, event.reason)
                self._ends_at = monotonic() + _LAST_WORDS_S
                calls.all_over()

    # --- what goes out

    def _settle_later(self) -> None:
        if not self._settling:
            self._settling = True
            self._loop.at_turns_end(self._settle)

    def _settle(self) -> None:
        """Send pending output, and update calls and connection."""
        self._settling = False
        if self._closed:
            return
        self.touched = True
        now = monotonic()
        # pings or streams without messages do not count as use
        if self._busy or self._calls.heard:
            self._active_at = now
        self._loop.touch(now)
        try:
            blocked = self._flush(now)
        except OSError:
            self.lose()
            return
        self._busy, self._calls.heard = self._calls.in_use, False
        if self._core.finished and self._may_leave(now):
            self._leave()
            return
        events = 0 if self._calls.begun.waiting else READABLE
        if blocked:
            events |= WRITABLE
        if events != self._events:
            self._events = events
            self._loop.hub.change(self._fd, events)

    def _flush(self, now: float) -> bool:
        """Send pending output. Return True if the socket or this turn takes no more, else False."""
        core = self._core
        blocked = False
        for _ in range(_SENDS if self._transport.ready else 0):
            buffers = core.outgoing(now)
            if not buffers:
                break
            try:
                if not core.sent(self._transport.send(buffers), now):
                    break
            except BlockingIOError:
                blocked = True
                break
        else:
            blocked = True  # other connections follow
        self._calls.release()
        return blocked

    # --- life and death

    def tick(self, now: float) -> None:
        """End or drain the connection if the client is too slow or the connection too old."""
        if now >= self._ends_at:
            self._leave()
            return
        if now >= self._drains_at:
            self.drain(_TOO_OLD)
        self._calls.end_overdue(now)
        self._handle(self._core.tick(now))
        self._settle_later()

    def look(self, now: float) -> None:
        """Compute `due`, the time of the next `tick`."""
        self.touched = False
        core, message = self._core.next_tick(now), self._calls.begun.deadlines.next_due
        self.due = min(core, message, self._drains_at, self._ends_at)

    def drain(self, reason: str) -> None:
        """Ask the client to use another connection. `reason`: ASCII text for the client."""
        self._drains_at = float("inf")
        self._core.drain(monotonic(), reason)
        self._settle_later()

    def terminate(self, reason: str) -> None:
        """End the connection now, and tell the client why: `reason` is ASCII."""
        self._core.terminate(ErrorCode.NO_ERROR, reason)
        self._calls.all_over()
        self._settle()
        self.lose()

    def give_way(self) -> None:
        """End the idle connection: the process needs room for another."""
        self.terminate(_GIVES_WAY)

    def _may_leave(self, now: float) -> bool:
        """Return True if the socket may be closed, now that all output is sent. After a drain the
        client closes first: else the client's last frames would meet a closed socket, and the
        resulting reset would destroy answers that the client has not read yet."""
        if self._core.failed:
            return True
        self._ends_at = min(self._ends_at, now + _CLOSES_FIRST_S)
        return now >= self._ends_at

    def _leave(self) -> None:
        """Close the connection after the last output. Received data are read before, since closing
        over unread data would take the last output back from the client."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
            for _ in range(_RECEIVES):
                if not self._sock.recv(_RECEIVE_BYTES):
                    break
        except (OSError, ValueError):
            pass  # nothing more to read
        self.lose()

    def lose(self) -> None:
        """Close the socket and end every call."""
        if self._closed:
            return
        self._closed = True
        self._core.lost()
        self._calls.release()
        self._calls.all_over()
        self._loop.hub.unhandle(self._fd)
        self._sock.close()
        self._serving.connections.discard(self)
