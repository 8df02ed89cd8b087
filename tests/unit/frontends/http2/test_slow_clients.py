"""Clients that let the server wait, in every way."""

import pytest

from shmserve.frontends import http2
from shmserve.frontends.http2 import frames as f
from tests.unit.frontends.http2.peer import CALM, HEAD, TRAILERS, Peer, data, headers, with_request


@pytest.mark.parametrize("opened", [0, 10])
def test_a_window_that_opens_by_bytes_does_not_hold_memory_for_ever(opened: int) -> None:
    peer = with_request(settings={4: 0}, send_stall_s=30.0, min_progress_bytes=1000)
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(9000)], trailers=TRAILERS, token=1)
    for _ in range(29):
        peer.now += 1.0
        if opened:
            peer.give(f.window_update(1, opened))
        peer.take()
        assert peer.connection.tick(peer.now) == []
    assert peer.connection.next_tick(peer.now) == peer.now + 1.0
    peer.now += 1.0
    (event,) = peer.connection.tick(peer.now)
    assert event == http2.StreamReset(1, CALM, False, "the response is not read")
    assert peer.resets() == {1: CALM}
    assert peer.connection.released() == [1]


def test_a_slow_reader_that_goes_on_is_waited_for() -> None:
    peer = with_request(settings={4: 0}, send_stall_s=30.0, min_progress_bytes=1000)
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(9000)], trailers=TRAILERS)
    for _ in range(9):
        peer.now += 25.0
        peer.give(f.window_update(1, 1000))
        peer.take()
        assert peer.connection.tick(peer.now) == []
    assert not peer.connection._streams.open


def test_a_client_that_does_not_read_its_socket() -> None:
    peer = with_request(send_stall_s=30.0)
    peer.now += 1000.0  # time without anything to read does not count
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(9000)], trailers=TRAILERS)
    peer.connection.outgoing(peer.now)
    assert peer.connection.tick(peer.now + 29.0) == []
    assert peer.connection.next_tick(peer.now) == peer.now + 30.0
    (event,) = peer.connection.tick(peer.now + 30.0)
    assert event == http2.ConnectionTerminated(http2.ErrorCode.NO_ERROR, "nothing is read")


def test_a_client_that_reads_its_socket_byte_by_byte() -> None:
    peer = with_request(send_stall_s=30.0, min_progress_bytes=1000)
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(9000)], trailers=TRAILERS, token=1)
    peer.connection.outgoing(peer.now)
    for taken in (1000, *[30] * 28):
        peer.now += 1.0
        peer.connection.sent(taken, peer.now)
        assert peer.connection.tick(peer.now) == []
    assert isinstance(peer.connection.tick(peer.now + 2.0)[0], http2.ConnectionTerminated)


def test_a_preface_or_settings_that_never_come() -> None:
    for sent in (b"", http2.PREFACE[:5], http2.PREFACE + f.settings({})):
        peer = Peer(handshake=False, settings_timeout_s=10.0)
        peer.give(sent)
        assert peer.connection.next_tick(peer.now) == 110.0
        assert peer.connection.tick(109.0) == []
        (event,) = peer.connection.tick(110.0)
        assert event.code == http2.ErrorCode.SETTINGS_TIMEOUT


@pytest.mark.parametrize("frames", [0, 1])
def test_headers_that_drip(frames: int) -> None:
    peer = Peer(header_timeout_s=10.0)
    if frames:
        peer.give(f.frame(f.HEADERS, 0, 1, b""))
    drops = headers(1)[:6] if not frames else f.frame(f.CONTINUATION, 0, 1, b"\x82") * 6
    size = len(drops) // 6
    for n in range(6):
        assert peer.give(drops[n * size : (n + 1) * size]) == []
        assert peer.connection.tick(peer.now) == []
        peer.now += 1.6
    assert peer.connection.next_tick(peer.now) == 110.0
    peer.now = 110.0
    (event,) = peer.connection.tick(peer.now)
    assert event.code == CALM


def test_payload_that_stops() -> None:
    peer = with_request(end=False, frame_stall_s=30.0)
    peer.give(data(1, bytes(100))[:50])
    peer.now += 29.0
    peer.connection.payload_received(5, peer.now)
    assert peer.connection.tick(peer.now + 29.0) == []
    assert peer.connection.next_tick(peer.now) == peer.now + 30.0
    assert isinstance(peer.connection.tick(peer.now + 30.0)[0], http2.ConnectionTerminated)


def test_a_busy_connection_whose_reads_end_within_frames_is_not_slow() -> None:
    peer = Peer(header_timeout_s=10.0)
    ping = f.frame(f.PRIORITY, 0, 1, bytes(5))
    peer.give(ping[:3])
    for _ in range(20):
        peer.now += 1.0
        peer.give(ping[3:], ping[:3])
        assert peer.connection.tick(peer.now) == []
