"""Clients that send the usual control frames are never cut off; floods are, within a bound."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.frontends.http2 import ConnectionTerminated, ErrorCode, encode_fields
from shmserve.frontends.http2 import frames as f
from tests.unit.frontends.http2.peer import REQUEST, Frame, Peer, data, headers

HEAD = encode_fields(((":status", "200"),))
TRAILERS = encode_fields((("grpc-status", "0"),))
BURST, RESETS, ROUNDS = 40, 10, 30
WINDOW = 1 << 30


@dataclass(frozen=True)
class Habits:
    """Control frames of a client's library, and the behaviour of its program.

    Attributes:
        stream_update: a WINDOW_UPDATE for the stream after each DATA frame.
        connection_update: a WINDOW_UPDATE for the connection after each DATA frame.
        ping: a PING with DATA unless a PING is unanswered.
        priority: a PRIORITY frame with each request.
        settings: new SETTINGS now and then, as the client learns the bandwidth.
        ends: how calls end: "answer" (by us), "cancel" (by the client).
    """

    stream_update: bool
    connection_update: bool
    ping: bool
    priority: bool
    settings: bool
    ends: str


@dataclass(frozen=True)
class Call:
    """One call: sizes of requests and answers, and when the client reads the answers."""

    requests: list[int]
    answers: list[int]
    reads_late: bool
    wait_s: float


HABITS = st.builds(
    Habits, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(["answer", "cancel"]),
)  # fmt: skip
SIZES = st.lists(st.integers(1, 3000), max_size=8)
CALLS = st.lists(
    st.builds(Call, SIZES, SIZES, st.booleans(), st.floats(0.01, 0.1)), min_size=1, max_size=4
)


class HonestClient:
    """Client that plays calls against the server's side of a connection and counts the earned
    control frames."""

    def __init__(self, habits: Habits) -> None:
        # Time earns almost nothing, so any control frame beyond the earned frames ends the
        # connection
        self.peer = Peer(
            settings={f.INITIAL_WINDOW_SIZE: WINDOW}, control_burst=BURST, control_per_s=1.0,
            reset_burst=RESETS, reset_per_s=0.0,
        )  # fmt: skip
        self.peer.give(f.window_update(0, WINDOW))
        self.habits = habits
        self.pinging = False
        self.stream_id = -1
        self.settings_at = self.peer.now
        self.paid = 0  # window updates earned by DATA frames and kibibytes
        self.streams = 0

    def give(self, *said: bytes) -> None:
        """Send frames, which must not end the connection."""
        ended = [e for e in self.peer.give(*said) if isinstance(e, ConnectionTerminated)]
        assert ended == []

    def read(self, frames: list[Frame]) -> None:
        """React to received frames as the client's library does."""
        habits, said = self.habits, b""
        for frame in frames:
            if frame.kind == f.PING and frame.flags & f.ACK:
                self.pinging = False
            elif frame.kind == f.DATA and frame.payload:
                size = len(frame.payload)
                self.paid += 2 + (size >> 10)
                if habits.stream_update:
                    said += f.window_update(frame.stream_id, size)
                if habits.connection_update:
                    said += f.window_update(0, size)
                if habits.ping and not self.pinging:
                    said += f.ping(b"bdp ping")
                    self.pinging = True
        self.give(said)

    def play(self, call: Call) -> None:
        peer, habits = self.peer, self.habits
        self.stream_id += 2
        self.streams += 1
        n, unread = self.stream_id, []
        self.give(
            f.frame(f.PRIORITY, 0, n, bytes(5)) if habits.priority else b"",
            headers(n, (*REQUEST, ("grpc-timeout", f"{int(call.wait_s * 1e6)}u")), end=False),
        )
        head: bytes | None = HEAD
        for size in call.requests:
            self.give(data(n, bytes(size)))
            self.paid += 2
            peer.connection.consumed(n, size)
        for size in call.answers:
            peer.connection.send(n, peer.now, head=head, data=[bytes(size)])
            head = None
            unread += peer.take()
            if not call.reads_late:
                self.read(unread)
                unread = []
        peer.now += call.wait_s
        if habits.settings and peer.now > self.settings_at + 1.0:
            self.settings_at = peer.now
            self.give(f.settings({f.INITIAL_WINDOW_SIZE: WINDOW}))
        if habits.ends == "answer":
            peer.connection.send(n, peer.now, head=head, trailers=TRAILERS)
        else:
            self.give(f.rst_stream(n, ErrorCode.CANCEL))
        self.read(unread + peer.take())


