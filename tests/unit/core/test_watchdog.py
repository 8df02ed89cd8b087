"""The watchdog: idle executors that answer nothing count as dead."""

from shmserve.core.control.watchdog import Verdict, Watchdog


def looks(
    watchdog: Watchdog, times: int, busy_ms: int | None = 0, rests: bool = False
) -> list[Verdict]:
    return [watchdog.looked("e", busy_ms, rests) for _ in range(times)]


def silent(watchdog: Watchdog, times: int, busy_ms: int | None = 0) -> bool:
    return Verdict.REPLACE in looks(watchdog, times, busy_ms)


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
    assert looks(watchdog, 100, busy_ms=5) == [Verdict.NOTHING] * 100
    assert not silent(watchdog, 3)


def test_one_whose_page_cannot_be_read_is_asked_and_never_replaced() -> None:
    watchdog = Watchdog(3.0)
    assert looks(watchdog, 100, busy_ms=None) == [Verdict.ASK] * 100


def test_patience_has_an_end_of_its_own() -> None:
    watchdog = Watchdog(600.0)
    assert not silent(watchdog, 20)
    assert silent(watchdog, 1)
    watchdog.gone("e")
    assert not silent(watchdog, 20)
    assert silent(watchdog, 1)


def test_patience_is_that_of_the_limit_and_has_room_for_some_questions() -> None:
    for limit_s, most in ((0.1, 2), (1.0, 2), (8.0, 8), (20.0, 20), (600.0, 20)):
        watchdog = Watchdog(limit_s)
        assert looks(watchdog, most).count(Verdict.ASK) >= 2
        assert silent(watchdog, 1)


def test_one_that_rests_is_asked_seldom() -> None:
    watchdog = Watchdog(20.0)
    asked = 0
    for _ in range(600):
        if looks(watchdog, 1, rests=True) == [Verdict.ASK]:
            asked += 1
            watchdog.answered("e")
    assert asked == 10


def test_one_that_rests_and_is_doubted_has_the_time_for_two_answers() -> None:
    watchdog = Watchdog(20.0)
    looks(watchdog, 1)
    watchdog.answered("e")
    looks(watchdog, 40, rests=True)
    doubted = looks(watchdog, 12)
    assert doubted.count(Verdict.ASK) == 2
    assert doubted[0] is Verdict.ASK  # at once, after a long silence
    assert looks(watchdog, 1) == [Verdict.REPLACE]


def test_one_that_seems_to_rest_is_found_out_at_last() -> None:
    watchdog = Watchdog(20.0)
    looks(watchdog, 1)
    watchdog.answered("e")
    assert looks(watchdog, 80, rests=True)[-1] is Verdict.REPLACE
