"""Channels over real Unix sockets."""

import os
import socket
import threading

import pytest

from shmserve.errors import DeadlineExceeded, PeerDied, ProtocolViolation, TooLarge
from shmserve.transport.channel import MAX_FDS, MAX_MESSAGE, Channel, accept, listen
from tests.no_descriptors import no_descriptors
from tests.running_server import open_fds

Pair = tuple[Channel, Channel]


@pytest.fixture
def pair():
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channels = Channel(left), Channel(right)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_keep_their_borders(pair: Pair) -> None:
    pair[0].send(b"one")
    pair[0].send(b"two" * 1000)
    assert bytes(pair[1].receive()[0]) == b"one"
    assert bytes(pair[1].receive()[0]) == b"two" * 1000
    assert pair[1].receive_within(0.0) is None


@pytest.mark.parametrize("limit_s", [1e-9, 9e-7, -1.0])
def test_a_limit_below_a_microsecond_is_one(limit_s: float) -> None:
    """The kernel takes 0 for no limit."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(right)
    left.send(b"x")  # without the limit, too, the test ends
    assert channel.receive_within(limit_s) is not None
    kept = right.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
    assert kept != bytes(16)
    assert channel.receive_within(limit_s) is None
    channel.close()
    left.close()


def test_fds_ride_along_and_are_not_inherited(pair: Pair) -> None:
    read, write = os.pipe()
    pair[0].send(b"x", [read, write])
    os.close(read)
    os.close(write)
    _, fds = pair[1].receive()
    assert len(fds) == 2
    assert not any(os.get_inheritable(fd) for fd in fds)
    os.write(fds[1], b"hi")
    assert os.read(fds[0], 2) == b"hi"
    for fd in fds:
        os.close(fd)


def test_the_largest_message_passes_and_one_more_byte_does_not(pair: Pair) -> None:
    pair[0].send(b"x" * MAX_MESSAGE)
    assert len(pair[1].receive()[0]) == MAX_MESSAGE
    with pytest.raises(TooLarge):
        pair[0].send(b"x" * (MAX_MESSAGE + 1))


def test_an_overlong_message_of_a_peer_is_refused() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(right)
    left.send(b"x" * (MAX_MESSAGE + 1))
    with pytest.raises(ProtocolViolation):
        channel.receive()
    left.close()
    channel.close()


def test_too_many_fds_are_refused_and_none_leaks(pair: Pair) -> None:
    read, write = os.pipe()
    before = open_fds(os.getpid())
    pair[0].send(b"x", [read] * (MAX_FDS + 2))
    with pytest.raises(ProtocolViolation):
        pair[1].receive()
    assert open_fds(os.getpid()) == before
    os.close(read)
    os.close(write)


def test_waiting_has_a_deadline(pair: Pair) -> None:
    with pytest.raises(DeadlineExceeded):
        pair[0].receive(0.05)
    threading.Timer(0.05, pair[1].send, [b"late"]).start()
    assert bytes(pair[0].receive(30.0)[0]) == b"late"


def test_who_does_not_want_to_wait_is_told_that_there_is_no_room(pair: Pair) -> None:
    sent = 0
    while pair[0].send(b"x" * MAX_MESSAGE, wait=False):
        sent += 1
    assert sent > 0
    pair[1].receive()
    assert pair[0].send(b"x", wait=False)
    pair[1].close()
    with pytest.raises(PeerDied):
        pair[0].send(b"x", wait=False)


def test_channels_may_share_what_they_receive_into() -> None:
    buffer = memoryview(bytearray(1000))
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    channels = [Channel(right, buffer) for _, right in pairs]
    for (left, _), text in zip(pairs, (b"one", b"two"), strict=True):
        left.send(text)
    for channel, text in zip(channels, (b"one", b"two"), strict=True):
        received = channel.receive_within()
        assert bytes(received[0]) == text
    assert bytes(buffer[:3]) == b"two"
    pairs[0][0].send(b"x" * 1001)
    with pytest.raises(ProtocolViolation):
        channels[0].receive_within()
    for left, right in pairs:
        left.close()
        right.close()


def test_descriptors_that_nobody_gets_are_closed_as_was_said() -> None:
    closed: list[int] = []
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = Channel(right, memoryview(bytearray(10)), closed.extend)
    read, write = os.pipe()
    Channel(left).send(b"x" * 11, [read])
    with pytest.raises(ProtocolViolation):
        channel.receive()
    assert len(closed) == 1
    for fd in (*closed, read, write):
        os.close(fd)
    left.close()
    channel.close()


def test_the_last_words_of_who_left_messages_unread_are_heard(pair: Pair) -> None:
    pair[0].send(b"never read")
    pair[1].send(b"last words")
    pair[1].close()
    assert bytes(pair[0].receive()[0]) == b"last words"
    with pytest.raises(PeerDied):
        pair[0].receive()


def test_death_is_noticed_by_both_ways(pair: Pair) -> None:
    pair[1].close()
    with pytest.raises(PeerDied):
        pair[0].receive()
    with pytest.raises(PeerDied):
        pair[0].send(b"x")


def test_connect_and_accept_know_who_is_there(tmp_path) -> None:
    path = str(tmp_path / "s")
    listener = listen(path)
    assert accept(listener) is None
    client = Channel.connect(path)
    server = accept(listener)
    assert server.peer_pid == os.getpid()
    assert server.peer_uid == os.getuid()
    assert os.stat(path).st_mode & 0o777 == 0o600
    for thing in (client, server, listener):
        thing.close()
    with pytest.raises(PeerDied):
        Channel.connect(path)
    listen(path).close()  # replaces the stale file


def test_a_path_too_long_for_a_socket_is_told(tmp_path) -> None:
    with pytest.raises(OSError, match="too long"):
        listen(str(tmp_path / ("x" * 120)))


def test_a_peer_that_cannot_be_called_for_want_of_a_descriptor_is_as_good_as_dead(tmp_path) -> None:
    path = str(tmp_path / "x.sock")
    with listen(path):
        with no_descriptors(), pytest.raises(PeerDied):
            Channel.connect(path)
        Channel.connect(path).close()
