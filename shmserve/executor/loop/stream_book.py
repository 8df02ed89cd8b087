"""Stream book: the open streams of one model instance, for the thread that has the channels. The
model's threads may only call `post`."""

from __future__ import annotations

import gc
import logging
import time
from collections import deque
from collections.abc import Collection

from msgspec import Struct, field

from shmserve.errors import Code, Internal, ProtocolViolation
from shmserve.executor.loop.response_stream import Posted, Stream, StreamAbandoned
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.loop.runner import Key
from shmserve.executor.peers.channels import Channels
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Answer, Execute, Timing

log = logging.getLogger(__name__)

_SILENT_NS = 5_000_000_000  # after this silence, the sender may be lost
_COLLECT_NS = 10_000_000_000


class StreamBook(Struct, eq=False):
    """Streams without a final answer yet, and answers on their way to frontends.

    Attributes:
        streams: open streams, by request.
        running: streams whose request runs now; some may have ended already.
        paused: streams whose request waits to run again; some may have ended already.
        ended: number of streams that have ended.
        outbox: messages from threads of the model; bounded by the streams' credit.
    """

    _channels: Channels
    _workspace: Workspace
    _statistics: RunStatistics
    _max_streams: int
    _counts_runs: bool
    streams: dict[Key, Stream] = {}
    running: dict[Key, Stream] = {}
    paused: dict[Key, Stream] = {}
    ended: int = 0
    outbox: deque[Posted | StreamAbandoned] = field(default_factory=deque)
    _counted: int = 0  # requests of the current run, once the run is counted
    _collected_ns: int = 0

    def post(self, event: Posted | StreamAbandoned) -> None:
        """Hand an answer to the loop; from any thread, also from a finalizer."""
        self.outbox.append(event)
        self._channels.wake()

    @property
    def has_room(self) -> bool:
        """True if the model may be given another stream. Paused streams take no room."""
        return self.count_with(()) < self._max_streams

    def count_with(self, running: Collection[Key]) -> int:
        """Return the number of open streams plus running requests. A request without an open
        stream counts until the model has returned from it. A paused stream does not count."""
        streams = self.streams
        paused = sum(key in streams for key in self.paused)
        return len(streams) - paused + sum(key not in streams for key in running)

    def open(self, connection: FrontendConnection, message: Execute) -> Stream | None:
        """Open the stream of a request that is to run. Return None if the connection has closed,
        or after refusing the request."""
        key = connection, message.request
        if connection.closed:
            return None
        if not message.credit:
            text = "a decoupled model needs a stream"
            answer = Answer(message.request, error_code=Code.UNIMPLEMENTED, error=text)
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

    def violated(self, key: Key, error: ProtocolViolation) -> None:
        """Close a stream and the frontend's channel, because the request broke the protocol."""
        self.streams.pop(key, None)
        self._channels.expel(key[0], str(error))

    def deliver(self) -> None:
        """Send all posted answers. Final answers close their streams."""
        while self.outbox:
            event = self.outbox.popleft()
            if isinstance(event, Posted):
                self._deliver(event)
            else:
                self._has_lost_sender(event)

    def _deliver(self, posted: Posted) -> None:
        stream, answer = posted.stream, posted.answer
        key = stream.connection, stream.number
        is_open = self.streams.get(key) is stream
        self._count(key, posted)
        if answer.final:
            self.streams.pop(key, None)
            self._channels.stream_ended(*key)
        if is_open and not stream.connection.closed:
            stream.frontend.hold(posted.leases)
            self._channels.send(stream.connection, answer, posted.segments)
        else:
            for lease in posted.leases:
                self._workspace.memory.release(*lease)

    def _count(self, key: Key, posted: Posted) -> None:
        """Count an answer before it is sent, so that clients who have the answer find it
        counted."""
        stream, answer, spent = posted.stream, posted.answer, posted.stream.spent
        if not answer.error_code and key in self.running:
            self.count_run()
        self._statistics.answered(spent, answer)
        if not answer.final or key not in self.streams:
            return
        self.ended += 1
        if answer.error_code:
            return
        if self._counts_runs:
            self._statistics.finished(Timing(spent.queue_ns, 0, spent.infer_ns, spent.output_ns))
        else:
            self._statistics.streamed(spent, stream.message)

    def count_run(self, infer_ns: int = 0, is_over: bool = False) -> None:
        """Count a run of a model with sequences: before the first answer of the run is sent, and
        again with the duration when the run is over."""
        if not self._counts_runs:
            return
        runs = 0 if self._counted else 1
        if not self._counted:
            self._counted = sum(not stream.has_failed for stream in self.running.values())
        if self._counted:
            self._statistics.iterated(self._counted, Timing(infer=infer_ns), runs)
        if is_over:
            self._counted = 0

    def _has_lost_sender(self, event: StreamAbandoned) -> None:
        """End a stream with an error, because no sender is left for the final answer."""
        name = event.stream.frontend.name
        log.warning("request %d of %s has no final response", event.stream.number, name)
        event.stream.fail(
            Internal("the model let go of the request without sending its final response")
        )

    def grant(self, key: Key, answers: int) -> None:
        """Give credit back to a stream for consumed answers. The stream may have ended
        meanwhile."""
        stream = self.streams.get(key)
        try:
            if stream is not None:
                stream.grant(answers)
        except ProtocolViolation as ex:
            self._channels.expel(key[0], str(ex))

    def mute(self, key: Key) -> None:
        """Send no further answer of a cancelled stream, if the stream is open."""
        stream = self.streams.get(key)
        if stream is not None:
            stream.mute()

    def mute_all(self, connection: FrontendConnection) -> None:
        """Send no further answers on a connection that has closed."""
        for (owner, _), stream in self.streams.items():
            if owner is connection:
                stream.mute()

    def quiet_since(self) -> int:
        """Return the time of the last progress of the stream that has been still for longest, in
        nanoseconds (CLOCK_MONOTONIC); 0 if no stream counts. Streams that are paused or wait
        for their frontends do not count. After long silence, collect lost senders in reference
        cycles."""
        streams = [stream for key, stream in self.streams.items() if key not in self.paused]
        streams.extend(self.running.values())
        since = min((s.moved_ns for s in streams if not s.waiting), default=0)
        now = time.monotonic_ns()
        if since and now - since > _SILENT_NS and now - self._collected_ns > _COLLECT_NS:
            self._collected_ns = now
            gc.collect()  # frees senders in reference cycles
        return since
