"""Flow control of data from the client."""

import pytest

from shmserve.frontends.http2 import ErrorCode, RequestReceived
from shmserve.frontends.http2 import frames as f
from tests.unit.frontends.http2.peer import TRAILERS, Peer, data, with_request


def test_consumed_data_opens_the_clients_windows_again() -> None:
    peer = with_request(end=False, stream_window=65536, connection_window=131072)
    peer.give(data(1, bytes(40000)))
    peer.connection.consumed(1, 30000)
    assert peer.take() == []
    peer.connection.consumed(1, 5000)
    (update,) = peer.take()
    assert (update.kind, update.stream_id, update.word) == (f.WINDOW_UPDATE, 1, 35000)
    with pytest.raises(ValueError, match="5000 bytes, not 5001"):
        peer.connection.consumed(1, 5001)
    peer.give(data(1, bytes(31000)))
    peer.connection.consumed(1, 31000)  # 66000 of the connection's
    assert {x.stream_id: x.word for x in peer.take()} == {0: 66000}
    assert peer.give(data(1, bytes(60000), end=True))


def test_padding_counts_and_is_consumed_by_itself() -> None:
    peer = with_request(end=False, stream_window=65536, connection_window=65536)
    for _ in range(129):
        peer.give(data(1, b"", padding=255))
    assert {x.stream_id for x in peer.take()} == {0, 1}


def test_what_a_stream_held_is_given_back_when_it_ends() -> None:
    peer = Peer(stream_window=65536, connection_window=65536)
    for stream_id in range(1, 21, 2):
        peer.ask(stream_id, end=False)
        assert peer.give(data(stream_id, bytes(60000)))
        peer.connection.send(stream_id, peer.now, trailers=TRAILERS)
        # consumed bytes of an ended stream: nothing happens
        peer.connection.consumed(stream_id, 60000)
    assert isinstance(peer.ask(21)[0], RequestReceived)


def test_data_of_dropped_streams_opens_the_connections_window() -> None:
    peer = Peer(stream_window=65536, connection_window=65536)
    for stream_id in range(1, 21, 2):
        peer.ask(stream_id, end=False)
        peer.connection.reset(stream_id, ErrorCode.CANCEL)
        assert peer.give(data(stream_id, bytes(30000))) == []
    assert sum(x.word for x in peer.take() if x.kind == f.WINDOW_UPDATE) >= 200000
