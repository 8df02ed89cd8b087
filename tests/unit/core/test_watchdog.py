"""Who is taken for dead: those with nothing to do that answer nothing."""

from __future__ import annotations

from shmserve.core.control.watchdog import Watchdog


def asked(watchdog: Watchdog, times: int, idle: bool = True) -> bool:
    return any([watchdog.asked("e", idle) for _ in range(times)])


def test_one_that_runs_nothing_and_answers_nothing() -> None:
    watchdog = Watchdog(3.0)
    assert not asked(watchdog, 4)
    assert asked(watchdog, 1)


def test_one_that_answers_lives() -> None:
    watchdog = Watchdog(3.0)
    for _ in range(5):
        assert not asked(watchdog, 4)
        watchdog.answered("e")


def test_one_that_runs_something_has_the_time_its_limit_gives_it() -> None:
    watchdog = Watchdog(3.0)
    assert not asked(watchdog, 100, idle=False)
    assert not asked(watchdog, 4)


def test_patience_has_an_end_of_its_own() -> None:
    watchdog = Watchdog(600.0)
    assert not asked(watchdog, 4)
    assert asked(watchdog, 1)
    watchdog.gone("e")
    assert not asked(watchdog, 4)
    assert [Watchdog(s).period_s for s in (0.1, 2.0, 8.0, 20.0, 600.0)] == [0.5, 0.5, 2.0, 5.0, 5.0]
