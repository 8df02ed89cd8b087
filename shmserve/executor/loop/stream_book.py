"""The open streams of one model instance, on the side of the thread that talks to frontends."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Container, Iterable
from typing import Generic, TypeVar

from shmserve.errors import Code, Internal, ProtocolViolation
from shmserve.executor.loop.channels import Channels
from shmserve.executor.loop.connections import FrontendConnection
from shmserve.executor.loop.serving_loop import Key
from shmserve.executor.loop.stream import Posted, Stream, StreamAbandoned
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Execute

log = logging.getLogger(__name__)

_SILENT_NS = 5_000_000_000  # a stream that says nothing for so long may have lost its sender
_COLLECT_NS = 10_000_000_000

More = TypeVar("More")  # what a loop posts to itself besides


class StreamBook(Generic[More]):
    """The streams whose final flag the model owes, and what comes from them.

    Attributes:
        streams: by request.
        outbox: what threads of the model have posted; bounded by the streams' credit.
    """

    def __init__(self, channels: Channels, workspace: Workspace) -> None:
        self.streams: dict[Key, Stream] = {}
        self.outbox: deque[Posted | StreamAbandoned | More] = deque()
        self._channels = channels
        self._workspace = workspace
        self._collected_ns = 0

    def post(self, event: Posted | StreamAbandoned | More) -> None:
        """Hand something to the loop's thread; from any thread, also from a finalizer."""
        self.outbox.append(event)
        self._channels.wake()

    # ---------------------------------------------------- the thread of the loop

    def open(self, connection: FrontendConnection, message: Execute) -> Stream | None:
        """The stream of a request that is to run; None: it may have none, and its frontend has
        been told."""
        key = (connection, message.request)
        if not message.credit:
            answer = Answer(
                message.request,
                error_code=Code.UNIMPLEMENTED,
                error="a decoupled model needs a stream",
            )
            self._channels.send(connection, answer, [])
            return None
        try:
            if key in self.streams:
                raise ProtocolViolation("a request number was used twice")
            stream = Stream(self._workspace, self.post, connection, message)
        except ProtocolViolation as ex:
            self._channels.expel(connection, str(ex))
            return None
        self.streams[key] = stream
        self._channels.stream_begun(*key)
        return stream

    def has_lost_sender(self, event: StreamAbandoned) -> None:
        """Nobody can send any more: the stream ends with an error."""
        name = event.stream.frontend.name
        log.warning("request %d of %s has no final response", event.stream.number, name)
        event.stream.fail(
            Internal("the model let go of the request without sending its final response")
        )

    def deliver(self, posted: Posted) -> None:
        """Send an answer, after which there may be no stream any more."""
        stream, answer = posted.stream, posted.answer
        key = (stream.connection, stream.number)
        wanted = self.streams.get(key) is stream and not stream.connection.closed
        if answer.final:
            self.streams.pop(key, None)
            self._channels.stream_ended(*key)
        if not wanted:
            for lease in posted.leases:
                self._workspace.memory.release(*lease)
            return
        stream.frontend.hold(posted.leases)
        self._channels.send(stream.connection, answer, posted.segments)

    def grant(self, key: Key, answers: int) -> None:
        """The frontend has consumed answers of a stream, which may have ended meanwhile."""
        stream = self.streams.get(key)
        try:
            if stream is not None:
                stream.grant(answers)
        except ProtocolViolation as ex:
            self._channels.expel(key[0], str(ex))

    def mute(self, connection: FrontendConnection) -> None:
        """It is closed: nobody wants what its streams say."""
        for (owner, _), stream in self.streams.items():
            if owner is connection:
                stream.mute()

    def quiet_since(self, others: Iterable[Stream] = (), paused: Container[Key] = ()) -> int:
        """Since when the model has not moved the stream that it has left alone longest, in
        nanoseconds, 0 if there is none; those that wait for their frontends or are
        `paused` are none. Senders that are garbage by then are collected."""
        streams = [stream for key, stream in self.streams.items() if key not in paused]
        streams.extend(others)
        since = min((s.moved_ns for s in streams if not s.waiting), default=0)
        now = time.monotonic_ns()
        if since and now - since > _SILENT_NS and now - self._collected_ns > _COLLECT_NS:
            self._collected_ns = now
            gc.collect()  # a sender in a reference cycle is not let go of by itself
        return since
