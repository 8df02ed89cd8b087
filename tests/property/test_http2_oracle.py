"""The server core and the `h2` library understand each other, for any events in any order."""

from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmserve.frontends.http2 import (
    Connection,
    ConnectionTerminated,
    DataReceived,
    ErrorCode,
    Limits,
    RequestReceived,
    StreamReset,
    TrailersReceived,
    encode_fields,
)

HEAD = encode_fields(((":status", "200"), ("content-type", "application/grpc")))
TRAILERS = encode_fields((("grpc-status", "0"), ("x-long", "v" * 300)))
REQUEST = [
    (":method", "POST"), (":scheme", "http"), (":path", "/S/M"), (":authority", "a"),
    ("te", "trailers"),
]  # fmt: skip
METADATA = st.lists(
    st.tuples(st.sampled_from(["x-a", "x-b", "grpc-timeout"]), st.text("ab1", max_size=5)),
    max_size=3,
)
NOW = 50.0
CONTENT = bytes(range(251)) * 800


class Call:
    """State of one stream on both sides."""

    def __init__(self, pairs: list[tuple[str, str]], length: int | None) -> None:
        self.pairs = pairs
        self.left = length  # of the announced content
        self.asked = b""  # DATA the client has sent
        self.client_done = False  # the client has half-closed the stream
        self.client_gone = False  # the client may not use the stream any more
        self.heard = b""  # DATA the server was told
        self.ended = False
        self.opened = False
        self.server_gone = False  # reset or completed, from the server's view
        self.held = 0
        self.head_sent = False
        self.answer = b""
        self.complete = False
        self.got = b""
        self.got_end = False
        self.was_reset = False


