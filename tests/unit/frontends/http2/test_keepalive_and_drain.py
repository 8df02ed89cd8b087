"""Pings both ways, and leaving in good order."""

import pytest

from shmserve.frontends.http2 import ConnectionTerminated, ErrorCode, RequestReceived
from shmserve.frontends.http2 import frames as f
from tests.unit.frontends.http2.peer import Peer, data, headers, with_request

PING = f.ping(b"12345678")


def test_pings_faster_than_allowed_are_too_many() -> None:
    peer = with_request(min_ping_interval_s=10.0)
    for _ in range(5):
        assert peer.give(PING) == []
        peer.now += 10.0
    for _ in range(3):
        assert peer.give(PING) == []
    assert peer.give(PING) == [ConnectionTerminated(ErrorCode.ENHANCE_YOUR_CALM, "too_many_pings")]
    assert peer.take()[-1].payload[8:] == b"too_many_pings"


@pytest.mark.parametrize("allowed", [False, True])
def test_without_calls_there_is_less_to_ask_for(allowed: bool) -> None:
    peer = Peer(min_ping_interval_s=10.0, keepalive_without_calls=allowed)
    for _ in range(5):
        peer.give(PING)
        peer.now += 11.0
    peer.take()
    assert peer.connection.finished != allowed


def test_pings_between_answers_are_lawful() -> None:
    peer = Peer(min_ping_interval_s=10.0)
    for stream_id in range(1, 41, 2):
        peer.give(headers(stream_id), PING)
        peer.connection.send(stream_id, peer.now, trailers=b"\x88")
        peer.take()
    assert not peer.connection.finished


def test_a_silent_client_is_probed_and_then_given_up() -> None:
    peer = with_request(keepalive_s=60.0, keepalive_timeout_s=20.0)
    assert peer.connection.next_tick(peer.now) == 160.0
    assert peer.connection.tick(159.0) == []
    assert peer.connection.tick(160.0) == []
    peer.now = 165.0
    (probe,) = peer.take()
    assert (probe.kind, probe.flags) == (f.PING, 0)
    assert peer.give(f.ping(probe.payload, f.ACK)) == []
    assert peer.connection.next_tick(peer.now) == 225.0
    assert peer.connection.tick(225.0) == []
    peer.now = 225.0
    assert len(peer.take()) == 1
    assert peer.connection.tick(244.0) == []
    (ended,) = peer.connection.tick(245.0)
    assert ended == ConnectionTerminated(ErrorCode.NO_ERROR, "keepalive timeout")


def test_anything_the_client_says_answers_a_probe() -> None:
    peer = with_request(end=False, keepalive_s=60.0, keepalive_timeout_s=20.0)
    assert peer.connection.tick(160.0) == []
    peer.take()
    peer.now = 179.0
    peer.give(data(1, b"x"))
    assert peer.connection.tick(181.0) == []


def test_an_idle_connection_is_not_probed_and_waits_for_nothing() -> None:
    peer = Peer(keepalive_s=60.0)
    assert peer.connection.next_tick(peer.now) == float("inf")
    assert peer.connection.tick(10000.0) == []
    assert peer.take() == []


def test_a_drain_serves_what_was_on_its_way() -> None:
    peer = with_request()
    peer.connection.drain(peer.now, "it stops")
    peer.connection.drain(peer.now, "again")
    goaway, ping = peer.take()
    assert goaway[:3] == (f.GOAWAY, 0, 0)
    assert goaway.payload == b"\x7f\xff\xff\xff" + bytes(4) + b"it stops"
    assert isinstance(peer.ask(3)[0], RequestReceived)
    assert peer.give(f.ping(ping.payload, f.ACK)) == []
    (goaway,) = peer.take()
    assert goaway.payload == b"\0\0\0\x03" + bytes(4) + b"it stops"
    assert peer.ask(5) == []
    assert peer.resets() == {5: ErrorCode.REFUSED_STREAM}
    peer.connection.send(1, peer.now, trailers=b"\x88")
    assert peer.take()
    assert not peer.connection.finished
    peer.connection.send(3, peer.now, trailers=b"\x88")
    assert not peer.connection.finished  # frames still wait to be sent
    peer.take()
    assert peer.connection.finished


def test_a_drain_does_not_wait_for_a_client_that_answers_no_ping() -> None:
    peer = Peer(drain_ping_s=5.0)
    peer.connection.drain(peer.now, "it stops")
    peer.take()
    assert peer.connection.next_tick(peer.now) == 105.0
    assert peer.connection.tick(104.0) == []
    assert peer.take() == []
    assert not peer.connection.finished
    assert peer.connection.tick(105.0) == []
    assert [x.kind for x in peer.take()] == [f.GOAWAY]
    assert peer.connection.finished


def test_a_ping_with_the_drains_bytes_before_the_drain_is_a_ping() -> None:
    peer = Peer()
    assert peer.give(f.ping(b"draining", f.ACK)) == []
    assert not peer.connection.finished
