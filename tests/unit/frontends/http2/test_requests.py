"""Requests: from frames to events."""

import pytest

from shmserve.frontends import http2
from shmserve.frontends.http2 import frames as f
from tests.unit.frontends.http2.peer import (
    REQUEST,
    Peer,
    data,
    fields,
    headers,
    parse,
    with_request,
)


def told(events: list[object]) -> bytes:
    return b"".join(e.data for e in events if isinstance(e, http2.DataReceived))


def test_the_server_says_its_settings_first_and_acknowledges_the_clients() -> None:
    peer = Peer(handshake=False, max_streams=7, stream_window=1 << 17, connection_window=1 << 18)
    first, second = peer.take()
    assert dict(f.read_settings(first.payload)) == {3: 7, 4: 1 << 17, 5: 1 << 20, 6: 16 << 10}
    assert (second.kind, second.stream_id, second.word) == (8, 0, (1 << 18) - 65535)
    assert peer.give(http2.PREFACE, f.settings({})) == []
    assert [(x.kind, x.flags) for x in peer.take()] == [(f.SETTINGS, f.ACK)]


def test_whatever_the_splits_the_same_is_told() -> None:
    sent = b"".join(
        (
            http2.PREFACE, f.settings({4: 70000}), f.SETTINGS_ACK, headers(1, end=False),
            data(1, b"abc"), f.frame(77, 3, 1, b"unknown"), data(1, b"defg", padding=9),
            f.frame(f.PRIORITY, 0, 3, bytes(5)), data(1, b"", end=True, padding=0),
            headers(3), f.ping(b"12345678", f.ACK),
        )
    )  # fmt: skip
    for size in (1, 2, 3, 7, 10, 33, len(sent)):
        connection = http2.Connection(http2.Limits(), 0.0)
        events = []
        for start in range(0, len(sent), size):
            events += connection.receive(sent[start : start + size], 0.0)
        assert told(events) == b"abcdefg"  # type: ignore[arg-type]
        others = [e for e in events if not isinstance(e, http2.DataReceived)]
        assert [type(e) for e in others] == [http2.RequestReceived, http2.RequestReceived]
        assert [e.stream_id for e in events if getattr(e, "end_stream", False)] == [1, 3]


def test_a_request_has_its_fields() -> None:
    (event,) = Peer().ask(1, pairs=(*REQUEST, ("x-a", "1"), ("x-a", "2\xe9")))
    assert isinstance(event, http2.RequestReceived)
    head = event.head
    assert (head.method, head.scheme, head.path) == ("POST", "http", "/a.Service/Method")
    assert (head.authority, head.content_length) == ("localhost", -1)
    assert head.fields[2:] == (("x-a", "1"), ("x-a", "2\xe9"))
    assert (head.value("x-a"), head.value("nothing")) == ("1", None)


def test_payload_may_be_received_by_its_owner() -> None:
    peer = with_request(end=False)
    frame = data(1, b"0123456789", end=True)
    (event,) = peer.give(frame[:12])
    assert (bytes(event.data), event.end_stream) == (b"012", False)
    assert peer.connection.payload_due == (1, 7)
    assert peer.connection.payload_received(5, peer.now) == []
    assert peer.connection.payload_due == (1, 2)
    (event,) = peer.connection.payload_received(2, peer.now)
    assert (bytes(event.data), event.end_stream) == (b"", True)
    assert peer.connection.payload_due is None
    assert [type(e) for e in peer.ask(3)] == [http2.RequestReceived]


def test_payload_that_was_looked_at_may_be_due_again() -> None:
    peer = with_request(end=False)
    peer.give(data(1, b"0123456789", end=True)[:14])
    peer.connection.payload_returned(3)
    assert peer.connection.payload_due == (1, 8)
    (event,) = peer.connection.payload_received(8, peer.now)
    assert event.end_stream
    assert peer.connection.payload_due is None


def test_what_is_missing_ends_where_payload_begins() -> None:
    sent = b"".join(
        (
            headers(1, end=False), f.ping(b"12345678", f.ACK), data(1, b"abc"), data(1, b"de"),
            data(1, b"fg", padding=9), f.frame(77, 3, 1, b"unknown"), headers(3),
        )
    )  # fmt: skip
    peer = Peer()
    seen, position, looks = b"", 0, 0
    while position < len(sent):
        due = peer.connection.payload_due
        count = due[1] if due else peer.connection.reader.missing
        piece = sent[position : position + count]
        events = peer.give(piece)
        assert (told(events) == piece) == bool(due)  # type: ignore[arg-type]  # never payload that nobody waited for
        seen += told(events)  # type: ignore[arg-type]
        position, looks = position + count, looks + 1
    assert position == len(sent) + f.HEAD_BYTES  # the next one's head with the last
    assert seen == b"abcdefg"
    assert looks < 20
    peer.give(data(3, b"0123456789")[:12])
    assert peer.connection.reader.missing == 7


