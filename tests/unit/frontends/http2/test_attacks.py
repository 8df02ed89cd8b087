"""Known attacks on HTTP/2 end with a clear code; similar lawful traffic goes on."""

import hpack
import pytest

from shmserve.frontends import http2
from shmserve.frontends.http2 import frames as f
from tests.unit.frontends.http2.peer import (
    CALM,
    HEAD,
    REQUEST,
    TRAILERS,
    Peer,
    data,
    fields,
    headers,
    with_request,
)


def floods(peer: Peer, frame: bytes, count: int) -> bool:
    """Whether so many of a frame end the connection, the answers being read."""
    for _ in range(count):
        peer.give(frame)
        peer.take()
        if peer.connection.finished:
            return True
    return False


@pytest.mark.parametrize(
    "frame",
    [
        f.settings({}), f.SETTINGS_ACK, f.ping(bytes(8), f.ACK), f.window_update(0, 1),
        f.frame(f.PRIORITY, 0, 1, bytes(5)), data(1, b""), f.frame(200, 0, 0, b"abc"),
        f.goaway(0, 0), f.window_update(1, 1),
    ],
)  # fmt: skip
def test_floods_of_frames_that_mean_little(frame: bytes) -> None:
    peer = with_request(end=False, control_burst=50, control_per_s=10.0)
    assert not floods(peer, frame, 45)
    peer.now += 2.0  # 20 more
    assert not floods(peer, frame, 20)
    assert floods(peer, frame, 10)
    events = Peer(control_burst=50, control_per_s=10.0).give(headers(1, end=False), frame * 51)
    assert events[-1] == http2.ConnectionTerminated(CALM, "too many control frames")


def test_a_client_that_reads_much_may_open_its_windows_often() -> None:
    peer = Peer(control_burst=50, control_per_s=0.0)
    for stream_id in range(1, 1001, 2):
        peer.ask(stream_id)
        peer.connection.send(stream_id, peer.now, head=HEAD, data=[bytes(2048)], trailers=TRAILERS)
        peer.take()
        peer.give(f.window_update(0, 2048), f.window_update(stream_id, 2048))
    assert not peer.connection.finished


def test_rapid_reset() -> None:
    peer = Peer(reset_burst=20, reset_per_s=5.0)
    for stream_id in range(1, 41, 2):
        assert len(peer.give(headers(stream_id), f.rst_stream(stream_id, 8))) == 2
    peer.now += 1.0
    for stream_id in range(41, 51, 2):
        assert len(peer.give(headers(stream_id), f.rst_stream(stream_id, 8))) == 2
    assert peer.failure(headers(51), f.rst_stream(51, 8)) == CALM


def test_calls_that_complete_pay_for_some_that_are_cancelled() -> None:
    peer = Peer(reset_burst=5, reset_per_s=0.0)
    for stream_id in range(1, 401, 4):
        peer.give(headers(stream_id), headers(stream_id + 2), f.rst_stream(stream_id + 2, 8))
        peer.connection.send(stream_id, peer.now, head=HEAD, trailers=TRAILERS)
        peer.take()
    assert not peer.connection.finished


@pytest.mark.parametrize(
    "provocation",
    [
        lambda n: headers(n, REQUEST[1:]),  # malformed
        lambda n: headers(n) + f.window_update(n, 0),
        lambda n: headers(n) + data(n, b"x"),
        lambda n: headers(n) + f.window_update(n, (1 << 31) - 1),
    ],
)
def test_making_the_server_reset_counts_as_well(provocation: object) -> None:
    peer = Peer(reset_burst=20, reset_per_s=0.0)
    for n in range(1, 41, 2):
        peer.give(provocation(n))  # type: ignore[operator]
        assert n in peer.resets()
    assert peer.failure(provocation(41)) == CALM  # type: ignore[operator]


def test_streams_beyond_the_maximum_are_refused_and_then_the_connection() -> None:
    peer = Peer(max_streams=3, reset_burst=10, reset_per_s=0.0)
    for stream_id in (1, 3, 5):
        assert isinstance(peer.ask(stream_id, end=False)[0], http2.RequestReceived)
    assert peer.ask(7, end=False) == []
    assert peer.resets() == {7: http2.ErrorCode.REFUSED_STREAM}
    assert peer.give(data(7, b"unread")) == []
    peer.connection.reset(3, http2.ErrorCode.CANCEL)
    assert isinstance(peer.ask(9)[0], http2.RequestReceived)
    for stream_id in range(11, 29, 2):
        assert peer.ask(stream_id) == []
    assert peer.failure(headers(31)) == CALM


def test_a_flood_of_continuations() -> None:
    for piece in (b"", b"\x00\x01a\x01b"):
        peer = Peer(max_continuations=5)
        peer.give(f.frame(f.HEADERS, 0, 1, b""))
        peer.give(*[f.frame(f.CONTINUATION, 0, 1, piece)] * 5)
        assert peer.failure(f.frame(f.CONTINUATION, 0, 1, piece)) == CALM


def test_a_header_block_without_end() -> None:
    peer = Peer(max_header_block_bytes=5000)
    assert peer.failure(f.frame_head(6000, f.HEADERS, 0, 1)) == CALM
    peer = Peer(max_header_block_bytes=5000)
    peer.give(f.frame(f.HEADERS, 0, 1, bytes(3000)))
    assert peer.failure(f.frame(f.CONTINUATION, 0, 1, bytes(3000))) == CALM


