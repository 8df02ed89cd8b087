"""Looks at the repository: when they come, and which changes they settle."""

from math import inf

import pytest

from shmserve.coordinator.models.repository_watch import RepositoryWatch

KNOWN = {"m", "old"}
TRIED = {"m": "1", "old": "1"}


def look(watch: RepositoryWatch, marks: dict[str, str], took_s: float = 0.0) -> dict[str, str]:
    """Look when due; return what is settled."""
    begun = watch.next_look
    watch.begin(begun)
    assert watch.next_look == inf
    return watch.end(marks, TRIED, KNOWN, begun + took_s)


def test_a_change_is_settled_once_two_looks_have_found_it() -> None:
    watch = RepositoryWatch(15.0, 100.0)
    assert look(watch, TRIED) == {}
    assert watch.next_look == 115.0
    assert look(watch, {"m": "half", "old": "1"}) == {}
    assert watch.next_look == pytest.approx(115.15)
    assert look(watch, {"m": "2", "old": "1"}) == {}
    assert watch.next_look == pytest.approx(115.3)
    assert look(watch, {"m": "2", "old": "1"}) == {"m": "2"}
    assert watch.next_look == pytest.approx(130.3)


def test_new_and_removed_models() -> None:
    watch = RepositoryWatch(15.0, 0.0)
    marks = {"m": "1", "new": "1", "..": "1"}
    assert look(watch, marks) == {}
    assert look(watch, marks) == {"new": "1", "old": ""}


def test_a_folder_that_comes_back_at_once_was_not_removed() -> None:
    watch = RepositoryWatch(0.3, 0.0)
    assert look(watch, {"old": "1"}) == {}
    assert look(watch, {"old": "1", "m": "2"}) == {}
    assert look(watch, {"old": "1", "m": "2"}) == {"m": "2"}


def test_looks_take_a_tenth_of_the_time_at_most() -> None:
    watch = RepositoryWatch(0.3, 0.0)
    look(watch, TRIED, took_s=0.5)
    assert watch.next_look == pytest.approx(5.0)
    look(watch, {"m": "2"}, took_s=0.5)
    assert watch.next_look == pytest.approx(10.0)


def test_without_an_interval_a_look_comes_when_asked_for() -> None:
    watch = RepositoryWatch(inf, inf)
    assert watch.next_look == inf
    watch.ask(5.0)
    watch.begin(watch.next_look)
    watch.ask(5.5)
    assert watch.end({"m": "2", "old": "1"}, TRIED, KNOWN, 6.0) == {}
    assert look(watch, {"m": "2", "old": "1"}) == {"m": "2"}
    assert watch.next_look == inf
    watch.ask(7.0)
    watch.begin(7.0)
    watch.fail(8.0)
    assert watch.next_look == inf
