"""Batches of a project's model: order of runs, and requests that cannot wait."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shmserve.core.scheduling.batch_policy import BatchPolicy
from shmserve.core.scheduling.batch_queue import Waiting
from shmserve.errors import DeadlineExceeded
from shmserve.grps.executor.batcher import Batcher, _Member

LONG_NS = 60_000_000_000


class Model:
    """Model that gives a message with the request's batch, and waits while `gate` is closed."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def run(self, messages: list[Any], contexts: list[Any]) -> list[Any]:
        assert contexts == [f"of {message}" for message in messages]
        self.batches.append(messages)
        self.entered.release()
        assert self.gate.wait(30)
        return [(message, len(messages)) for message in messages]


def start(
    pool: ThreadPoolExecutor, batcher: Batcher, message: str, deadline_ns: int = 0
) -> Future[Any]:
    return pool.submit(batcher.infer, message, f"of {message}", deadline_ns)


def test_a_batch_is_never_larger_than_it_may_be_and_batches_overlap() -> None:
    model = Model()
    model.gate.clear()
    batcher = Batcher(BatchPolicy(2, frozenset((2,)), LONG_NS), model.run)
    with ThreadPoolExecutor(6) as pool:
        answers = [start(pool, batcher, f"{n}") for n in range(6)]
        for _ in range(3):  # all three run at once, without waiting
            assert model.entered.acquire(timeout=30)
        model.gate.set()
        assert [answer.result(30) for answer in answers] == [(f"{n}", 2) for n in range(6)]
    assert [len(batch) for batch in model.batches] == [2, 2, 2]


def test_one_whose_time_is_over_is_told_and_is_in_no_batch() -> None:
    model = Model()
    batcher = Batcher(BatchPolicy(2, frozenset((2,)), LONG_NS), model.run)
    with ThreadPoolExecutor(3) as pool:
        late = start(pool, batcher, "late", time.monotonic_ns() + 50_000_000)
        with pytest.raises(DeadlineExceeded, match="was not done in time"):
            late.result(30)
        assert model.batches == []
        answers = [start(pool, batcher, text) for text in "ab"]
        assert {answer.result(30) for answer in answers} == {("a", 2), ("b", 2)}


def test_one_whose_time_ends_while_it_runs_costs_the_others_nothing() -> None:
    model = Model()
    model.gate.clear()
    batcher = Batcher(BatchPolicy(2, frozenset((2,)), LONG_NS), model.run)
    with ThreadPoolExecutor(2) as pool:
        late = start(pool, batcher, "late", time.monotonic_ns() + 2_000_000_000)
        while not batcher._queue.waiting and not late.done():
            time.sleep(0.001)
        other = start(pool, batcher, "other")  # the request that completes a batch runs the batch
        with pytest.raises(DeadlineExceeded):  # while the model is at work
            late.result(30)
        model.gate.set()
        assert other.result(30) == ("other", 2)


def test_everyone_runs_the_batch_of_their_own_alone_and_no_batch_waits_for_one_who_is_late() -> (
    None
):
    batcher = Batcher(BatchPolicy(2, frozenset((2,))), lambda messages, contexts: messages)
    first, other, third = (queued(batcher, text) for text in ("first", "other", "third"))
    assert batcher._next(third, 0) == []  # the batch belongs to another request: handed on
    assert batcher._next(third, 0) == [third]
    queued(batcher, "fourth")
    assert batcher._next(other, time.monotonic_ns() + 50_000_000) == []  # the request only waits
    late = queued(batcher, "late", 1)
    assert batcher._next(late, 1) == []
    assert late.done()
    assert len(batcher._queue.waiting) == 1
    assert batcher._next(first, 0) == [first, other]


def queued(batcher: Batcher, message: str, deadline_ns: int = 0) -> _Member:
    member = _Member(message, None)
    batcher._queue.push(Waiting(id(member), member, 1, None, time.monotonic_ns(), deadline_ns))
    return member
