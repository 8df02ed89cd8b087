"""Protocol errors of clients, and the code of each."""

from __future__ import annotations

import hpack
import pytest

from shmserve.frontends.http2 import PREFACE, ErrorCode, RequestReceived, StreamReset
from shmserve.frontends.http2 import frames as f
from tests.unit.frontends.http2.peer import REQUEST, Peer, data, headers


@pytest.mark.parametrize("second", [data(1, b"x"), headers(1, (("a", "b"),))])
def test_a_half_closed_stream_takes_nothing(second: bytes) -> None:
    peer = Peer()
    peer.ask(1)
    (event,) = peer.give(second)
    assert event == StreamReset(1, ErrorCode.STREAM_CLOSED, False, event.reason)
    assert peer.resets() == {1: ErrorCode.STREAM_CLOSED}


def test_a_lower_stream_identifier_is_closed() -> None:
    peer = Peer()
    peer.ask(5)
    assert peer.failure(headers(3)) == ErrorCode.STREAM_CLOSED


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (headers(2), ErrorCode.PROTOCOL_ERROR),
        (headers(0), ErrorCode.PROTOCOL_ERROR),
        (data(0, b"a"), ErrorCode.PROTOCOL_ERROR),
        (data(1, b"a"), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.DATA, f.PADDED, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (headers(1, end=False) + f.frame(f.DATA, 8, 1, b"\x04abc"), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.HEADERS, f.PADDED | 4, 1, b"\x09abc"), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.HEADERS, f.PRIORITY_FLAG | 4, 1, b"abc"), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (f.frame(f.HEADERS, 4, 1, b"\xfe"), ErrorCode.COMPRESSION_ERROR),
        (f.frame(f.HEADERS, 4, 1, b"\x20\x20\x20\x82"), ErrorCode.COMPRESSION_ERROR),
        (f.frame(f.HEADERS, 0, 1, b"") + f.ping(bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.HEADERS, 0, 1, b"") + data(1, b""), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.HEADERS, 0, 1, b"") + f.frame(9, 4, 3, b""), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.HEADERS, 0, 1, b"") + f.frame(99, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.CONTINUATION, 4, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.PRIORITY, 0, 1, bytes(4)), ErrorCode.FRAME_SIZE_ERROR),
        (f.frame(f.PRIORITY, 0, 0, bytes(5)), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.RST_STREAM, 0, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.RST_STREAM, 0, 0, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (headers(1) + f.frame(f.RST_STREAM, 0, 1, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (f.frame(f.SETTINGS, 0, 1, b""), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.SETTINGS, 0, 0, bytes(5)), ErrorCode.FRAME_SIZE_ERROR),
        (f.frame(f.SETTINGS, f.ACK, 0, bytes(6)), ErrorCode.FRAME_SIZE_ERROR),
        (f.settings({2: 2}), ErrorCode.PROTOCOL_ERROR),
        (f.settings({4: 1 << 31}), ErrorCode.FLOW_CONTROL_ERROR),
        (f.settings({5: 16383}), ErrorCode.PROTOCOL_ERROR),
        (f.settings({5: 1 << 24}), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.PUSH_PROMISE, 4, 1, bytes(4)), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (f.frame(f.PING, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.GOAWAY, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (f.frame(f.GOAWAY, 0, 1, bytes(8)), ErrorCode.PROTOCOL_ERROR),
        (f.frame(f.WINDOW_UPDATE, 0, 0, bytes(3)), ErrorCode.FRAME_SIZE_ERROR),
        (f.window_update(0, 0), ErrorCode.PROTOCOL_ERROR),
        (f.window_update(1, 1), ErrorCode.PROTOCOL_ERROR),
        (f.frame_head((1 << 20) + 1, f.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
    ],
)
def test_what_breaks_the_protocol_ends_the_connection(sent: bytes, code: ErrorCode) -> None:
    peer = Peer()
    assert peer.failure(sent) == code
    assert peer.give(headers(101)) == []
    assert peer.take() == []


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n", PREFACE + headers(1), PREFACE + f.SETTINGS_ACK]
)
def test_a_connection_begins_with_preface_and_settings(sent: bytes) -> None:
    assert Peer(handshake=False).failure(sent) == ErrorCode.PROTOCOL_ERROR


def test_data_after_an_ended_stream_ends_the_connection() -> None:
    peer = Peer()
    peer.ask(1)
    peer.connection.send(1, peer.now, trailers=b"\x88")
    assert [x.kind for x in peer.take()] == [f.HEADERS]
    assert peer.failure(data(1, b"x")) == ErrorCode.STREAM_CLOSED


def test_frames_of_a_stream_that_we_reset_are_forgiven() -> None:
    peer = Peer()
    encoder = hpack.Encoder()
    peer.ask(1, end=False)
    peer.connection.reset(1, ErrorCode.CANCEL)
    block = encoder.encode([("x-a", "1")])  # trailers that change the table count nevertheless
    late = f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, 1, block)
    assert peer.give(data(1, b"abc"), late, f.window_update(1, 5), f.rst_stream(1, 8)) == []
    block = encoder.encode([*REQUEST, ("x-a", "1")])
    (event,) = peer.give(f.frame(f.HEADERS, f.END_HEADERS, 3, block))
    assert event.head.value("x-a") == "1"


def test_a_message_after_the_clients_own_reset_is_forgiven() -> None:
    """grpc-java sends such a message if a deadline passes while the message waits to be
    written."""
    peer = Peer(stream_window=1 << 16)
    peer.ask(1, end=False)
    (reset, asked) = peer.give(f.rst_stream(1, 8), headers(3), data(1, b"abc"))
    assert (type(reset), type(asked)) == (StreamReset, RequestReceived)
    assert peer.failure(data(1, bytes((1 << 16) - 2))) == ErrorCode.FLOW_CONTROL_ERROR


def test_a_reset_of_an_ended_request_is_the_last_of_its_stream() -> None:
    peer = Peer()
    peer.ask(1)
    assert peer.failure(f.rst_stream(1, 8) + data(1, b"abc")) == ErrorCode.STREAM_CLOSED
