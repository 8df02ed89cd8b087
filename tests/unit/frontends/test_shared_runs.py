"""Shared runs: results, errors and ends of callers."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmserve.errors import Unavailable
from shmserve.frontends import shared_runs
from shmserve.frontends.shared_runs import SharedRuns
from tests.running_server import wait_until


class Work:
    """Work whose runs take until `go_on`."""

    def __init__(self) -> None:
        self.runs = 0
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.error: BaseException | None = None

    def __call__(self) -> int:
        self.runs += 1
        number, error = self.runs, self.error
        self.begun.release()
        assert self.go_on.acquire(timeout=60)
        if error is not None:
            raise error
        return number


def callers(shared: SharedRuns[int], threads: ThreadPoolExecutor, count: int) -> Callable[[], list]:
    """Start callers that wait; return a function for their results or errors."""
    futures = [threads.submit(shared.result) for _ in range(count)]
    wait_until(lambda: len(shared._waiting) == count, "they wait")
    return lambda: [future.exception(60) or future.result() for future in futures]


def test_callers_during_a_run_share_the_next_run() -> None:
    work = Work()
    shared = SharedRuns(work)
    with ThreadPoolExecutor(20) as threads:
        first = threads.submit(shared.result)
        assert work.begun.acquire(timeout=60)
        others = callers(shared, threads, 10)
        work.go_on.release(2)
        assert first.result(60) == 1
        assert others() == [2] * 10
        work.go_on.release()
        assert shared.result() == 3


def test_an_error_is_the_error_of_all_who_share_the_run() -> None:
    work = Work()
    shared = SharedRuns(work)
    with ThreadPoolExecutor(20) as threads:
        first = threads.submit(shared.result)
        assert work.begun.acquire(timeout=60)
        others = callers(shared, threads, 3)
        work.error = Unavailable("away")
        work.go_on.release(2)
        assert first.result(60) == 1
        assert {str(error) for error in others()} == {"away"}
        work.error = None
        work.go_on.release()
        assert shared.result() == 3


def test_the_end_of_a_caller_is_not_the_end_of_the_others() -> None:
    work = Work()
    work.error = SystemExit()
    shared = SharedRuns(work)
    with ThreadPoolExecutor(20) as threads:
        first = threads.submit(shared.result)
        assert work.begun.acquire(timeout=60)
        others = callers(shared, threads, 3)
        work.error = None
        work.go_on.release(2)
        assert isinstance(first.exception(60), SystemExit)
        assert others() == [2] * 3


def test_a_caller_that_has_left_is_not_the_next_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_runs, "_PATIENCE_S", 0.01)
    ends = [True, False]

    def work() -> int:
        shared._leave(leaving)
        if ends.pop(0):
            raise SystemExit
        return 5

    shared = SharedRuns(work)
    leaving = shared_runs._Waiter[int]()
    shared._runs, shared._waiting = True, [leaving]
    with pytest.raises(SystemExit):
        shared._lead()
    assert shared.result() == 5


def test_who_waits_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_runs, "_PATIENCE_S", 0.01)
    work = Work()
    shared = SharedRuns(work)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(shared.result)
        assert work.begun.acquire(timeout=60)
        with pytest.raises(Unavailable, match="overloaded"):
            shared.result()
        work.go_on.release(2)
        assert first.result(60) == 1
        assert shared.result() == 2
