"""Calls of a connection: begin, answer and end. Everything runs on the loop."""

import logging
from collections.abc import Callable
from functools import partial
from time import monotonic

import grpc

from shmserve.core.scheduling.admission import CallTurn
from shmserve.errors import QueueFull, ResourceExhausted
from shmserve.frontends import http2
from shmserve.frontends.grpc.call_pools import CallPool
from shmserve.frontends.grpc.http2_engine.begun_messages import BegunMessages
from shmserve.frontends.grpc.http2_engine.call_head import (
    CallHead,
    Metadata,
    call_head,
    refusal,
    status_fields,
)
from shmserve.frontends.grpc.http2_engine.connected_client import ConnectedClient
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.frontends.http2.grpc_framing import FramingFailed, GrpcMessage, MessageReceiver
from shmserve.frontends.request_ids import KEY, of_metadata

_log = logging.getLogger("shmserve.grpc")

_STATUSES = {code.value[0]: code for code in grpc.StatusCode}


class ConnectionCalls:
    """The owner of a connection's calls (`CallOwner`).

    Args:
        core: the connection's protocol.
        serving: state shared by all connections.
        client: the connected client.
        settle: has the connection send pending output at this turn's end.
        resume: has the connection receive again, once no tensor waits for memory.

    Attributes:
        client, core, settle: as above.
        by_stream: open calls.
        opened: unary calls opened in this turn that wait for their message.
        incoming: calls with a part of their message received since the latest `expect_messages`.
        receiving: streams with an incomplete message that has tensors for slots.
        begun: memory and deadlines of incomplete messages.
        expects_tensors: True if the latest message had tensors for slots, or before any message.
        entered: True if a call has run since the last reset; further calls wait for the turn's
            end.
        heard: True if a message has arrived since the last reset.
    """

    def __init__(
        self,
        core: http2.Connection,
        serving: Serving,
        client: ConnectedClient,
        settle: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self.core = core
        self._serving = serving
        self._loop = serving.loop
        self.client = client
        self.settle = settle
        self.by_stream: dict[int, Http2Call] = {}
        self._last_head: tuple[http2.RequestFields, CallHead | bytes] | None = None
        self.begun = BegunMessages(serving, self.go_on, self.refuse, resume)
        self.opened: dict[int, Http2Call] = {}
        self.incoming: dict[int, Http2Call] = {}
        self.receiving: set[int] = set()
        self._turns: dict[int, CallTurn] = {}  # of open calls whose rpc waits, runs or has run
        self.expects_tensors = True
        self.entered = self.heard = False
        self._heard: set[int] = set()  # streams of open calls that have received a message

    @property
    def in_use(self) -> bool:
        """True if an open call has received a message or a part of a message. Calls without any
        message do not count as use of the connection."""
        return bool(self._heard or self.begun.deadlines.open)

    def post(self, action: Callable[[], object]) -> None:
        self._loop.post(action)

    # --- what comes in

    def open(self, event: http2.RequestReceived) -> None:
        """Begin the call of a new stream, or refuse the call."""
        if self._last_head is None or self._last_head[0] is not event.head:
            hosts = None if self.client.unix else self._serving.hosts
            compression = self._serving.settings.grpc_compression
            head_or_refusal = call_head(event.head, self._serving.methods, compression, hosts)
            self._last_head = (event.head, head_or_refusal)
        head, stream_id, now = self._last_head[1], event.stream_id, monotonic()
        if isinstance(head, bytes):
            self.core.send(stream_id, now, trailers=head)
            return
        try:
            place = head.method.pool.place(self.client.number)
        except ResourceExhausted as ex:
            request = ((KEY, of_metadata(head.metadata)),)
            block = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, ex.message, request)
            self.core.send(stream_id, now, trailers=block)
            return
        call = Http2Call(self, stream_id, head, place, now, self._serving.settings)
        self.by_stream[stream_id] = call
        if head.timeout_s != float("inf"):
            self._loop.deadline(now + head.timeout_s, call)
        if head.method.streams:
            self._run(call, b"", partial(self._serving.runs.stream, call))
        else:
            self.opened[stream_id] = call
        if event.end_stream:
            self.ended(stream_id)

    def expect_messages(self) -> None:
        """Start the time limits for the clients of calls in `opened` and `incoming`. Runs after a
        turn's receives, since most messages arrive completely in one turn."""
        for call in self.opened.values():
            call.head.method.pool.silent.wait(call, call.head.method.message_timeout_s)
        self.opened.clear()
        now = monotonic()
        for stream_id, call in self.incoming.items():
            method, reader = call.head.method, call.reader
            if reader is not None and reader.receiving is not None:
                self.begun.deadlines.look(stream_id, reader.receiving.left, now)
                if call.waits and method.tensors is not None:  # restart the silence
                    method.pool.silent.wait(call, method.message_timeout_s)
        self.incoming.clear()

    def data(self, event: http2.DataReceived, sparing: bool = False) -> int:
        """Handle received payload. Return the number of bytes at the payload's end that were not
        taken: with `sparing`, the bytes of a tensor that begins in the payload; else 0."""
        call, size = self.by_stream.get(event.stream_id), len(event.data)
        if call is None or call.reader is None:
            if size:
                self.core.consumed(event.stream_id, size)
            return 0
        spared = 0
        try:
            for whole in call.reader.feed(event.data, sparing):
                self.message(call, whole)
            if call.reader is not None:
                message = call.reader.receiving
                if sparing and message is not None:
                    spared = message.stop_sparing()
                if event.end_stream:
                    call.reader.finish()
                if message is not None:
                    self._note_incoming(call, message)
        except FramingFailed as failed:
            self.refuse(call, failed)
        if not call.head.method.streams or not call.withholds(size - spared):
            self.core.consumed(event.stream_id, size - spared)
        if event.end_stream and (call.waits or call.head.method.streams):
            self.ended(event.stream_id)
        return spared

    def filled(self, call: Http2Call, count: int) -> None:
        """Handle `count` bytes that were received straight into the memory of a call's message."""
        assert call.reader is not None, "it had space for them"
        try:
            message = call.reader.filled(count)
            if message is not None:
                self.message(call, message)
            elif call.reader.receiving is not None:
                self._note_incoming(call, call.reader.receiving)
        except FramingFailed as failed:
            self.refuse(call, failed)
        if not call.head.method.streams or not call.withholds(count):
            self.core.consumed(call.stream_id, count)

    def _note_incoming(self, call: Http2Call, message: MessageReceiver) -> None:
        """Note that a message is incomplete, and have its memory made if necessary."""
        self.incoming[call.stream_id] = call
        if isinstance(message, TensorMessage):
            self.receiving.add(call.stream_id)
            if message.wanted:
                self.begun.grow(call, message)

    def go_on(self, call: Http2Call) -> None:
        reader = call.reader
        message = reader.complete() if reader is not None else None
        if message is not None:
            self.message(call, message)
        elif reader is not None and reader.receiving is not None:
            self._note_incoming(call, reader.receiving)
        self.expect_messages()

    def end_overdue(self, now: float) -> None:
        """Cancel calls whose message has begun but does not arrive in time."""
        for stream_id in self.begun.deadlines.overdue(now):
            call = self.by_stream.get(stream_id)
            if call is not None and call.withheld:
                # flow control keeps the client from sending
                self.begun.deadlines.extend(stream_id, now)
            elif call is not None:
                _log.info("cancelled a call: its message came too slowly from %s", call.peer())
                self.cancel(call)

    def message(self, call: Http2Call, message: GrpcMessage) -> None:
        """Handle a complete message."""
        if self.incoming or self.begun.deadlines.open:
            self._forget_message(call.stream_id)
        self.expects_tensors = message.parts is not None
        self.heard = True
        if call.active:
            self._heard.add(call.stream_id)
        if call.head.method.streams:
            call.put(message)
        elif call.waits:
            self._begin(call, message)

    def _forget_message(self, stream_id: int) -> None:
        self.incoming.pop(stream_id, None)
        self.receiving.discard(stream_id)
        self.begun.deadlines.open.pop(stream_id, None)

    def _begin(self, call: Http2Call, message: GrpcMessage | None) -> None:
        call.begin(message)
        if self.opened.pop(call.stream_id, None) is None:  # else no message was expected yet
            call.head.method.pool.silent.heard(call)
        subjects = call.head.method.subjects
        subject = b""
        if subjects is not None and message is not None and not message.compressed:
            subject = subjects.of(message.data)
        self._run(call, subject, partial(self._serving.runs.unary, call, message))

    def _run(self, call: Http2Call, subject: bytes, run: Callable[[], object]) -> None:
        """Run the call's rpc in its turn, as a greenlet. The call fails if there are too many
        calls of its subject."""
        pool = call.head.method.pool
        turn = CallTurn((self, subject), call.place, run, subject)
        self._turns[call.stream_id] = turn
        try:
            if not pool.admission.begin(turn):
                return
        except QueueFull as ex:
            call.drop_message()
            if call.head.method.subjects is not None:
                call.head.method.subjects.refused(subject, ex)
            request = ((KEY, of_metadata(call.head.metadata)),)
            self._fail(call, grpc.StatusCode.UNAVAILABLE, ex.message, request)
            return
        if self.entered:
            self._loop.at_turns_end(partial(self._loop.enter, self._take_turn, pool, turn))
        else:
            self.entered = True
            self._loop.enter(self._take_turn, pool, turn)

    def _take_turn(self, pool: CallPool, turn: CallTurn) -> None:
        """Run a turn, and then the calls that waited for the end of the turn."""
        try:
            turn.run()
        except Exception:
            _log.exception("unexpected error in a call")
        for following in pool.admission.end(turn):
            self._loop.at_turns_end(partial(self._loop.enter, self._take_turn, pool, following))

    def ended(self, stream_id: int) -> None:
        """Handle the end of a client's sending."""
        call = self.by_stream.get(stream_id)
        if call is None or call.ended_by_us:
            return
        if call.head.method.streams:
            call.stop_reading()
            call.put_end()
        elif call.waits:
            self._begin(call, None)

    def give_credit(self, call: Http2Call, count: int) -> None:
        if call.active:
            self.begun.deadlines.extend(call.stream_id, monotonic())
            self.core.consumed(call.stream_id, count)
            self.settle()

    # --- what goes out

    def release(self) -> None:
        """Handle calls whose answers the socket has taken whole, or that cannot be sent."""
        for call in self.core.released():
            assert isinstance(call, Http2Call)
            if call.held is not None:
                call.let_go()
            if call.ended_by_us:
                self._over(call)
            else:
                call.taken()

    # --- the end

    def refuse(self, call: Http2Call, failed: FramingFailed) -> None:
        """Refuse a call's message, and so fail the call."""
        self._fail(call, _STATUSES[failed.status], failed.reason)

    def _fail(
        self, call: Http2Call, code: grpc.StatusCode, details: str, metadata: Metadata = ()
    ) -> None:
        call.answer((), status_fields(code, details, metadata))
        self._over(call)

    def expired(self, call: Http2Call) -> None:
        """Handle a call whose deadline has passed."""
        if call.ended_by_us:
            self.cancel(call)  # the client does not read the answer
        else:
            self._fail(call, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def cancel(self, call: Http2Call) -> None:
        if self.by_stream.get(call.stream_id) is call:
            self.core.reset(call.stream_id, http2.ErrorCode.CANCEL)
            self._over(call)
            self.settle()

    def reset(self, stream_id: int) -> None:
        """Handle a reset stream."""
        call = self.by_stream.get(stream_id)
        if call is not None:
            self._over(call)

    def all_over(self) -> None:
        for call in list(self.by_stream.values()):
            self._over(call)

    def _over(self, call: Http2Call) -> None:
        if self.by_stream.pop(call.stream_id, None) is None:
            return
        self._heard.discard(call.stream_id)
        if self.incoming or self.begun.deadlines.open:
            self._forget_message(call.stream_id)
        pool = call.head.method.pool
        if call.waits and self.opened.pop(call.stream_id, None) is None:
            pool.silent.heard(call)
        if pool.admission.leave(call.place, self._turns.pop(call.stream_id, None)):
            call.drop_message()
        call.end()
        if call.head.timeout_s != float("inf"):
            self._loop.deadline_over()