@settings(max_examples=60)
@given(HABITS, CALLS)
def test_no_mix_of_messages_is_cut_off(habits: Habits, calls: list[Call]) -> None:
    client = HonestClient(habits)
    for _ in range(ROUNDS):
        for call in calls:
            client.play(call)


FLOODS = {
    "window updates of the connection": lambda n: f.window_update(0, 1),
    "window updates of a stream": lambda n: f.window_update(n, 1),
    "settings": lambda n: f.settings({}),
    "acknowledged settings": lambda n: f.SETTINGS_ACK,
    "pings": lambda n: f.ping(bytes(8)),
    "answered pings": lambda n: f.ping(bytes(8), f.ACK),
    "empty data": lambda n: data(n, b""),
    "priority": lambda n: f.frame(f.PRIORITY, 0, n, bytes(5)),
    "unknown": lambda n: f.frame(99, 0, 0, b"x"),
    "goaway": lambda n: f.goaway(0, 0),
}


@pytest.mark.parametrize("kind", FLOODS)
@settings(max_examples=15)
@given(HABITS, CALLS)
def test_every_flood_ends(kind: str, habits: Habits, calls: list[Call]) -> None:
    client = HonestClient(habits)
    for call in calls:
        client.play(call)
    peer, n = client.peer, client.stream_id + 2
    peer.ask(n, end=False)
    allowed = BURST + 4 * (client.streams + 1)
    if kind.startswith("window"):
        allowed += client.paid
    for _ in range(allowed):
        peer.give(FLOODS[kind](n))
        peer.take()
    if not peer.connection.finished:
        assert peer.failure(FLOODS[kind](n)) == ErrorCode.ENHANCE_YOUR_CALM


@settings(max_examples=15)
@given(HABITS, CALLS)
def test_rapid_reset_ends(habits: Habits, calls: list[Call]) -> None:
    client = HonestClient(habits)
    for call in calls:
        client.play(call)
    peer, n = client.peer, client.stream_id
    for _ in range(RESETS + client.streams):
        n += 2
        peer.give(headers(n), f.rst_stream(n, ErrorCode.CANCEL))
        peer.take()
    if not peer.connection.finished:
        n += 2
        flood = headers(n) + f.rst_stream(n, ErrorCode.CANCEL)
        assert peer.failure(flood) == ErrorCode.ENHANCE_YOUR_CALM


STREAMS = 16


def abandon_all(peer: Peer, wait_s: float, timeout: str, first_id: int) -> None:
    """Open the most streams allowed, wait, and reset all."""
    pairs = (*REQUEST, ("grpc-timeout", timeout)) if timeout else REQUEST
    ids = range(first_id, first_id + 2 * STREAMS, 2)
    peer.give(*(headers(n, pairs) for n in ids))
    peer.now += wait_s
    peer.give(*(f.rst_stream(n, ErrorCode.CANCEL) for n in ids))
    peer.take()


@settings(max_examples=15)
@given(st.floats(0.0, 0.02), st.sampled_from(["", "1n", "10m", "50m", "1S", "malformed"]))
def test_waves_of_abandoned_calls_end(wait_s: float, timeout: str) -> None:
    peer = Peer(max_streams=STREAMS)
    for wave in range(400):
        abandon_all(peer, wait_s, timeout, 1 + 2 * STREAMS * wave)
    assert peer.connection.finished


@settings(max_examples=15)
@given(st.integers(50, 400), st.integers(0, 3))
def test_deadlines_of_all_calls_never_end_a_connection(timeout_ms: int, late: int) -> None:
    """Even if some calls are read together with their resets, after a delay of the server."""
    peer = Peer(max_streams=STREAMS, reset_burst=0, reset_per_s=0.0)
    for wave in range(100):
        stalled = wave % (late + 1)
        if stalled:
            abandon_all(peer, 0.0, f"{timeout_ms}m", 1 + 2 * STREAMS * wave)
        else:
            peer.now += late * timeout_ms / 1000
            abandon_all(peer, timeout_ms / 1000, f"{timeout_ms}m", 1 + 2 * STREAMS * wave)
    assert not peer.connection.finished
