"""Responses: headers, buffers and trailers into frames, within the client's windows."""

from __future__ import annotations

import hpack
import pytest

from shmserve.frontends.http2 import ErrorCode, SendQueueFull, StreamReset, encode_fields
from shmserve.frontends.http2 import frames as f
from shmserve.frontends.http2.sender import ALONE_FRAME
from tests.unit.frontends.http2.peer import Frame, Peer, parse

HEAD = encode_fields(((":status", "200"), ("content-type", "application/grpc")))
TRAILERS = encode_fields((("grpc-status", "0"),))


def payloads(frames: list[Frame]) -> list[tuple[int, int]]:
    return [(x.stream_id, len(x.payload)) for x in frames if x.kind == f.DATA]


def body(frames: list[Frame], stream_id: int = 1) -> bytes:
    return b"".join(x.payload for x in frames if (x.kind, x.stream_id) == (f.DATA, stream_id))


def test_encoded_fields_are_read_by_any_decoder_and_leave_its_table_alone() -> None:
    pairs = (
        (":status", "200"), (":status", "415"), ("content-type", "application/grpc"),
        ("grpc-status", "0"), ("grpc-message", "x" * 5000), ("via", "\xe9"), ("x-y", ""),
    )  # fmt: skip
    decoder = hpack.Decoder()
    decoded = decoder.decode(encode_fields(pairs), raw=True)
    assert [(n.decode(), v.decode("latin-1")) for n, v in decoded] == list(pairs)
    assert not decoder.header_table.dynamic_entries


def test_a_unary_response_is_three_frames_and_nobodys_copy() -> None:
    peer = Peer()
    peer.ask(1)
    buffers = [b"prefix", memoryview(b"payload")]
    assert peer.connection.send(
        1,
        peer.now,
        head=HEAD,
        data=buffers,  # type: ignore[arg-type]
        trailers=TRAILERS,
        token="slot",
    )
    out = peer.connection.outgoing(peer.now)
    assert out[1] is buffers[0]
    assert out[2] is buffers[1]
    assert peer.connection.released() == []
    frames = peer.take()
    assert [(x.kind, x.flags) for x in frames] == [(1, 4), (0, 0), (1, 5)]
    assert body(frames) == b"prefixpayload"
    assert peer.connection.released() == ["slot"]
    assert peer.connection.released() == []
    assert peer.connection.open_streams == 0
    assert not peer.connection.send(1, peer.now, head=HEAD, token="late")
    assert peer.connection.released() == ["late"]


def test_whatever_the_socket_takes_at_once_the_same_goes_out() -> None:
    content = bytes(range(256)) * 400
    for step in (1000, 1, 77, 16384, 70000):
        peer = Peer(settings={4: 1 << 20})
        peer.give(f.window_update(0, 1 << 20))
        peer.ask(1)
        peer.connection.send(
            1, peer.now, head=HEAD, data=[content[:100], content[100:]], trailers=TRAILERS, token=1
        )
        said = b""
        while buffers := peer.connection.outgoing(peer.now):
            piece = b"".join(buffers)[:step]
            assert peer.connection.released() == []
            said += piece
            peer.connection.sent(len(piece), peer.now)
            if step == 1 and len(said) > 300:
                step = 50000
        frames = parse(said)
        assert body(frames) == content
        assert max(len(x.payload) for x in frames) == 16384
        assert peer.connection.released() == [1]


def test_frames_are_as_large_as_the_client_takes() -> None:
    peer = Peer(settings={4: 1 << 24, 5: 1 << 22})
    peer.give(f.window_update(0, 1 << 24))
    peer.ask(1)
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(3 << 20)], trailers=TRAILERS)
    rest = (3 << 20) - 2 * ALONE_FRAME
    assert payloads(peer.take()) == [(1, ALONE_FRAME), (1, ALONE_FRAME), (1, rest)]


def test_a_tensor_of_a_mib_and_the_message_around_it_are_one_frame() -> None:
    peer = Peer(settings={4: 1 << 24, 5: 1 << 22})
    peer.give(f.window_update(0, 1 << 24))
    peer.ask(1)
    content = [bytes(100), bytes(1 << 20)]
    peer.connection.send(1, peer.now, head=HEAD, data=content, trailers=TRAILERS)
    assert payloads(peer.take()) == [(1, (1 << 20) + 100)]


def test_data_waits_for_the_streams_window_and_then_for_the_connections() -> None:
    peer = Peer(settings={4: 10})
    peer.ask(1)
    content = bytes(range(200)) * 400
    peer.connection.send(1, peer.now, head=HEAD, data=[content], trailers=TRAILERS, token=1)
    frames = peer.take()
    assert payloads(frames) == [(1, 10)]
    assert peer.give(f.window_update(1, 5)) == []
    frames += peer.take()
    assert body(frames) == content[:15]
    peer.give(f.window_update(1, 1 << 20))
    frames += peer.take()
    assert len(body(frames)) == 65535
    assert peer.connection.released() == []
    peer.give(f.window_update(0, 1 << 20))
    frames += peer.take()
    assert body(frames) == content
    assert frames[-1][:3] == (f.HEADERS, 5, 1)
    assert peer.connection.released() == [1]


