"""Streams of a decoupled model on a device: no answer leaves before the device is done."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from shmserve.errors import Internal
from shmserve.executor.backend import Output, Response
from shmserve.executor.loop.response_stream import Stream
from shmserve.executor.peers.frontend_connections import FrontendConnection
from shmserve.transport.channel import Channel
from tests.cuda.test_running import NBYTES, NUMBERS, Bench, add_one

Connected = tuple[Bench, Stream, list[Any]]


@pytest.fixture
def connected(cupy: Any) -> Iterator[Connected]:
    """Yield a bench, the stream of one request, and the posted answers.

    Each posted answer comes with whether the device was busy at that time.
    """
    bench, posted = Bench(add_one), list[Any]()

    def post(event: Any) -> None:
        queues = getattr(cupy, "_queues", None)  # of the fake alone
        busy = queues is not None and any(q.operations for q in queues._queues.values())
        posted.append((event.answer, busy))

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = FrontendConnection(Channel(ours), bench.frontend)
    message = structs.replace(bench.message(bench.slot(NUMBERS)), credit=1, outputs=("OUT", "BAD"))
    yield bench, Stream(bench.workspace, post, connection, message), posted
    connection.channel.close()
    theirs.close()
    bench.close()


def cancelled(stream: Stream) -> None:
    stream.mute()
    stream.send(None, final=True)


@pytest.mark.fake_cuda
@pytest.mark.parametrize(
    "end",
    [
        lambda stream: stream.send(None, final=True),
        lambda stream: stream.send(Response(error=Internal("no")), final=True),
        lambda stream: stream.fail(Internal("no")),
        cancelled,
    ],
    ids=["ended", "error", "failed", "cancelled"],
)
def test_what_the_model_began_is_over_when_the_stream_ends(
    end: Callable[[Stream], None], connected: Connected
) -> None:
    _, stream, posted = connected
    begun = stream.begin().inputs["IN"].on_device() + 1
    end(stream)
    assert [busy for _, busy in posted] == [False]
    assert np.array_equal(begun.get(), NUMBERS + 1)


def test_slots_of_a_failed_answer_are_written_to_no_more(connected: Connected) -> None:
    bench, stream, posted = connected
    result = stream.begin().inputs["IN"].on_device() + 1
    stream.send(Response((Output("OUT", "FP32", result), Output("BAD", "FP32", object()))))
    assert posted[0][0].error_code
    slot = bench.memory.reserve(NBYTES)
    slot.view[:] = bytes(NBYTES)
    bench.devices.open().synchronize()
    assert bytes(slot.view) == bytes(NBYTES)
    bench.memory.reclaim(slot)
    stream.fail(Internal("over"))
