"""Frames that real clients send beside messages never end a connection, in any number."""

from __future__ import annotations

from typing import Any

import pytest

from shmserve.frontends.http2 import ConnectionTerminated, ErrorCode, RequestReceived, encode_fields
from shmserve.frontends.http2 import frames as f
from tests.unit.frontends.http2.peer import REQUEST, Peer, data, headers

HEAD = encode_fields(((":status", "200"),))
TRAILERS = encode_fields((("grpc-status", "0"),))
MESSAGES = 10_000
NO_TIME: dict[str, Any] = {
    "control_burst": 50,
    "control_per_s": 0.0,
}  # time pays for nothing after the burst


def lives(peer: Peer) -> bool:
    """Drop the pending frames, and return whether the connection goes on."""
    peer.take()
    return not peer.connection.finished


def answer(peer: Peer, stream_id: int, size: int = 60, first: bool = False) -> None:
    head = HEAD if first else None
    assert peer.connection.send(stream_id, peer.now, head=head, data=[bytes(size)])
    peer.take()


def test_a_stream_of_grpcs_core() -> None:
    """As grpcio 1.85 was seen to do: both windows with each answer, a ping now and then."""
    peer = Peer()
    peer.ask(1, end=False)
    for n in range(MESSAGES):
        peer.give(data(1, bytes(40)))
        peer.connection.consumed(1, 40)
        answer(peer, 1, first=not n)
        updates = f.window_update(1, 60 + 9), f.window_update(0, 60)
        peer.give(*updates, f.ping(bytes(8)) if n % 300 == 0 else b"")
        assert lives(peer), n


def test_a_stream_of_grpc_go() -> None:
    """The connection's window and a ping with each answer, as for an estimate of the bandwidth."""
    peer = Peer(settings={f.INITIAL_WINDOW_SIZE: 1 << 20}, **NO_TIME)
    peer.ask(1, end=False)
    for n in range(MESSAGES):
        answer(peer, 1, first=not n)
        peer.give(f.window_update(0, 60), f.ping(b"bdp ping"))
        assert lives(peer), n


def test_many_answers_are_paid_for_however_late_they_are_read() -> None:
    peer = Peer(settings={f.INITIAL_WINDOW_SIZE: 1 << 20}, **NO_TIME)
    peer.give(f.window_update(0, 1 << 20))
    peer.ask(1)
    for n in range(MESSAGES):
        answer(peer, 1, first=not n)
    peer.give((f.window_update(1, 60) + f.window_update(0, 60)) * MESSAGES)
    assert lives(peer)


def test_requests_alone_pay_as_well() -> None:
    peer = Peer(**NO_TIME)
    peer.ask(1, end=False)
    for _ in range(1000):
        peer.give(data(1, bytes(40)), f.window_update(1, 1), f.window_update(0, 1))
        peer.connection.consumed(1, 40)
    assert lives(peer)


def test_window_updates_without_need_end_after_what_messages_paid_for() -> None:
    peer = Peer(**NO_TIME)
    peer.ask(1, end=False)
    for n in range(100):
        answer(peer, 1, first=not n)
    flood = [f.window_update(n % 2, 1) for n in range(100 * 2 + 50)]
    assert not [e for e in peer.give(*flood) if isinstance(e, ConnectionTerminated)]
    assert peer.failure(f.window_update(0, 1)) == ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("why", ["answered", "waited"])
def test_calls_that_were_given_up_pay_for_each_other(why: str) -> None:
    peer = Peer(reset_burst=5, reset_per_s=0.0, **NO_TIME)
    for stream_id in range(1, 4001, 4):
        peer.ask(stream_id, end=False)
        pairs: tuple[tuple[str, str], ...] = REQUEST
        if why == "answered":
            answer(peer, stream_id, first=True)
        else:
            peer.now += 0.06
            pairs += (("grpc-timeout", "50m"),)
        peer.give(f.rst_stream(stream_id, ErrorCode.CANCEL))
        early = stream_id + 2  # read late: request and reset arrive together
        peer.give(headers(early, pairs), f.rst_stream(early, ErrorCode.CANCEL))
    assert lives(peer)


def test_messages_on_their_way_to_a_stream_that_we_ended() -> None:
    peer = Peer(stream_window=65536, connection_window=65536, **NO_TIME)
    peer.ask(1, end=False)
    peer.give(data(1, bytes(36)))
    peer.connection.send(1, peer.now, trailers=TRAILERS)
    assert peer.give(data(1, bytes(655)) * 100) == []  # all bytes that the stream's window allowed
    assert isinstance(peer.ask(3)[0], RequestReceived)
    assert peer.failure(data(1, b"x")) == ErrorCode.FLOW_CONTROL_ERROR


def test_messages_on_their_way_to_a_refused_stream() -> None:
    peer = Peer(max_streams=1, stream_window=65536, **NO_TIME)
    peer.ask(1, end=False)
    assert peer.ask(3, end=False) == []
    assert peer.give(data(3, bytes(100)) * 655) == []
    assert peer.failure(data(3, bytes(37))) == ErrorCode.FLOW_CONTROL_ERROR


def test_frames_that_come_with_each_request() -> None:
    peer = Peer(**NO_TIME)
    for stream_id in range(1, 2001, 2):
        priority = f.frame(f.PRIORITY, 0, stream_id, bytes(5))
        peer.give(priority, headers(stream_id), f.frame(16, 0, 0, b"\0\0\0\1u=1"))
        peer.connection.send(stream_id, peer.now, head=HEAD, trailers=TRAILERS)
        peer.take()
        # the client did not know that the answer was complete
        peer.give(f.rst_stream(stream_id, ErrorCode.CANCEL))
    assert lives(peer)