def test_padding_behind_payload_that_its_owner_received_is_left_out() -> None:
    peer = with_request(end=False)
    peer.give(data(1, b"0123", end=True, padding=3)[:11])
    assert peer.connection.payload_due == (1, 3)
    with pytest.raises(ValueError, match="3 bytes"):
        peer.connection.payload_received(4, peer.now)
    (event,) = peer.connection.payload_received(3, peer.now)
    assert event.end_stream
    assert [type(e) for e in peer.give(bytes(3), headers(3))] == [http2.RequestReceived]


def test_no_payload_is_due_for_a_stream_that_was_reset_meanwhile() -> None:
    peer = with_request(end=False)
    peer.give(data(1, b"0123456789")[:12])
    peer.connection.reset(1, http2.ErrorCode.CANCEL)
    assert peer.connection.payload_due is None
    assert peer.give(b"3456789", data(1, b"late"), headers(3))[0].stream_id == 3


def test_trailers_end_a_stream() -> None:
    peer = with_request(end=False)
    (event,) = peer.give(headers(1, (("x-checksum", "1"),)))
    assert event == http2.TrailersReceived(1, (("x-checksum", "1"),))


def test_continuation_padding_and_priority_of_headers() -> None:
    peer = Peer()
    block = fields(REQUEST)
    first = bytes((4,)) + bytes(5) + block[:10] + bytes(4)
    flags = f.PADDED | f.PRIORITY_FLAG | f.END_STREAM
    assert peer.give(f.frame(f.HEADERS, flags, 1, first)) == []
    assert peer.give(f.frame(f.CONTINUATION, 0, 1, block[10:20])) == []
    (event,) = peer.give(f.frame(f.CONTINUATION, f.END_HEADERS, 1, block[20:]))
    assert isinstance(event, http2.RequestReceived)
    assert event.end_stream


def test_blocks_are_remembered_only_while_the_table_stays() -> None:
    peer = Peer()
    newest = fields(REQUEST) + bytes((0x80 | 62,))  # ends with the table's newest entry

    def adding(value: bytes) -> bytes:
        return fields(REQUEST) + b"\x40\x03x-a\x01" + value

    def head(stream_id: int, block: bytes) -> http2.RequestFields:
        flags = f.END_HEADERS | f.END_STREAM
        (event,) = peer.give(f.frame(f.HEADERS, flags, stream_id, block))
        assert isinstance(event, http2.RequestReceived)
        return event.head

    first = head(1, adding(b"1"))
    assert head(3, newest) == first
    assert head(5, newest) is head(7, newest)
    # A block that adds an entry is decoded each time, and changes the meaning of later equal bytes
    assert head(9, adding(b"2")).value("x-a") == "2"
    assert head(11, newest).value("x-a") == "2"
    assert head(13, adding(b"2")) is not head(15, adding(b"2"))
    # A block that changes the table's size, too: an entry may be evicted
    resized = b"\x20\x3f\xe1\x1f" + fields(REQUEST)  # to 0 and back to 4096
    remembered = head(17, newest)
    assert head(19, resized) is not head(21, resized)
    assert remembered.value("x-a") == "2"
    assert peer.failure(f.frame(f.HEADERS, 5, 23, newest)) == http2.ErrorCode.COMPRESSION_ERROR


def test_the_number_of_remembered_blocks_is_bounded() -> None:
    peer = Peer(remembered_blocks=2, remembered_block_bytes=300)
    pairs = [(*REQUEST, ("x-n", str(n))) for n in range(3)]
    heads = {}
    for stream_id, n in ((1, 0), (3, 1), (5, 2), (7, 1), (9, 0)):
        (event,) = peer.ask(stream_id, pairs=pairs[n])
        assert isinstance(event, http2.RequestReceived)
        heads[stream_id] = event.head
    assert heads[3] is heads[7]
    assert heads[1] == heads[9]
    assert heads[1] is not heads[9]
    long = (*REQUEST, ("x", "y" * 300))
    (a,), (b,) = peer.ask(11, pairs=long), peer.ask(13, pairs=long)
    assert a.head is not b.head


@pytest.mark.parametrize(
    "pairs",
    [
        REQUEST[1:],
        (REQUEST[0], *REQUEST[2:]),
        (*REQUEST[:2], *REQUEST[3:]),
        (*REQUEST[:2], (":path", ""), *REQUEST[3:]),
        (*REQUEST[:2], (":path", "a"), *REQUEST[3:]),
        (REQUEST[0], *REQUEST),
        (*REQUEST, (":authority", "b")),
        ((":status", "200"), *REQUEST),
        (*REQUEST, ("Upper", "a")),
        (*REQUEST, ("", "a")),
        (*REQUEST, ("sp ace", "a")),
        (*REQUEST, ("x", "a\nb")),
        (*REQUEST, ("x", "a\0b")),
        (*REQUEST, ("x", " a\n ")),
        (*REQUEST, ("te", " gzip ")),
        (*REQUEST, ("content-length", " 1 ")),
        ((":method", "POST "), *REQUEST[1:]),
        (REQUEST[0], (":scheme", "\thttp"), *REQUEST[2:]),
        (*REQUEST[:2], (":path", "/a.Service/Method "), *REQUEST[3:]),
        (*REQUEST[:3], (":authority", " localhost"), *REQUEST[4:]),
        (*REQUEST, ("connection", "close")),
        (*REQUEST, ("transfer-encoding", "chunked")),
        (*REQUEST, ("te", "gzip")),
        (*REQUEST, ("host", "other")),
        (*REQUEST, ("content-length", "-1")),
        (*REQUEST, ("content-length", "1"), ("content-length", "2")),
        (*REQUEST, ("content-length", "1")),
        ((":method", "CONNECT"), *REQUEST[1:]),
    ],
)
def test_a_malformed_request_is_reset_alone(pairs: tuple[tuple[str, str], ...]) -> None:
    peer = Peer()
    assert peer.ask(1, pairs=pairs) == []
    assert peer.resets() == {1: http2.ErrorCode.PROTOCOL_ERROR}
    assert [type(e) for e in peer.ask(3)] == [http2.RequestReceived]


