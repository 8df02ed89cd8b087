"""Incidents as a bounded view of events; repeated events are one incident."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.stats.event_ring import RecordedEvent
from shmserve.core.stats.incidents import LIMIT, Incident, Incidents
from shmserve.core.stats.request_counters import Reason


def add(incidents: Incidents, now: float, what: str, text: str, count: int = 1) -> None:
    incidents.take(RecordedEvent(0, now, now, "instance failed", what, text, count))


def say(incidents: Incidents, now: float, what: str, text: str, said: str) -> None:
    incidents.take(RecordedEvent(0, now, now, "instance failed", what, text, 0, said))


def test_the_same_thing_soon_again_is_counted_and_later_is_another() -> None:
    incidents = Incidents()
    add(incidents, 0.0, "a/1", "broke")
    add(incidents, 1.0, "b/1", "broke")
    add(incidents, 50.0, "a/1", "broke", 3)
    latest = Incident(0.0, 50.0, "a/1", "broke", 4)
    assert incidents.list() == (Incident(1.0, 1.0, "b/1", "broke", 1), latest)
    add(incidents, 111.0, "a/1", "broke")
    assert incidents.list()[1:] == (latest, Incident(111.0, 111.0, "a/1", "broke", 1))


def test_what_was_said_of_it_may_come_before_or_after() -> None:
    incidents = Incidents()
    say(incidents, 0.0, "a/1", "broke", "early")
    add(incidents, 0.0, "a/1", "broke")
    add(incidents, 0.0, "b/1", "broke")
    say(incidents, 0.0, "b/1", "broke", "late" + "!" * 1000)
    first, second = incidents.list()
    assert first.said == "early"
    assert second.said.startswith("late!")
    assert len(second.said) == 300
    add(incidents, 1.0, "a/1", "broke")
    assert {entry.what: entry.said for entry in incidents.list()}["a/1"] == "early"
    for number in range(LIMIT + 10):
        say(incidents, 0.0, f"m{number}", "broke", "never counted")
    assert len(incidents._said) == LIMIT


def test_what_was_said_of_a_failure_is_not_said_of_a_later_one() -> None:
    incidents = Incidents()
    add(incidents, 0.0, "a/1", "broke")
    say(incidents, 1.0, "a/1", "broke", "the first")  # known already: none is to come
    add(incidents, 70.0, "a/1", "broke")
    assert [entry.said for entry in incidents.list()] == ["the first", ""]
    say(incidents, 200.0, "a/1", "broke", "the third")  # the entries are too old for it
    add(incidents, 201.0, "a/1", "broke")
    assert [entry.said for entry in incidents.list()] == ["the first", "", "the third"]
    say(incidents, 300.0, "a/1", "broke", "never counted")
    add(incidents, 310.0, "a/1", "broke")
    assert incidents.list()[-1].said == ""


def test_only_the_latest_are_kept_and_texts_are_cut() -> None:
    incidents = Incidents()
    for number in range(LIMIT + 10):
        add(incidents, float(number), f"m{number}", "x" * 1000)
    kept = incidents.list()
    assert len(kept) == LIMIT
    assert kept[-1].what == f"m{LIMIT + 9}"
    assert {len(entry.text) for entry in kept} == {300}


def words(kind: str, subject: str, text: str = "", **fields: object) -> list[tuple[str, str]]:
    incidents = Incidents()
    incidents.take(RecordedEvent(1, 0.0, 0.0, kind, subject, text, fields=fields))
    return [(entry.what, entry.text) for entry in incidents.list()]


def test_events_that_went_wrong_are_told_in_words_for_clients() -> None:
    for reason in Reason:
        ((what, text),) = words("request failed", "m/1", reason.name.lower())
        assert what == "m/1"
        assert text.startswith("request ")
    assert words("process ended", "http") == [("HTTP worker", "process ended")]
    assert words("process ended", "exporter") == [("exporter", "process ended")]
    assert words("model failed", "m", "no file") == [("m", "not served: no file")]
    ((what, text),) = words("region quarantined", "uid 7", "pid 9")
    assert (what, "7" in text, "9" in text) == ("client memory", False, False)
    fields = {"instance": "m/1/0", "reason": "no memory"}
    (told,) = words("warning", "coordinator", "model cannot be loaded", **fields)
    assert told == ("m/1/0", "no memory")


def test_other_events_are_no_incidents() -> None:
    for kind, subject, text in (
        ("process ended", "executor", ""),  # an executor's instance is told instead
        ("process ended", "lane", ""),
        ("model ready", "m/1", ""),
        ("warning", "coordinator", "stopping"),
        ("limit reached", "HTTP connections", "max_connections, descriptors"),
    ):
        assert words(kind, subject, text) == []


EVENTS = st.tuples(st.floats(0, 90), st.sampled_from("abc"), st.integers(1, 3))


@given(st.lists(EVENTS, max_size=30))
def test_every_failure_is_counted_once_in_the_order_of_its_last_time(steps: list) -> None:
    incidents, now = Incidents(), 0.0
    for pause, what, count in steps:
        now += pause
        add(incidents, now, what, "broke", count)
    entries = incidents.list()
    assert sum(entry.count for entry in entries) == sum(count for *_, count in steps)
    assert [entry.last for entry in entries] == sorted(entry.last for entry in entries)
    for what in "abc":
        own = [entry for entry in entries if entry.what == what]
        assert all(b.first - a.last >= 60 for a, b in itertools.pairwise(own))
