"""One client's connection: its socket, its protocol and its calls, all of the loop's thread."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from functools import partial

import grpc

from shmserve.core.regions.region_book import Caller
from shmserve.frontends.grpc.http2_engine.call_head import (
    OK,
    CallHead,
    call_head,
    refusal,
    status_fields,
    trailers_only,
)
from shmserve.frontends.grpc.http2_engine.event_loop import READABLE, WRITABLE
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.http2_engine.transports import ConnectionTransport
from shmserve.frontends.http2 import (
    Buffer,
    Connection,
    ConnectionTerminated,
    DataReceived,
    ErrorCode,
    Event,
    Fields,
    RequestFields,
    RequestReceived,
    StreamReset,
    TrailersReceived,
    encode_fields,
)
from shmserve.frontends.http2.grpc_framing import FramingFailed, GrpcMessage
from shmserve.transport.peer_credentials import caller_of

_log = logging.getLogger("shmserve.grpc")

_RECEIVE_BYTES = 64 << 10
_RECEIVES = 32  # of one connection in a turn, then it is another's
_SENDS = 16
_LAST_WORDS_S = 2.0  # for what is said of the end to be taken
_AHEAD = 4  # messages of a stream that wait for its rpc; beyond, its client's window stays shut
_STATUSES = {code.value[0]: code for code in grpc.StatusCode}
_OK_TRAILERS = encode_fields(OK)


class ServerConnection:
    """From accept until the socket is closed.

    Attributes:
        due: when `tick` has something to do, as far as was known when that was last looked at.
        touched: something has happened since then.
    """

    def __init__(self, transport: ConnectionTransport, serving: Serving, drains_at: float) -> None:
        self._transport = transport
        self._sock = transport.sock
        self._fd = transport.sock.fileno()
        self._serving = serving
        self._loop = serving.loop
        self._drains_at = drains_at
        self._ends_at = float("inf")
        self._core = Connection(serving.limits, self._loop.now)
        self._calls: dict[int, Http2Call] = {}
        self._last_head: tuple[RequestFields, CallHead | bytes] | None = None
        self._caller: Caller | None = None
        self._peer = _shown(self._sock)
        self._events = READABLE
        self._settling = False
        self._closed = False
        self.due = 0.0
        self.touched = True
        self._loop.add(self._fd, self._ready)
        self._settle_later()

    # --- for any thread

    def peer(self) -> str:
        return self._peer

    def caller(self) -> Caller:
        """Who is at the other end, as the kernel says."""
        if self._caller is None:
            self._caller = caller_of(self._sock)
        return self._caller

    def send_soon(self, call: Http2Call, data: Sequence[Buffer], trailers: Fields | None) -> None:
        self._loop.post(partial(self._send, call, data, trailers))

    def cancel_soon(self, call: Http2Call) -> None:
        self._loop.post(partial(self._cancel, call))

    def give_credit_soon(self, call: Http2Call) -> None:
        self._loop.post(partial(self._give_credit, call))

    # --- what comes in

    def _ready(self, events: int) -> None:
        try:
            if events & ~WRITABLE:
                self._receive()
        except OSError:
            self.lose()
        except Exception:
            _log.exception("unexpected error with a connection")
            self.lose()
        self._settle_later()

    def _receive(self) -> None:
        transport, now = self._transport, self._loop.now
        for _ in range(_RECEIVES):
            try:
                if not self._receive_once(now):
                    return
            except BlockingIOError:
                return
        if transport.pending:  # the system will not tell of it again
            self._loop.post(partial(self._ready, READABLE))

    def _receive_once(self, now: float) -> bool:
        """Whether there may be more."""
        core = self._core
        due = core.payload_due
        if due is not None:
            call = self._calls.get(due[0])
            place = call.reader.space() if call is not None and call.reader is not None else None
            if call is not None and place is not None:
                count = self._transport.receive_into(place[: due[1]])
                if not count:
                    self.lose()
                    return False
                self._filled(call, count, core.payload_received(count, now))
                return True
        data = self._transport.receive(_RECEIVE_BYTES)
        if not data:
            self.lose()
            return False
        self._handle(core.receive(data, now))
        return not self._closed and (len(data) == _RECEIVE_BYTES or self._transport.pending)

    def _handle(self, events: list[Event]) -> None:
        opened: list[Http2Call] | None = None
        for event in events:
            if type(event) is DataReceived:
                self._data(event)
            elif type(event) is RequestReceived:
                call = self._open(event)
                if call is not None and call.waits:
                    opened = [*opened, call] if opened else [call]
            elif type(event) is TrailersReceived:
                self._ended(event.stream_id)
            elif type(event) is StreamReset:
                call = self._calls.get(event.stream_id)
                if call is not None:
                    self._over(call)
            elif type(event) is ConnectionTerminated:
                _log.info("connection of %s ended: %s", self._peer, event.reason)
                self._ends_at = self._loop.now + _LAST_WORDS_S
                self._all_over()
        for call in opened or ():
            if call.waits:
                self._serving.overdue.expect(call, call.head.method.message_timeout_s)

    def _open(self, event: RequestReceived) -> Http2Call | None:
        if self._last_head is None or self._last_head[0] is not event.head:
            self._last_head = (event.head, call_head(event.head, self._serving.methods))
        head, stream_id, now = self._last_head[1], event.stream_id, self._loop.now
        if isinstance(head, bytes):
            self._core.send(stream_id, now, trailers=head)
            return None
        pool = head.method.pool
        if not pool.reserve():
            block = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, pool.why)
            self._core.send(stream_id, now, trailers=block)
            return None
        call = Http2Call(self, stream_id, head, now, self._serving.max_message_bytes)
        self._calls[stream_id] = call
        if head.timeout_s != float("inf"):
            self._loop.deadlines.add(now + head.timeout_s, call)
        if head.method.streams:
            call.run = pool.submit_reserved(self._serving.runs.stream, call)
        if event.end_stream:
            self._ended(stream_id)
        return call

    def _data(self, event: DataReceived) -> None:
        call, size = self._calls.get(event.stream_id), len(event.data)
        if call is None or call.reader is None:
            self._core.consumed(event.stream_id, size)
            return
        try:
            for message in call.reader.feed(event.data):
                self._message(call, message)
            if event.end_stream and call.reader is not None:
                call.reader.finish()
        except FramingFailed as failed:
            self._fail(call, _STATUSES[failed.status], failed.reason)
        self._consumed(call, size)
        if event.end_stream:
            self._ended(event.stream_id)

    def _filled(self, call: Http2Call, count: int, events: list[Event]) -> None:
        """The message's next bytes are where they belong."""
        assert call.reader is not None, "it had space for them"
        message = call.reader.filled(count)
        if message is not None:
            self._message(call, message)
        self._consumed(call, count)
        self._handle(events)

    def _message(self, call: Http2Call, message: GrpcMessage) -> None:
        if call.head.method.streams:
            call.put(message)
        elif call.waits:
            self._begin(call, message)

    def _begin(self, call: Http2Call, message: GrpcMessage | None) -> None:
        call.waits = False
        call.reader = None  # what comes after the one message does not matter
        self._serving.overdue.met(call)
        runs = self._serving.runs
        call.run = call.head.method.pool.submit_reserved(runs.unary, call, message)

    def _ended(self, stream_id: int) -> None:
        """The client has sent all."""
        call = self._calls.get(stream_id)
        if call is None or call.ended_by_us:
            return
        if call.head.method.streams:
            call.reader = None
            call.put(None)
        elif call.waits:
            self._begin(call, None)

    def _consumed(self, call: Http2Call, count: int) -> None:
        """The client may send as much again, unless its stream has enough in wait."""
        if call.queued < _AHEAD:
            self._core.consumed(call.stream_id, count)
            return
        call.withheld += count
        if call.queued < _AHEAD:  # its rpc has looked at `withheld` in between, perhaps
            self._give_credit(call)

    def _give_credit(self, call: Http2Call) -> None:
        count, call.withheld = call.withheld, 0
        if count and call.is_active():
            self._core.consumed(call.stream_id, count)
            self._settle_later()

    # --- what goes out

    def _send(self, call: Http2Call, data: Sequence[Buffer], trailers: Fields | None) -> None:
        if self._calls.get(call.stream_id) is not call or call.ended_by_us:
            return
        head = block = None
        if not call.head_sent and (data or trailers is None):
            head = self._serving.runs.head(call)
        if trailers is not None:
            call.ended_by_us = True
            call.reader = None
            if head is None and not call.head_sent:
                block = trailers_only(trailers)
            else:
                block = _OK_TRAILERS if trailers is OK else encode_fields(trailers)
        call.head_sent = True
        self._core.send(
            call.stream_id, self._loop.now, head=head, data=data, trailers=block, token=call
        )
        self._settle_later()

    def _fail(self, call: Http2Call, code: grpc.StatusCode, details: str) -> None:
        self._send(call, (), status_fields(code, details))
        self._over(call)

    def expired(self, call: Http2Call) -> None:
        if call.ended_by_us:
            self._cancel(call)  # the answer is not being read
        else:
            self._fail(call, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _cancel(self, call: Http2Call) -> None:
        if self._calls.get(call.stream_id) is call:
            self._core.reset(call.stream_id, ErrorCode.CANCEL)
            self._over(call)
            self._settle_later()

    def _settle_later(self) -> None:
        if not self._settling:
            self._settling = True
            self._loop.at_turns_end(self._settle)

    def _settle(self) -> None:
        """Send what there is, and see what has become of calls and connection."""
        self._settling = False
        if self._closed:
            return
        self.touched = True
        self._loop.touch()
        try:
            blocked = self._flush()
        except OSError:
            self.lose()
            return
        if self._core.finished:
            self._leave()
            return
        events = READABLE | WRITABLE if blocked else READABLE
        if events != self._events:
            self._events = events
            self._loop.change(self._fd, events)

    def _flush(self) -> bool:
        """Whether something is left."""
        core, now = self._core, self._loop.now
        blocked = False
        for _ in range(_SENDS if self._transport.ready else 0):
            buffers = core.outgoing(now)
            if not buffers:
                break
            try:
                core.sent(self._transport.send(buffers), now)
            except BlockingIOError:
                blocked = True
                break
        else:
            blocked = True  # it is another's turn
        self._release()
        return blocked

    def _release(self) -> None:
        """See to calls whose answers are with the client's system, or never will be."""
        for call in self._core.released():
            assert isinstance(call, Http2Call)
            if call.ended_by_us:
                self._over(call)
            else:
                call.taken()

    # --- life and death

    def _over(self, call: Http2Call) -> None:
        if self._calls.pop(call.stream_id, None) is None:
            return
        if call.waits:
            call.waits = False
            self._serving.overdue.met(call)
            call.head.method.pool.give_back()
        elif call.run is not None:
            call.run.cancel()  # if it waits for a thread
        call.end()
        if call.head.timeout_s != float("inf"):
            self._loop.deadlines.ended()

    def _all_over(self) -> None:
        for call in list(self._calls.values()):
            self._over(call)

    def tick(self, now: float) -> None:
        """See whether the client has been too slow, or the connection too old."""
        if now >= self._ends_at:
            self.lose()
            return
        if now >= self._drains_at:
            self._drains_at = float("inf")
            self._core.drain(now)
        self._handle(self._core.tick(now))
        self._settle_later()

    def look(self, now: float) -> None:
        """When `tick` is due."""
        self.touched = False
        self.due = min(self._core.next_tick(now), self._drains_at, self._ends_at)

    def drain(self) -> None:
        """Ask the client to go elsewhere."""
        self._drains_at = float("inf")
        self._core.drain(self._loop.now)
        self._settle_later()

    def terminate(self) -> None:
        """End it now."""
        self._core.terminate(ErrorCode.NO_ERROR, "the server is stopping")
        self._all_over()
        self._settle()
        self.lose()

    def _leave(self) -> None:
        """All is said. What the client still says would, unread, take from it what it was told."""
        try:
            self._sock.shutdown(socket.SHUT_WR)
            for _ in range(_RECEIVES):
                if not self._sock.recv(_RECEIVE_BYTES):
                    break
        except (OSError, ValueError):
            pass  # there is no more
        self.lose()

    def lose(self) -> None:
        """Close the socket; every call is over."""
        if self._closed:
            return
        self._closed = True
        self._core.lost()
        self._release()
        self._all_over()
        self._loop.remove(self._fd)
        self._sock.close()
        self._serving.connections.discard(self)


def _shown(sock: socket.socket) -> str:
    """The client's address as the other engine writes it."""
    if sock.family == socket.AF_UNIX:
        return "unix:"
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "unknown"
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