def test_a_response_without_data_needs_no_window() -> None:
    peer = Peer(settings={4: 0})
    peer.ask(1)
    peer.ask(3)
    peer.connection.send(1, peer.now, head=HEAD, data=[b"abc"], trailers=TRAILERS)
    peer.connection.send(3, peer.now, head=HEAD, trailers=TRAILERS)
    assert [(x.kind, x.stream_id) for x in peer.take()] == [(1, 1), (1, 3), (1, 3)]


def test_new_settings_move_open_windows_even_below_zero() -> None:
    peer = Peer(settings={4: 100})
    peer.ask(1)
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(300)], trailers=TRAILERS)
    assert payloads(peer.take()) == [(1, 100)]
    peer.give(f.settings({4: 50}), f.window_update(1, 30))
    assert payloads(peer.take()) == []
    peer.give(f.settings({4: 80}))
    assert payloads(peer.take()) == [(1, 10)]
    peer.give(f.settings({4: 1000}))
    assert payloads(peer.take()) == [(1, 190)]


def test_streams_take_turns() -> None:
    peer = Peer(settings={4: 1 << 20})
    content = bytes(40000)
    for stream_id in (1, 3, 5):
        peer.ask(stream_id)
        peer.connection.send(
            stream_id, peer.now, head=HEAD, data=[content], trailers=TRAILERS, token=stream_id
        )
    assert payloads(peer.take()) == [
        (1, 16384), (3, 16384), (5, 16384), (1, 16383),
    ]  # fmt: skip
    # The connection's window is shut: waiting streams go on in turn, and no later small answer
    # overtakes them
    peer.ask(7)
    peer.connection.send(7, peer.now, head=HEAD, data=[bytes(10)], trailers=TRAILERS)
    assert payloads(peer.take()) == []
    peer.give(f.window_update(0, 40000))
    assert payloads(peer.take()) == [(1, 7233), (3, 16384), (5, 16383)]
    peer.give(f.window_update(0, 1 << 20))
    assert payloads(peer.take())[:2] == [(7, 10), (5, 7233)]
    assert sorted(peer.connection.released()) == [1, 3, 5]  # type: ignore[type-var]
    assert peer.connection.open_streams == 0


def test_a_small_response_does_not_take_the_window_that_another_waits_for() -> None:
    peer = Peer(settings={4: 1 << 20})
    peer.ask(1)
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(70000)], trailers=TRAILERS)
    peer.take()
    peer.ask(3)
    peer.give(f.window_update(0, 100))
    peer.connection.send(3, peer.now, head=HEAD, data=[bytes(60)], trailers=TRAILERS)
    assert payloads(peer.take()) == [(1, 100)]
    peer.give(f.window_update(0, 10000))
    assert sorted(payloads(peer.take())) == [(1, 4365), (3, 60)]


def test_large_frames_give_way_to_others() -> None:
    peer = Peer(settings={4: 1 << 24, 5: 1 << 22})
    peer.give(f.window_update(0, 1 << 24))
    for stream_id in (1, 3):
        peer.ask(stream_id)
        peer.connection.send(
            stream_id, peer.now, head=HEAD, data=[bytes(2 << 20)], trailers=TRAILERS
        )
    sizes = payloads(peer.take())
    assert sizes[:3] == [(1, 64 << 10), (3, 64 << 10), (1, 64 << 10)]


def test_no_more_is_framed_than_the_high_water() -> None:
    peer = Peer(settings={4: 1 << 24}, high_water_bytes=40000)
    peer.give(f.window_update(0, 1 << 24))
    peer.ask(1)
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(1 << 20)], trailers=TRAILERS)
    assert sum(map(len, peer.connection.outgoing(peer.now))) < 40000 + 16384 + 100
    peer.ask(3)
    peer.connection.send(3, peer.now, head=HEAD, data=[bytes(10)], trailers=TRAILERS)
    assert sum(map(len, peer.connection.outgoing(peer.now))) < 40000 + 16384 + 100


def test_one_sendmsg_takes_no_more_buffers_than_the_system_does() -> None:
    peer = Peer()
    peer.ask(1)
    peer.connection.send(1, peer.now, head=HEAD, data=[b"x"] * 3000, trailers=TRAILERS)
    assert len(peer.connection.outgoing(peer.now)) == 1024
    assert body(peer.take()) == b"x" * 3000


