"""Return of output slots to their executor, without anybody waiting."""

from __future__ import annotations

import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shmserve.core.registry import Snapshot
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.pool.executor_connection import ExecutorConnection
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.errors import ExecutorLost, NoExecutor, PeerDied, TooLarge
from shmserve.executor.backend import Request, Response
from shmserve.transport import channel
from tests.unit.dispatch.test_dispatch import into_offer, run, slots_in_use, until
from tests.unit.rig import Rig, feed

ONES = np.ones(16 * 1024, np.float32)  # 64 KiB
LARGE = np.ones(1 << 20, np.float32)


def held(rig: Rig) -> int:
    """Return the number of output slots that the executor cannot use."""
    return len(rig.executors[0].memory.rows("slots"))


def test_requests_are_admitted_while_a_flush_waits_for_its_connection(rig, monkeypatch) -> None:
    flush = ExecutorPool.flush
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)  # of the maintenance thread
    entry = rig.serve(into_offer)
    run(rig, entry, ONES)
    pool = rig.dispatcher.executors.pools["x0"]
    waiting, gate = threading.Event(), threading.Event()
    connect = ExecutorPool._connect

    def slow(self: ExecutorPool) -> ExecutorConnection:
        waiting.set()
        assert gate.wait(60)
        return connect(self)

    monkeypatch.setattr(ExecutorPool, "_connect", slow)
    run(rig, entry, ONES)  # whose output is to be released
    with ThreadPoolExecutor() as threads:
        flushed = threads.submit(flush, pool)
        assert waiting.wait(30), "there was nothing to flush"
        threads.submit(run, rig, entry, ONES).result(30)
        gate.set()
        flushed.result(30)


def test_small_outputs_are_released_with_the_next_request(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)
    entry = rig.serve(into_offer)
    connections: list[Any] = []
    connect = ExecutorPool._connect
    monkeypatch.setattr(
        ExecutorPool, "_connect", lambda self: connections.append(1) or connect(self)
    )
    for _ in range(5):
        run(rig, entry, ONES)
    assert held(rig) == 1  # of the last request
    assert len(connections) == 1


def test_a_release_outlives_a_connection_that_the_executor_could_not_take(rig, monkeypatch) -> None:
    entry = rig.serve(into_offer)
    accept = channel.accept

    def refuse(listener: socket.socket) -> None:
        monkeypatch.setattr(channel, "accept", accept)
        listener.accept()[0].close()

    with rig.dispatcher.call(entry) as call:
        feed(call, ONES)
        call.execute()
        pool = rig.dispatcher.executors.pools["x0"]
        busy = pool.acquire()  # as if another request were under way
        monkeypatch.setattr(channel, "accept", refuse)
        with pytest.raises((ExecutorLost, NoExecutor)):
            run(rig, entry, ONES)
    run(rig, entry, ONES)
    pool.give(busy)
    until(lambda: held(rig) == 0, "an output was not released")


def test_an_executor_with_a_living_connection_has_not_ended(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)
    run(rig, rig.serve(into_offer), ONES)
    pool = rig.dispatcher.executors.pools["x0"]
    ours, theirs = socket.socketpair()
    theirs.close()
    pool._control = ExecutorConnection(channel.Channel(ours))
    assert not pool.over


def test_an_executor_has_not_ended_while_it_is_told_of_releases(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)
    send, seen = ExecutorPool._send_pending, []

    def looking(self: ExecutorPool, connection: channel.Channel) -> None:
        seen.append(self.over)
        send(self, connection)

    monkeypatch.setattr(ExecutorPool, "_send_pending", looking)
    run(rig, rig.serve(into_offer), LARGE)
    assert seen == [False]


def test_a_request_that_is_too_long_frees_no_output_of_others(rig: Rig) -> None:
    entry = rig.serve(into_offer)
    with rig.dispatcher.call(entry) as call:
        feed(call, ONES)
        call.execute()
        with rig.dispatcher.call(entry, RunOptions(request_id="x" * 200_000)) as long:
            feed(long, LARGE)
            with pytest.raises(TooLarge):
                long.execute()
        time.sleep(0.1)  # for the executor to see a closed connection
        assert held(rig) == 1
    assert len(run(rig, entry, LARGE)) == len(LARGE)


def test_large_outputs_are_released_at_once_without_another_connection(rig, monkeypatch) -> None:
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)
    entry = rig.serve(into_offer)
    run(rig, entry, ONES)

    def refuse(self: ExecutorPool) -> ExecutorConnection:
        raise PeerDied("no further connection")

    monkeypatch.setattr(ExecutorPool, "_connect", refuse)
    run(rig, entry, LARGE)
    until(lambda: held(rig) == 0, "the output was not released")


def test_news_of_freed_slots_may_come_ahead_of_an_answer(rig: Rig, monkeypatch) -> None:
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)
    kept: list[Any] = []

    def keeper(request: Request) -> Response:
        array = request.inputs["IN"].numpy()
        if array.size == ONES.size:
            kept.append(array[1:])
        return into_offer(request)

    entry = rig.serve(keeper)
    run(rig, entry, ONES)
    assert slots_in_use(rig) == 1
    with rig.dispatcher.call(entry) as call:
        feed(call, LARGE)
        call.execute()
        kept.clear()
        gc.collect()  # closing the call releases the output, which makes the executor tell
    until(lambda: held(rig) == 0, "the output was not released")
    assert len(run(rig, entry, np.ones(3, np.float32))) == 3
    until(lambda: slots_in_use(rig) == 0, "the input that was let go did not come back")


def test_outputs_stay_with_their_reader_when_the_executor_is_set_aside(rig: Rig) -> None:
    """The executor lives on for a while, and would use the slots again."""
    entry = rig.serve(into_offer)
    executors = rig.dispatcher.executors
    with rig.dispatcher.call(entry) as call:
        feed(call, ONES)
        call.execute()
        pool = executors.pools["x0"]
        rig.models.clear()
        rig.writer.publish(Snapshot("cafe0123", 0, models={}, complete=True))
        for _ in range(2):  # sets the pool aside, then looks again
            executors.prune()
        until(lambda: "x0" not in executors.pools, "the maintenance thread was first, and slow")
        assert not pool.over
        time.sleep(0.2)  # for the executor to see a closed connection
        assert held(rig) == 1
        run(rig, entry, ONES)  # as the next step of an earlier run
        assert executors.pools["x0"] is pool, "one pool for one executor"
    rig.executors.pop(0).close()
    until(lambda: pool.over, "its end is not noticed")
