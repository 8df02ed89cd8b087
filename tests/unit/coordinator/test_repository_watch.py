"""Looks at the repository: when they come, and which changes they settle."""

from itertools import pairwise
from math import inf

import pytest

from shmserve.coordinator.models.repository_watch import RepositoryLook, RepositoryWatch

KNOWN = {"m", "old"}
TRIED = {"m": "1", "old": "1"}


def look(watch: RepositoryWatch, marks: dict[str, str], took_s: float = 0.0) -> dict[str, str]:
    """RepositoryLook when due; return what is settled."""
    begun = watch.next_look
    watch.begin(begun)
    assert watch.next_look == inf
    return watch.end(RepositoryLook(marks, took_s), TRIED, KNOWN, set(), begun + took_s)


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
    assert watch.end(RepositoryLook({"m": "2", "old": "1"}), TRIED, KNOWN, set(), 5.5) == {}
    assert look(watch, {"m": "2", "old": "1"}) == {"m": "2"}
    assert watch.next_look == inf
    watch.ask(7.0)
    watch.begin(7.0)
    watch.fail(8.0)
    assert watch.next_look == 23.0


def test_a_folder_that_changes_all_the_time_is_loaded_with_one_warning(caplog) -> None:
    watch, loads = RepositoryWatch(15.0, 0.0), []
    while (now := watch.next_look) < 40.0:
        loads += [now] if look(watch, {"m": f"at {now}", "old": "1"}) else []
    assert loads[0] == pytest.approx(5.0, abs=0.3)
    assert len(loads) == 2
    assert caplog.text.count("changes all the time") == 1
    assert [record.shmserve_fields["model"] for record in caplog.records] == ["m"]


def test_a_model_that_changes_during_its_loads_waits_longer_each_time(caplog) -> None:
    watch, mark, loads = RepositoryWatch(0.3, 0.0), 2, []
    while (now := watch.next_look) < 400.0:
        if look(watch, {"m": str(mark), "old": "1"}):
            loads.append(now)
            mark += 1
            watch.loaded("m", now)
    gaps = [b - a for a, b in pairwise(loads)]
    assert gaps[:7] == pytest.approx([1.3, 2.3, 4.3, 8.3, 16.3, 32.3, 60.3], abs=0.4)
    assert max(gaps) < 61.0
    assert caplog.text.count("changes during each load") == 1
    while not look(watch, {"m": str(mark), "old": "1"}):
        pass
    watch.loaded("m", watch.next_look - 0.1)
    assert look(watch, TRIED) == {}  # at rest: the next change is loaded at once
    assert look(watch, {"m": "new", "old": "1"}) == {}
    assert look(watch, {"m": "new", "old": "1"}) == {"m": "new"}


def test_a_slow_look_stops_looks_for_a_bounded_time() -> None:
    watch = RepositoryWatch(15.0, 0.0)
    look(watch, TRIED, took_s=60.0)
    assert watch.next_look == 120.0
    watch.begin(120.0)
    watch.fail(720.0)
    assert watch.next_look == 735.0
    watch.begin(735.0)
    watch.end(
        RepositoryLook(TRIED, 0.1), TRIED, KNOWN, set(), 780.0
    )  # the look had to wait for its turn
    assert watch.next_look == pytest.approx(780.9)


def test_a_change_of_a_busy_model_is_looked_at_again_after_its_requests() -> None:
    watch, marks = RepositoryWatch(inf, 0.0), {"m": "2", "old": "1"}
    watch.begin(0.0)
    assert watch.end(RepositoryLook(marks), TRIED, KNOWN, {"m"}, 0.0) == {}
    assert watch.next_look == inf
    watch.loaded("m", 9.0)
    assert watch.next_look == 9.0
    assert look(watch, marks) == {"m": "2"}
    assert watch.next_look == inf
