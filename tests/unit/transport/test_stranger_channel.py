"""Channels to strangers: descriptors refused, or taken and closed elsewhere."""

import array
import os
import socket
from collections.abc import Iterator

import pytest

from shmserve.errors import ProtocolViolation
from shmserve.transport.channel import message_buffer
from shmserve.transport.deferred_close import DeferredClose
from shmserve.transport.stranger_channel import StrangerChannel, pass_descriptors
from tests.stray_descriptors import lingering, pass_on


class Closer(DeferredClose):
    busy = stuck = False


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def test_a_message_with_more_descriptors_than_wanted(ends) -> None:
    ours, theirs = ends
    channel = StrangerChannel(ours, message_buffer(), DeferredClose())
    with lingering(3) as strays:
        pass_on(theirs, b"message", strays)
        data, fds = channel.receive_next()
        assert (bytes(data), len(fds)) == (b"message", 3)
        DeferredClose().close(fds)
        channel.close()


def test_while_descriptors_wait_to_be_closed_none_are_taken(ends) -> None:
    ours, theirs = ends
    closer = Closer()
    channel = StrangerChannel(ours, message_buffer(), closer)
    closer.busy = True
    with lingering(1) as strays:
        theirs.send(b"plain")
        assert bytes(channel.receive_next()[0]) == b"plain"
        assert channel.receive_next() is None
        pass_on(theirs, b"message", strays)
        assert channel.receive_next() is None
        closer.stuck = True
        with pytest.raises(ProtocolViolation):
            channel.receive_next()
        channel.close()


@pytest.mark.needs("passrights")
def test_descriptors_can_be_refused(ends) -> None:
    ours, theirs = ends
    pass_descriptors(ours, False)
    channel = StrangerChannel(ours, message_buffer(), DeferredClose())
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
    assert channel.room == 0
    with pytest.raises(PermissionError):
        theirs.sendmsg([b"x"], rights)
    channel.pass_descriptors()
    theirs.sendmsg([b"x"], rights)
    _, fds = channel.receive_next()
    os.close(fds[0])
    channel.close()