def test_messages_of_a_stream_wait_in_order_and_their_number_is_bounded() -> None:
    peer = Peer(settings={4: 0}, max_queued_sends=3)
    peer.ask(1, end=False)
    peer.connection.send(1, peer.now, head=HEAD)
    for n in range(3):
        peer.connection.send(1, peer.now, data=[bytes((n,)) * 4], token=n)
    with pytest.raises(SendQueueFull, match="3 messages"):
        peer.connection.send(1, peer.now, data=[b"four"])
    peer.give(f.window_update(1, 6))
    assert body(peer.take()) == b"\0\0\0\0\1\1"
    assert peer.connection.released() == [0]
    peer.connection.send(1, peer.now, trailers=TRAILERS)
    peer.give(f.window_update(1, 6))
    frames = peer.take()
    assert body(frames) == b"\1\1\2\2\2\2"
    assert [x.kind for x in frames] == [0, 0, 1, f.RST_STREAM]
    assert peer.connection.released() == [1, 2]


def test_a_response_is_in_order() -> None:
    peer = Peer()
    peer.ask(1)
    with pytest.raises(ValueError, match="headers, then data"):
        peer.connection.send(1, peer.now, data=[b"x"])
    peer.give(f.settings({4: 0}))
    peer.connection.send(1, peer.now, head=HEAD, data=[b"x"], trailers=TRAILERS)
    with pytest.raises(ValueError, match="headers, then data"):
        peer.connection.send(1, peer.now, trailers=TRAILERS)


@pytest.mark.parametrize("how", ["client", "server", "failure", "lost"])
def test_memory_that_waits_is_released_when_its_stream_ends(how: str) -> None:
    peer = Peer(settings={4: 8})
    for stream_id in (1, 3):
        peer.ask(stream_id)
        peer.connection.send(stream_id, peer.now, head=HEAD, data=[bytes(9)], token=stream_id)
    if how == "client":
        assert peer.give(f.rst_stream(1, 8), f.rst_stream(3, 8)) == [
            StreamReset(1, 8, True),
            StreamReset(3, 8, True),
        ]
    elif how == "server":
        peer.connection.reset(1, ErrorCode.CANCEL)
        peer.connection.reset(3, ErrorCode.CANCEL)
        peer.take()
    elif how == "failure":
        peer.give(f.window_update(0, 0))
    else:
        peer.connection.outgoing(peer.now)
        peer.connection.lost()
        assert peer.connection.finished
    assert sorted(peer.connection.released()) == [1, 3]  # type: ignore[type-var]
    peer.take()
    assert peer.connection.released() == []
    assert peer.connection.open_streams == 0


def test_memory_that_is_framed_is_kept_until_it_is_sent_or_lost() -> None:
    peer = Peer()
    peer.ask(1)
    peer.connection.send(1, peer.now, head=HEAD, data=[bytes(9)], trailers=TRAILERS, token=1)
    peer.connection.outgoing(peer.now)
    peer.connection.terminate(ErrorCode.INTERNAL_ERROR, "the end")
    assert peer.connection.released() == []
    assert not peer.connection.finished
    assert [x.kind for x in peer.take()] == [1, 0, 1, f.GOAWAY]
    assert peer.connection.released() == [1]
    assert peer.connection.finished


def test_long_header_blocks_continue() -> None:
    peer = Peer()
    peer.ask(1)
    pairs = ((":status", "200"), ("x", "y" * 40000))
    peer.connection.send(1, peer.now, head=encode_fields(pairs))
    frames = peer.take()
    assert [(x.kind, x.flags) for x in frames] == [(1, 0), (9, 0), (9, 4)]
    block = b"".join(x.payload for x in frames)
    assert hpack.Decoder().decode(block)[1][1] == "y" * 40000  # type: ignore[index]


def test_a_smaller_table_is_acknowledged_in_the_next_block_only() -> None:
    peer = Peer(settings={1: 100})
    decoder = hpack.Decoder()
    decoder.max_allowed_table_size = 100
    for stream_id in (1, 3):
        peer.ask(stream_id)
        peer.connection.send(stream_id, peer.now, head=HEAD, trailers=TRAILERS)
    blocks = [x.payload for x in peer.take()]
    assert [block[:1] == b"\x20" for block in blocks] == [True, False, False, False]
    for block in blocks:
        decoder.decode(block)


def test_memory_of_a_stream_that_ends_is_in_use_while_frames_of_it_wait() -> None:
    for end in ("reset", "lost"):
        peer = Peer(settings={4: 1 << 20})
        peer.ask(1)
        peer.connection.send(1, peer.now, head=HEAD, data=[bytes(100_000)], token=1)
        assert peer.connection.outgoing(peer.now)
        peer.connection.sent(1000, peer.now)
        if end == "reset":
            peer.give(f.frame(f.RST_STREAM, 0, 1, b"\0\0\0\x08"))
            assert peer.connection.released() == []
            peer.take()
        else:
            peer.connection.lost()
        assert peer.connection.released() == [1]
