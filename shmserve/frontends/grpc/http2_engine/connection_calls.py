"""The calls of one connection: how they begin, are answered and end; all in the loop's turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic

import grpc

from shmserve.core.scheduling.admission import CallTurn
from shmserve.errors import QueueFull, ResourceExhausted
from shmserve.frontends.grpc.call_pools import CallPool
from shmserve.frontends.grpc.http2_engine.begun_messages import BegunMessages
from shmserve.frontends.grpc.http2_engine.call_head import (
    OK,
    CallHead,
    call_head,
    refusal,
    status_fields,
    trailers_only,
)
from shmserve.frontends.grpc.http2_engine.connected_client import ConnectedClient
from shmserve.frontends.grpc.http2_engine.http2_call import AHEAD, Http2Call
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.rpc_methods import HeldAnswer
from shmserve.frontends.http2 import (
    Buffer,
    Connection,
    DataReceived,
    ErrorCode,
    Fields,
    RequestFields,
    RequestReceived,
    encode_fields,
)
from shmserve.frontends.http2.grpc_framing import FramingFailed, GrpcMessage

_log = logging.getLogger("shmserve.grpc")

_STATUSES = {code.value[0]: code for code in grpc.StatusCode}
_OK_TRAILERS = encode_fields(OK)


class ConnectionCalls:
    """The owner of a connection's calls (`CallOwner`).

    Args:
        core: the connection's protocol.
        serving: what all connections share.
        client: the connection's.
        settle: has the connection send what there is, at this turn's end.
        resume: has it receive again, once nothing of `tensors` is waited for.

    Attributes:
        client: as above.
        by_stream: open calls.
        begun: messages that have not come entirely.
        entered: a call was run since this was last False; others wait for the turn's end.
        heard: a message has come since this was last False.
    """

    def __init__(
        self,
        core: Connection,
        serving: Serving,
        client: ConnectedClient,
        settle: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self._core = core
        self._serving = serving
        self._loop = serving.loop
        self.client = client
        self._settle = settle
        self.by_stream: dict[int, Http2Call] = {}
        self._last_head: tuple[RequestFields, CallHead | bytes] | None = None
        self.begun = BegunMessages(serving, self, resume)
        self.entered = self.heard = False
        self._heard = 0  # open calls of which a message has come

    @property
    def in_use(self) -> bool:
        """Whether there is a call of which a message has come, or comes: to have calls, and send
        nothing, is no use of a connection."""
        return bool(self._heard or self.begun.deadlines.open)

    def post(self, action: Callable[[], object]) -> None:
        self._loop.post(action)

    # --- what comes in

    def open(self, event: RequestReceived) -> Http2Call | None:
        """A stream begins; its call, unless it is refused."""
        if self._last_head is None or self._last_head[0] is not event.head:
            hosts = None if self.client.unix else self._serving.hosts
            self._last_head = (event.head, call_head(event.head, self._serving.methods, hosts))
        head, stream_id, now = self._last_head[1], event.stream_id, monotonic()
        if isinstance(head, bytes):
            self._core.send(stream_id, now, trailers=head)
            return None
        try:
            place = head.method.pool.place(self.client.number)
        except ResourceExhausted as ex:
            block = refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, ex.message)
            self._core.send(stream_id, now, trailers=block)
            return None
        call = Http2Call(self, stream_id, head, now, self._serving.settings)
        call.place = place
        self.by_stream[stream_id] = call
        if head.timeout_s != float("inf"):
            self._loop.deadline(now + head.timeout_s, call)
        if head.method.streams:
            self._run(call, b"", partial(self._serving.runs.stream, call))
        if event.end_stream:
            self.ended(stream_id)
        return call

    def expect(self, call: Http2Call) -> None:
        """The client has so long to send the call's message."""
        if call.waits:
            call.head.method.pool.silent.wait(call, call.head.method.message_timeout_s)

    def data(self, event: DataReceived, sparing: bool = False) -> int:
        """Payload. How many bytes at its end were not taken: those of a tensor that begins with
        it, if `sparing`, else none."""
        call, size = self.by_stream.get(event.stream_id), len(event.data)
        if call is None or call.reader is None:
            self._core.consumed(event.stream_id, size)
            return 0
        call.sparing = sparing
        try:
            for message in call.reader.feed(event.data):
                self.message(call, message)
            if call.reader is not None:
                if event.end_stream:
                    call.reader.finish()
                if call.reader.receiving is not None or self.begun.deadlines.open:
                    self.begun.look(call)
            elif self.begun.deadlines.open:
                self.begun.forget(call)
        except FramingFailed as failed:
            self.refuse(call, failed)
        spared = call.spared() if sparing else 0
        if call.head.method.streams:
            self._consumed(call, size - spared)
        else:
            self._core.consumed(event.stream_id, size - spared)
        if event.end_stream and (call.waits or call.head.method.streams):
            self.ended(event.stream_id)
        return spared

    def filled(self, call: Http2Call, count: int) -> None:
        """The message's next bytes are where they belong."""
        assert call.reader is not None, "it had space for them"
        try:
            message = call.reader.filled(count)
            if message is not None:
                self.message(call, message)
            if call.reader is None:
                self.begun.forget(call)
            else:
                self.begun.look(call)
        except FramingFailed as failed:
            self.refuse(call, failed)
        if call.head.method.streams:
            self._consumed(call, count)
        else:
            self._core.consumed(call.stream_id, count)

    def end_overdue(self, now: float) -> None:
        """Give up clients whose message has begun and does not come."""
        for stream_id in self.begun.deadlines.overdue(now):
            call = self.by_stream.get(stream_id)
            if call is not None:
                _log.info("cancelled a call: its message came too slowly from %s", call.peer())
                self.cancel(call)

    def message(self, call: Http2Call, message: GrpcMessage) -> None:
        """One has come entirely."""
        self.begun.expected = message.parts is not None
        self.heard = True
        if not call.heard:
            call.heard = True
            self._heard += 1
        if call.head.method.streams:
            call.put(message)
        elif call.waits:
            self._begin(call, message)

    def _begin(self, call: Http2Call, message: GrpcMessage | None) -> None:
        call.waits = False
        call.stop_reading()  # what comes after the one message does not matter
        if message is not None:
            call.tensors = message.parts
        call.head.method.pool.silent.heard(call)
        subjects = call.head.method.subjects
        subject = b""
        if subjects is not None and message is not None and not message.compressed:
            subject = subjects.of(message.data)
        self._run(call, subject, partial(self._serving.runs.unary, call, message))

    def _run(self, call: Http2Call, subject: bytes, run: Callable[[], object]) -> None:
        """Run the call's rpc in its turn, as a greenlet. If there are too many calls of its
        subject, the call fails."""
        assert call.place is not None, "it has been given one"
        pool = call.head.method.pool
        call.turn = turn = CallTurn((self, subject), call.place, run, subject)
        try:
            if not pool.admission.begin(turn):
                return
        except QueueFull as ex:
            call.turn = None
            call.drop_message()
            if call.head.method.subjects is not None:
                call.head.method.subjects.refused(subject, ex)
            self._fail(call, grpc.StatusCode.UNAVAILABLE, ex.message)
            return
        if self.entered:
            self._loop.at_turns_end(partial(self._loop.enter, self._take_turn, pool, turn))
        else:
            self.entered = True
            self._loop.enter(self._take_turn, pool, turn)

    def _take_turn(self, pool: CallPool, turn: CallTurn) -> None:
        """Run a turn, and have the calls run that waited for its end."""
        try:
            turn.run()
        except Exception:
            _log.exception("unexpected error in a call")
        for following in pool.admission.end(turn):
            self._loop.at_turns_end(partial(self._loop.enter, self._take_turn, pool, following))

    def ended(self, stream_id: int) -> None:
        """The client has sent all."""
        call = self.by_stream.get(stream_id)
        if call is None or call.ended_by_us:
            return
        if call.head.method.streams:
            call.stop_reading()
            call.put_end()
        elif call.waits:
            self._begin(call, None)

    def _consumed(self, call: Http2Call, count: int) -> None:
        """The client may send as much again, unless its stream has enough in wait."""
        if call.queued < AHEAD:
            self._core.consumed(call.stream_id, count)
            return
        call.withheld += count

    def give_credit(self, call: Http2Call) -> None:
        count, call.withheld = call.withheld, 0
        if count and call.is_active():
            self._core.consumed(call.stream_id, count)
            self._settle()

    # --- what goes out

    def send(
        self,
        call: Http2Call,
        data: Sequence[Buffer],
        trailers: Fields | None,
        held: HeldAnswer | None = None,
    ) -> None:
        if self.by_stream.get(call.stream_id) is not call or call.ended_by_us:
            if held is not None:
                held.close()
            return
        call.held = held
        head = block = None
        if not call.head_sent and (data or trailers is None):
            runs = self._serving.runs
            head = runs.plain if runs.compression == "none" else runs.head(call)
        if trailers is not None:
            call.ended_by_us = True
            if call.reader is not None:
                call.stop_reading()
            if head is None and not call.head_sent:
                block = trailers_only(trailers)
            else:
                block = _OK_TRAILERS if trailers is OK else encode_fields(trailers)
        call.head_sent = True
        self._core.send(
            call.stream_id, monotonic(), head=head, data=data, trailers=block, token=call
        )
        self._settle()

    def release(self) -> None:
        """See to calls whose answers are with the client's system, or never will be."""
        for call in self._core.released():
            assert isinstance(call, Http2Call)
            if call.held is not None:
                call.let_go()
            if call.ended_by_us:
                self._over(call)
            else:
                call.taken()

    # --- the end

    def refuse(self, call: Http2Call, failed: FramingFailed) -> None:
        """What it sends is not taken."""
        self._fail(call, _STATUSES[failed.status], failed.reason)

    def _fail(self, call: Http2Call, code: grpc.StatusCode, details: str) -> None:
        self.send(call, (), status_fields(code, details))
        self._over(call)

    def expired(self, call: Http2Call) -> None:
        """Its deadline has passed."""
        if call.ended_by_us:
            self.cancel(call)  # the answer is not being read
        else:
            self._fail(call, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def cancel(self, call: Http2Call) -> None:
        if self.by_stream.get(call.stream_id) is call:
            self._core.reset(call.stream_id, ErrorCode.CANCEL)
            self._over(call)
            self._settle()

    def reset(self, stream_id: int) -> None:
        """Its stream is gone."""
        call = self.by_stream.get(stream_id)
        if call is not None:
            self._over(call)

    def all_over(self) -> None:
        for call in list(self.by_stream.values()):
            self._over(call)

    def _over(self, call: Http2Call) -> None:
        if self.by_stream.pop(call.stream_id, None) is None:
            return
        self._heard -= call.heard
        if self.begun.deadlines.open:
            self.begun.forget(call)
        pool = call.head.method.pool
        if call.waits:
            call.waits = False
            pool.silent.heard(call)
        assert call.place is not None, "it has been given one"
        if pool.admission.leave(call.place, call.turn):
            call.drop_message()
        call.turn = None  # which has the call among its arguments
        call.end()
        if call.head.timeout_s != float("inf"):
            self._loop.deadline_over()