def test_a_list_larger_than_we_take_is_told_and_the_next_request_is_read() -> None:
    """Both lists enter the table: the next block is decoded with the right table."""
    peer = Peer(max_header_list_bytes=2000)
    encoder = hpack.Encoder()
    for stream_id, value in ((1, "y" * 2000), (3, "y" * 2000), (5, "z")):
        block = encoder.encode((*REQUEST, ("x", value)))
        (event,) = peer.give(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, stream_id, block))
        assert isinstance(event, http2.RequestReceived)
        assert event.head.value("x") == value
        assert ("at most 2000" in event.head.excess) == (stream_id < 5)
    assert peer.resets() == {}


def test_trailers_larger_than_we_take_end_their_stream_alone() -> None:
    peer = with_request(end=False, max_header_list_bytes=2000)
    peer.give(headers(1, (("x", "y" * 2000),)))
    assert peer.resets() == {1: CALM}
    assert isinstance(peer.ask(3)[0], http2.RequestReceived)


def test_header_bombs() -> None:
    # One long value in the table, named a thousand times by one byte each
    encoder = hpack.Encoder()
    bomb = encoder.encode([("x", "y" * 3000)]) + bytes((0x80 | 62,)) * 1000
    assert Peer().failure(f.frame(f.HEADERS, 4, 1, bomb)) == CALM
    # Huffman: 5 bits on the wire become one byte
    packed = hpack.Encoder().encode([("x", "e" * 50000)], huffman=True)
    assert len(packed) < 32768
    assert Peer(max_decoded_bytes=40000).failure(f.frame(f.HEADERS, 4, 1, packed)) == CALM
    # The same attack in a stream that has ended
    peer = with_request(end=False)
    peer.connection.reset(1, http2.ErrorCode.CANCEL)
    assert peer.failure(f.frame(f.HEADERS, 4, 1, bomb)) == CALM


def test_too_many_settings_in_one_frame() -> None:
    many = b"".join(f.settings({9 + n: 1})[9:] for n in range(33))
    assert Peer().failure(f.frame(f.SETTINGS, 0, 0, many)) == CALM
    assert Peer().give(f.frame(f.SETTINGS, 0, 0, many[:-6])) == []


def test_windows_too_large() -> None:
    peer = Peer()
    assert peer.failure(f.window_update(0, (1 << 31) - 1)) == http2.ErrorCode.FLOW_CONTROL_ERROR
    peer = with_request()
    (event,) = peer.give(f.window_update(1, (1 << 31) - 1))
    assert isinstance(event, http2.StreamReset)
    assert peer.resets() == {1: http2.ErrorCode.FLOW_CONTROL_ERROR}
    peer.ask(3)
    peer.give(f.window_update(3, (1 << 31) - 1 - 65535))
    assert peer.failure(f.settings({4: 65536})) == http2.ErrorCode.FLOW_CONTROL_ERROR


def test_more_data_than_the_windows() -> None:
    peer = with_request(end=False, stream_window=65535, connection_window=100000)
    peer.give(data(1, bytes(65535)))
    (event,) = peer.give(data(1, b"x"))
    assert isinstance(event, http2.StreamReset)
    assert peer.resets() == {1: http2.ErrorCode.FLOW_CONTROL_ERROR}
    for stream_id in (3, 5):
        peer.ask(stream_id, end=False)
        peer.give(data(stream_id, bytes(40000)))
    peer.ask(7, end=False)
    assert peer.failure(data(7, bytes(30000))) == http2.ErrorCode.FLOW_CONTROL_ERROR


def test_answers_to_pings_that_nobody_reads() -> None:
    peer = Peer(
        control_burst=1 << 30, max_ping_strikes=1 << 30, high_water_bytes=1000,
        max_control_bytes=1000,
    )  # fmt: skip
    events = peer.give(f.ping(bytes(8)) * 100_000)
    assert events == [http2.ConnectionTerminated(CALM, "answers are not read")]


def test_forgiveness_is_bounded() -> None:
    peer = Peer(reset_streams_remembered=2)
    for stream_id in (1, 3, 5):
        peer.ask(stream_id, end=False)
        peer.connection.reset(stream_id, http2.ErrorCode.CANCEL)
    peer.take()
    assert peer.give(data(3, b"x"), data(5, b"x")) == []
    assert peer.failure(data(1, b"x")) == http2.ErrorCode.STREAM_CLOSED


def test_streams_that_were_reset_are_not_kept_in_turn() -> None:
    peer = with_request(settings={4: 1 << 20})
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(70000)], trailers=TRAILERS)
    peer.take()
    for stream_id in range(3, 203, 2):  # the connection's window is shut by now
        peer.ask(stream_id)
        peer.connection.send(stream_id, peer.now, head=HEAD, data=[bytes(9)], trailers=TRAILERS)
        peer.take()
        peer.give(f.rst_stream(stream_id, 8))
    assert len(peer.connection._streams.blocked) == 1
    assert len(peer.connection._streams.ready) == 0


@pytest.mark.parametrize(
    "wrong", [{"stream_window": 65534}, {"connection_window": 1 << 31}, {"max_frame_bytes": 1}]
)
def test_limits_are_what_the_protocol_allows(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be between"):
        http2.Limits(**wrong)  # type: ignore[arg-type]


def test_fields_helper_writes_no_index() -> None:
    assert fields((("x", "y"),))[0] == 0x10
