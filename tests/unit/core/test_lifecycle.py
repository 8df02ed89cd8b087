"""The states of an instance and the pauses between restarts."""

import pytest

from shmserve.core.control.lifecycle import TRANSITIONS, Event, Restarts, State, step
from shmserve.errors import ProtocolViolation


def walk(*events):
    state = State.WANTED
    for event in events:
        state = step(state, event, "m/1/0")
    return state


@pytest.mark.parametrize(
    ("events", "after"),
    [
        ((Event.STARTED, Event.CONNECTED, Event.LOADED), State.READY),
        ((Event.CONNECTED, Event.STARTED, Event.LOADED), State.READY),  # overtaken
        ((Event.STARTED, Event.EXITED), State.BACKOFF),
        ((Event.STARTED, Event.EXITED, Event.STARTED), State.STARTING),
        ((Event.CONNECTED, Event.LOADED, Event.LOST, Event.EXITED), State.BACKOFF),
        ((Event.CONNECTED, Event.LOADED, Event.LOST, Event.CONNECTED), State.LOADING),
        ((Event.CONNECTED, Event.LOAD_FAILED, Event.EXITED), State.FAILED),
        ((Event.CONNECTED, Event.LOAD_FAILED, Event.EXITED, Event.WANT), State.WANTED),
        ((Event.CONNECTED, Event.LOADED, Event.STOP, Event.LOST, Event.EXITED), State.WANTED),
    ],
)
def test_ways_of_an_instance(events, after):
    assert walk(*events) is after


def test_what_cannot_happen_is_refused_by_name():
    with pytest.raises(ProtocolViolation, match="LOADED in state WANTED of instance m/1/0"):
        walk(Event.LOADED)


def test_every_state_has_its_row_and_a_way_in():
    assert set(TRANSITIONS) == set(State)
    reached = {after for row in TRANSITIONS.values() for after in row.values()}
    assert reached == set(State)


def test_restarts_are_immediate_then_slower_then_capped():
    restarts = Restarts(base_s=0.5, cap_s=4.0, stable_s=10.0)
    pauses = []
    now = 0.0
    for _ in range(7):
        restarts.started(now)
        now += 1.0
        pauses.append(restarts.ended(now) - now)
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_process_that_ran_long_enough_restarts_at_once():
    restarts = Restarts(base_s=0.5, cap_s=4.0, stable_s=10.0)
    for now in (1.0, 2.0, 3.0):
        restarts.started(now)
        restarts.ended(now)
    restarts.started(10.0)
    assert restarts.ended(20.0) == 20.0


def test_a_chosen_exit_waits_even_the_first_time_and_many_do_not_overflow():
    assert Restarts(base_s=0.5).ended(7.0, at_once=False) == 7.5
    restarts = Restarts(cap_s=30.0)
    for _ in range(5000):
        due = restarts.ended(0.0)
    assert due == 30.0
