"""The list of what went wrong: bounded, and the same thing is one entry."""

from __future__ import annotations

from shmserve.core.stats.incidents import LIMIT, Incident, Incidents


def test_the_same_thing_soon_again_is_counted_and_comes_last() -> None:
    incidents = Incidents()
    incidents.add(0.0, "a/1", "broke")
    incidents.add(1.0, "b/1", "broke")
    incidents.add(50.0, "a/1", "broke", 3)
    assert incidents.list() == (
        Incident(1.0, 1.0, "b/1", "broke", 1),
        Incident(0.0, 50.0, "a/1", "broke", 4),
    )


def test_what_was_said_of_it_may_come_before_or_after() -> None:
    incidents = Incidents()
    incidents.say(0.0, "a/1", "broke", "early")
    incidents.add(0.0, "a/1", "broke")
    incidents.add(0.0, "b/1", "broke")
    incidents.say(0.0, "b/1", "broke", "late" + "!" * 1000)
    first, second = incidents.list()
    assert first.said == "early"
    assert second.said.startswith("late!")
    assert len(second.said) == 300
    incidents.add(1.0, "a/1", "broke")
    assert {entry.what: entry.said for entry in incidents.list()}["a/1"] == "early"
    for number in range(LIMIT + 10):
        incidents.say(0.0, f"m{number}", "broke", "never counted")
    assert len(incidents._said) == LIMIT


def test_what_was_said_of_a_failure_is_not_said_of_a_later_one() -> None:
    incidents = Incidents()
    incidents.add(0.0, "a/1", "broke")
    incidents.say(1.0, "a/1", "broke", "the first")  # known already: none is to come
    incidents.add(70.0, "a/1", "broke")
    assert [entry.said for entry in incidents.list()] == ["the first", ""]
    incidents.say(200.0, "a/1", "broke", "the third")  # the entries are too old for it
    incidents.add(201.0, "a/1", "broke")
    assert [entry.said for entry in incidents.list()] == ["the first", "", "the third"]
    incidents.say(300.0, "a/1", "broke", "never counted")
    incidents.add(310.0, "a/1", "broke")
    assert incidents.list()[-1].said == ""


def test_after_a_while_it_is_another() -> None:
    incidents = Incidents()
    incidents.add(0.0, "a/1", "broke")
    incidents.add(61.0, "a/1", "broke")
    assert len(incidents.list()) == 2


def test_only_the_latest_are_kept_and_texts_are_cut() -> None:
    incidents = Incidents()
    for number in range(LIMIT + 10):
        incidents.add(float(number), f"m{number}", "x" * 1000)
    kept = incidents.list()
    assert len(kept) == LIMIT
    assert kept[-1].what == f"m{LIMIT + 9}"
    assert {len(entry.text) for entry in kept} == {300}
