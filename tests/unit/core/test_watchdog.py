"""Who is taken for dead: those with nothing to do that answer nothing."""

from __future__ import annotations

from shmserve.core.control.watchdog import Watchdog


def silent(watchdog: Watchdog, times: int, idle: bool = True) -> bool:
    return any([watchdog.looked("e", idle) for _ in range(times)])


def test_one_that_runs_nothing_and_answers_nothing() -> None:
    watchdog = Watchdog(3.0)
    assert not silent(watchdog, 3)
    assert silent(watchdog, 1)


def test_one_that_answers_lives() -> None:
    watchdog = Watchdog(3.0)
    for _ in range(5):
        assert not silent(watchdog, 3)
        watchdog.answered("e")


def test_one_that_runs_something_has_the_time_its_limit_gives_it() -> None:
    watchdog = Watchdog(3.0)
    assert not silent(watchdog, 100, idle=False)
    assert not silent(watchdog, 3)


def test_patience_has_an_end_of_its_own() -> None:
    watchdog = Watchdog(600.0)
    assert not silent(watchdog, 20)
    assert silent(watchdog, 1)
    watchdog.gone("e")
    assert not silent(watchdog, 20)
    assert silent(watchdog, 1)


def test_patience_is_that_of_the_limit_and_has_room_for_some_questions() -> None:
    for limit_s, looks in ((0.1, 2), (1.0, 2), (8.0, 8), (20.0, 20), (600.0, 20)):
        watchdog = Watchdog(limit_s)
        assert not silent(watchdog, looks)
        assert silent(watchdog, 1)
        assert 2 * (watchdog.period_s + 1.0) <= looks  # a question waits for a look
