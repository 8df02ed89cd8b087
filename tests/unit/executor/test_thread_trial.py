"""The trial of thread counts: which count wins, and when a trial begins."""

from collections.abc import Callable

import pytest

from shmserve.executor.backends.thread_trial import ThreadTrial, candidates


def run(trial: ThreadTrial, elements: int, runs: int, seconds: Callable[[int], float]) -> list[int]:
    """Return the counts of so many runs, each of which takes `seconds(count)`."""
    counts = []
    for _ in range(runs):
        counts.append(trial.threads(elements))
        trial.ran(elements, counts[-1], seconds(counts[-1]))
    return counts


def small(count: int) -> float:
    return 1.0 + 0.5 * count


def large(count: int) -> float:
    return 100 / count


def test_candidates_are_halves_of_the_cores() -> None:
    assert candidates(1) == (1,)
    assert candidates(2) == (2, 1)
    assert candidates(12) == (12, 6, 3, 1)


@pytest.mark.parametrize(("seconds", "best"), [(small, 1), (large, 8)])
def test_the_fastest_count_wins_after_all_had_equal_turns(seconds, best: int) -> None:
    trial = ThreadTrial(candidates(8))
    assert trial.chosen == 8
    first = run(trial, 64, 5 + 4 * 9, seconds)
    assert first[:5] == [8] * 5, "optimising runs do not count"
    assert sorted(first[5:]) == sorted([1, 2, 4, 8] * 9)
    assert trial.chosen == best
    assert run(trial, 64, 5000, seconds) == [best] * 5000


def test_of_equally_fast_counts_the_fewest_threads_win() -> None:
    trial = ThreadTrial((4, 2, 1))
    run(trial, 64, 5 + 27, lambda count: 1.0 if count > 1 else 2.0)
    assert trial.chosen == 2


def test_one_slow_run_decides_nothing() -> None:
    trial, slow = ThreadTrial((2, 1)), iter([9.0] * 4)
    run(trial, 64, 5 + 18, lambda count: next(slow, 1.0) if count == 1 else 2.0)
    assert trial.chosen == 1


def test_large_inputs_have_a_choice_of_their_own() -> None:
    trial = ThreadTrial((2, 1))
    run(trial, 1, 30, small)
    run(trial, 1 << 20, 30, large)
    assert (trial.threads(1), trial.threads(1 << 20)) == (1, 2)


def test_the_choice_is_tried_again() -> None:
    trial = ThreadTrial((2, 1))
    run(trial, 1, 5 + 18, small)
    assert trial.chosen == 1
    run(trial, 1, 5000 + 18, large)
    assert trial.chosen == 2


def test_a_fixed_count_is_no_choice() -> None:
    assert not ThreadTrial((4,)).is_open