def test_blanks_at_the_ends_of_values_are_left_out() -> None:
    """RFC 9113 calls such values malformed; gRPC's clients send them, and gRPC's servers accept
    them."""
    blanks = {"te": " trailers", "content-type": "application/grpc\t", "grpc-timeout": " 1S "}
    sent = (*REQUEST[:4], *blanks.items(), ("host", "localhost "), ("x", " \ta b\t "), ("y", " "))
    peer = Peer()
    (event,) = peer.ask(1, end=False, pairs=sent)
    assert isinstance(event, http2.RequestReceived)
    assert dict(event.head.fields) == {
        "te": "trailers", "content-type": "application/grpc", "grpc-timeout": "1S",
        "host": "localhost", "x": "a b", "y": "",
    }  # fmt: skip
    assert event.head.authority == "localhost"
    (event,) = peer.give(headers(1, (("x-sum", " 1\t"),)))
    assert event == http2.TrailersReceived(1, (("x-sum", "1"),))
    (event,) = peer.ask(3, end=False, pairs=(*REQUEST, ("content-length", " 4 ")))
    assert event.head.content_length == 4


def test_connect_and_options_are_well_formed() -> None:
    peer = Peer()
    (event,) = peer.ask(1, pairs=((":method", "CONNECT"), (":authority", "a:1")))
    assert (event.head.path, event.head.authority) == ("", "a:1")
    options = ((":method", "OPTIONS"), (":scheme", "http"), (":path", "*"), ("host", "h"))
    assert peer.ask(3, pairs=options)[0].head.authority == "h"


def test_content_must_be_as_long_as_announced() -> None:
    peer = Peer()
    announced = (*REQUEST, ("content-length", "4"))
    for stream_id, pieces in ((1, (b"abcde",)), (3, (b"abc",)), (5, (b"ab", b"cd"))):
        peer.ask(stream_id, end=False, pairs=announced)
        events = peer.give(*(data(stream_id, p, p is pieces[-1]) for p in pieces))
        failed = any(isinstance(e, http2.StreamReset) for e in events)
        assert failed == (stream_id != 5)
    assert peer.resets() == {1: http2.ErrorCode.PROTOCOL_ERROR, 3: http2.ErrorCode.PROTOCOL_ERROR}
    peer.ask(7, end=False, pairs=announced)
    assert isinstance(peer.give(headers(7, ()))[0], http2.StreamReset)


def test_trailers_must_end_the_stream_and_have_no_pseudo_fields() -> None:
    for trailers in (headers(1, (("a", "b"),), end=False), headers(1, ((":path", "/"),))):
        peer = with_request(end=False)
        assert isinstance(peer.give(trailers)[0], http2.StreamReset)
        assert peer.resets() == {1: http2.ErrorCode.PROTOCOL_ERROR}


def test_cancellation_is_told_and_goaway_and_ping() -> None:
    peer = with_request()
    assert peer.give(f.rst_stream(1, 8)) == [http2.StreamReset(1, 8, True)]
    assert peer.give(f.rst_stream(1, 8), f.window_update(1, 1)) == []
    assert peer.give(f.goaway(0, 2, "bye")) == []
    assert [type(e) for e in peer.ask(3)] == [http2.RequestReceived]
    assert peer.give(f.ping(b"abcdefgh", f.ACK)) == []
    peer.give(f.ping(b"87654321"))
    assert peer.take() == [(f.PING, f.ACK, 0, b"87654321")]


def test_a_request_answered_early_is_told_so() -> None:
    peer = with_request(end=False)
    assert peer.connection.send(1, peer.now, trailers=b"\x88")
    assert [(x.kind, x.flags) for x in peer.take()] == [(1, 5), (f.RST_STREAM, 0)]
    assert not peer.connection._streams.open
    assert peer.give(data(1, b"rest", end=True)) == []


def test_parse_helper_reads_what_the_server_writes() -> None:
    assert parse(f.ping(bytes(8)) + f.rst_stream(3, 8))[1].word == 8
