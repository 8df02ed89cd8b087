"""Return of output slots to their executor, without anybody waiting."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from shmserve.dispatch.pool.executor_connection import ExecutorConnection
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.errors import PeerDied
from shmserve.executor.backend import Request, Response
from tests.unit.dispatch.test_dispatch import into_offer, run, slots_in_use, until
from tests.unit.rig import Rig

ONES = np.ones(16 * 1024, np.float32)  # 64 KiB
LARGE = np.ones(1 << 20, np.float32)


def held(rig: Rig) -> int:
    """Return the number of output slots that the executor cannot use."""
    return len(rig.executors[0].memory.rows("slots"))


def test_requests_are_admitted_while_a_flush_waits_for_its_connection(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = rig.serve(into_offer)
    run(rig, entry, ONES)
    pool = rig.dispatcher.executors.pools["x0"]
    flush = ExecutorPool.flush
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)  # of the maintenance thread
    waiting, gate = threading.Event(), threading.Event()
    connect = ExecutorPool._connect

    def slow(self: ExecutorPool) -> ExecutorConnection:
        waiting.set()
        assert gate.wait(60)
        return connect(self)

    monkeypatch.setattr(ExecutorPool, "_connect", slow)
    run(rig, entry, ONES)  # whose output is to be released
    flushing = threading.Thread(target=flush, args=(pool,))
    flushing.start()
    assert waiting.wait(30), "there was nothing to flush"
    asking = threading.Thread(target=run, args=(rig, entry, ONES))
    asking.start()
    asking.join(30)
    admitted = not asking.is_alive()
    gate.set()
    for thread in (asking, flushing):
        thread.join(30)
    assert admitted


def test_small_outputs_are_released_with_the_next_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)
    entry = rig.serve(into_offer)
    connections: list[Any] = []
    connect = ExecutorPool._connect
    monkeypatch.setattr(
        ExecutorPool, "_connect", lambda self: connections.append(1) or connect(self)
    )
    for _ in range(5):
        run(rig, entry, ONES)
    assert held(rig) == 1  # that of the last one
    assert len(connections) == 1


def test_large_outputs_are_released_at_once_without_another_connection(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExecutorPool, "flush", lambda self: None)
    entry = rig.serve(into_offer)
    run(rig, entry, ONES)

    def refuse(self: ExecutorPool) -> ExecutorConnection:
        raise PeerDied("no further connection")

    monkeypatch.setattr(ExecutorPool, "_connect", refuse)
    run(rig, entry, LARGE)
    until(lambda: held(rig) == 0, "the output was not released")


def test_news_of_freed_slots_may_come_ahead_of_an_answer(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        slot = call.reserve(LARGE.nbytes)
        slot.view[:] = LARGE.data.cast("B")
        call.add_input("IN", "FP32", LARGE.shape, slot)
        call.execute()
        kept.clear()
        gc.collect()  # closing the call releases the output, which makes the executor tell
    until(lambda: held(rig) == 0, "the output was not released")
    assert len(run(rig, entry, np.ones(3, np.float32))) == 3
    until(lambda: slots_in_use(rig) == 0, "the input that was let go did not come back")