class Oracle(RuleBasedStateMachine):
    @initialize(
        window=st.sampled_from([65535, 70000, 1 << 20]),
        frame=st.sampled_from([16384, 20000]),
        theirs=st.sampled_from([0, 1, 500, 65535, 1 << 20]),
        table=st.sampled_from([0, 100, 4096]),
    )
    def connect(self, window: int, frame: int, theirs: int, table: int) -> None:
        limits = Limits(
            stream_window=window, connection_window=window + 1000, max_frame_bytes=frame,
            max_streams=5, control_burst=1 << 30, reset_burst=1 << 30, max_queued_sends=4,
            max_ping_strikes=1 << 30, high_water_bytes=30000,
        )  # fmt: skip
        self.server = Connection(limits, NOW)
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.client = h2.connection.H2Connection(config)
        codes = h2.settings.SettingCodes
        self.client.local_settings = h2.settings.Settings(
            client=True, initial_values={codes.INITIAL_WINDOW_SIZE: theirs, codes.ENABLE_PUSH: 0}
        )
        self.client.initiate_connection()
        self.client.update_settings({codes.HEADER_TABLE_SIZE: table})
        self.calls: dict[int, Call] = {}
        self.to_server = bytearray()
        self.tokens: dict[int, int] = {}  # token to times released
        self.arrived = bytearray()  # incomplete frames at the client
        self.acks: list[tuple[int, int]] = []  # data that the client has received and not consumed
        self.pings = 0
        # SETTINGS; h2 tells values of several frames apart only one frame at a time
        self.unacknowledged = 2

    def pick(self, random: Any, **wanted: bool) -> int:
        """Return a stream with the given flags, or 0."""
        found = [
            n for n, c in self.calls.items() if all(getattr(c, k) == v for k, v in wanted.items())
        ]
        return random.choice(found) if found else 0

    # --- the client

    @rule(
        metadata=METADATA,
        end=st.booleans(),
        length=st.none() | st.integers(0, 30000),
        priority=st.booleans(),
    )
    def open(
        self, metadata: list[tuple[str, str]], end: bool, length: int | None, priority: bool
    ) -> None:
        if self.client.open_outbound_streams >= self.client.remote_settings.max_concurrent_streams:
            return
        stream_id = self.client.get_next_available_stream_id()
        pairs = [*REQUEST, *metadata]
        end = end and not length
        if length is not None:
            pairs.append(("content-length", str(length)))
        extra: dict[str, Any] = {"priority_weight": 7} if priority else {}
        self.client.send_headers(stream_id, pairs, end_stream=end, **extra)
        call = self.calls[stream_id] = Call(pairs, length)
        call.client_done = end

    @rule(
        pick=st.randoms(use_true_random=False),
        size=st.integers(0, 40000),
        pad=st.none() | st.integers(0, 255),
        end=st.booleans(),
    )
    def ask(self, pick: Any, size: int, pad: int | None, end: bool) -> None:
        stream_id = self.pick(pick, client_done=False, client_gone=False)
        if not stream_id:
            return
        call = self.calls[stream_id]
        room = min(
            self.client.local_flow_control_window(stream_id) - (0 if pad is None else pad + 1),
            self.client.max_outbound_frame_size - (0 if pad is None else pad + 1),
        )
        size = min(size, room, size if call.left is None else call.left)
        if size < 0:
            return
        end = end and call.left in (None, size)
        piece = CONTENT[len(call.asked) % 251 :][:size]
        self.client.send_data(stream_id, piece, end_stream=end, pad_length=pad)
        call.asked += piece
        call.client_done = end
        if call.left is not None:
            call.left -= size

    @rule(pick=st.randoms(use_true_random=False))
    def trail(self, pick: Any) -> None:
        stream_id = self.pick(pick, client_done=False, client_gone=False)
        if not stream_id:
            return
        call = self.calls[stream_id]
        if call.left:
            return
        self.client.send_headers(stream_id, [("x-sum", "1")], end_stream=True)
        call.client_done = True

    @rule(pick=st.randoms(use_true_random=False))
    def cancel(self, pick: Any) -> None:
        stream_id = self.pick(pick, client_gone=False)
        if not stream_id:
            return
        call = self.calls[stream_id]
        if call.got_end and call.client_done:
            return
        self.client.reset_stream(stream_id, 8)
        call.client_gone = call.was_reset = True

    @rule(
        window=st.sampled_from([0, 10, 1000, 65535, 1 << 20]), frame=st.sampled_from([16384, 50000])
    )
    def configure(self, window: int, frame: int) -> None:
        if self.unacknowledged:
            return
        self.unacknowledged = 1
        codes = h2.settings.SettingCodes
        self.client.update_settings(
            {codes.INITIAL_WINDOW_SIZE: window, codes.MAX_FRAME_SIZE: frame}
        )

    @rule()
    def ping(self) -> None:
        self.client.ping(b"pingpong")
        self.pings += 1

    @rule(count=st.integers(1, 5))
    def read(self, count: int) -> None:
        """Consume received data at the client, which opens the windows."""
        for _ in range(min(count, len(self.acks))):
            stream_id, size = self.acks.pop(0)
            self.client.acknowledge_received_data(size, stream_id)

    @rule(stream=st.booleans(), increment=st.integers(1, 50000))
    def widen(self, stream: bool, increment: int) -> None:
        open_ids = [n for n, c in self.calls.items() if not c.client_gone and not c.got_end]
        if stream and not open_ids:
            return
        self.client.increment_flow_control_window(increment, open_ids[-1] if stream else None)

    # --- the wire

    @rule(step=st.integers(1, 30000), into=st.booleans())
    def deliver(self, step: int, into: bool) -> None:
        """Pass bytes to the server in pieces. With `into`, payload goes directly to its place."""
        self.to_server += self.client.data_to_send()
        piece = bytes(self.to_server[:step])
        del self.to_server[:step]
        while piece:
            due = self.server.payload_due
            if into and due is not None:
                stream_id, size = due
                taken = piece[:size]
                piece = piece[size:]
                self.calls[stream_id].heard += taken
                self.calls[stream_id].held += len(taken)
                self.tell(self.server.payload_received(len(taken), NOW))
            else:
                self.tell(self.server.receive(piece, NOW))
                piece = b""

    def tell(self, events: list[Any]) -> None:
        for event in events:
            assert not isinstance(event, ConnectionTerminated), event
            if isinstance(event, RequestReceived):
                call = self.calls[event.stream_id]
                head = event.head
                pseudo = [
                    (":method", head.method), (":scheme", head.scheme), (":path", head.path),
                    (":authority", head.authority),
                ]  # fmt: skip
                assert [*pseudo, *head.fields] == call.pairs
                call.opened, call.ended = True, event.end_stream
            elif isinstance(event, DataReceived):
                call = self.calls[event.stream_id]
                call.heard += event.data
                call.held += len(event.data)
                call.ended = event.end_stream
            elif isinstance(event, TrailersReceived):
                assert event.fields == (("x-sum", "1"),)
                self.calls[event.stream_id].ended = True
            elif isinstance(event, StreamReset):
                assert event.by_client, event
                self.calls[event.stream_id].server_gone = True

    @rule(step=st.integers(1, 40000))
    def flush(self, step: int) -> None:
        """Pass as many bytes to the client as its socket takes."""
        buffers = self.server.outgoing(NOW)
        piece = b"".join(buffers)[:step]
        self.server.sent(len(piece), NOW)
        self.arrived += piece
        # One frame at a time: h2 checks all frames of one call against the frame size from before
        # the SETTINGS among them.
        while len(self.arrived) >= (whole := 9 + int.from_bytes(self.arrived[:3])):
            for event in self.client.receive_data(bytes(self.arrived[:whole])):
                self.see(event)
            del self.arrived[:whole]
        for token in self.server.released():
            self.tokens[token] += 1  # type: ignore[index]

    def see(self, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            self.calls[event.stream_id].got += event.data
            if event.flow_controlled_length:
                self.acks.append((event.stream_id, event.flow_controlled_length))
        elif isinstance(event, h2.events.StreamEnded):
            self.calls[event.stream_id].got_end = True
        elif isinstance(event, h2.events.StreamReset):
            call = self.calls[event.stream_id]
            call.client_gone = True
            call.was_reset = not call.got_end
        elif isinstance(event, h2.events.SettingsAcknowledged):
            self.unacknowledged -= 1
        elif isinstance(event, h2.events.PingAckReceived):
            assert event.ping_data == b"pingpong"
            self.pings -= 1

    # --- the server

    @rule(
        pick=st.randoms(use_true_random=False),
        sizes=st.lists(st.integers(0, 50000), max_size=3),
        end=st.booleans(),
    )
    def answer(self, pick: Any, sizes: list[int], end: bool) -> None:
        stream_id = self.pick(pick, opened=True, server_gone=False, complete=False)
        if not stream_id:
            return
        call = self.calls[stream_id]
        queued = self.server._streams.open[stream_id].queue
        if queued and len(queued) >= 4:
            return
        pieces = [memoryview(CONTENT)[:size] for size in sizes]
        token = len(self.tokens)
        self.tokens[token] = 0
        sent = self.server.send(
            stream_id,
            NOW,
            head=None if call.head_sent else HEAD,
            data=pieces,
            trailers=TRAILERS if end else None,
            token=token,
        )
        assert sent
        call.head_sent = True
        call.complete = end
        call.answer += b"".join(pieces)

    @rule(pick=st.randoms(use_true_random=False), part=st.floats(0, 1))
    def consume(self, pick: Any, part: float) -> None:
        stream_id = self.pick(pick, opened=True)
        if not stream_id:
            return
        call = self.calls[stream_id]
        if stream_id in self.server._streams.open:
            count = int(call.held * part)
            call.held -= count
            self.server.consumed(stream_id, count)

    @rule(pick=st.randoms(use_true_random=False))
    def refuse(self, pick: Any) -> None:
        stream_id = self.pick(pick, opened=True, server_gone=False)
        if not stream_id:
            return
        call = self.calls[stream_id]
        if stream_id in self.server._streams.open:
            self.server.reset(stream_id, ErrorCode.CANCEL)
            call.server_gone = call.was_reset = True

    # --- invariants

    @invariant()
    def nothing_is_invented(self) -> None:
        for call in getattr(self, "calls", {}).values():
            assert call.asked.startswith(call.heard)
            assert call.answer.startswith(call.got)

    def teardown(self) -> None:
        """With everything read and answered, everything has arrived."""
        if not hasattr(self, "server"):
            return
        for _ in range(200):
            self.deliver(1 << 30, False)
            for stream_id, call in self.calls.items():
                if stream_id in self.server._streams.open:
                    self.server.consumed(stream_id, call.held)
                    call.held = 0
                    if not call.client_done and not call.client_gone and call.left:
                        self.client.reset_stream(stream_id, 8)
                        call.client_gone = call.was_reset = True
                    elif not call.client_done and not call.client_gone:
                        self.client.end_stream(stream_id)
                        call.client_done = True
                    elif call.ended and not call.complete and not call.server_gone:
                        head = None if call.head_sent else HEAD
                        queue = self.server._streams.open[stream_id].queue
                        if not queue or len(queue) < 4:
                            call.complete = self.server.send(
                                stream_id, NOW, head=head, trailers=TRAILERS
                            )
            self.flush(1 << 30)
            self.read(1 << 30)
            for stream_id, call in self.calls.items():
                if not call.client_gone and not call.got_end:
                    window = self.client.remote_flow_control_window(stream_id)
                    if window < 100000:
                        self.client.increment_flow_control_window(100000 - window, stream_id)
        assert not self.server._streams.open
        assert not self.server._streams.sending
        assert self.pings == 0
        assert all(times == 1 for times in self.tokens.values())
        for call in self.calls.values():
            if not call.was_reset and not call.server_gone:
                assert call.got_end
                assert call.got == call.answer
                assert not call.ended or call.heard == call.asked


TestOracle = Oracle.TestCase
TestOracle.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
