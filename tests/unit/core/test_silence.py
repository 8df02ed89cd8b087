"""Silence of a process, counted in time that the watcher saw."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.control.silence import Silence, period_s


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=30), st.booleans())
def test_a_look_counts_little_however_long_the_watcher_was_away(pauses, begun):
    silence, now = Silence(), 0.0
    silence.seconds("a", now)
    beat = "b" if begun else "a"
    assert silence.seconds(beat, now) == 0.0
    for looks, pause in enumerate(pauses, 1):
        now += pause
        assert 0.0 <= silence.seconds(beat, now) <= min(now, 2.0 * looks) + 1e-6
    assert silence.seconds("c", now + 100.0) == 0.0


def test_who_still_starts_is_waited_for_longer():
    silence = Silence()
    assert [round(silence.seconds(None, now), 3) for now in range(7)][-1] == 2.0
    assert silence.seconds(1, 7) == 0.0
    assert [silence.seconds(1, now) for now in range(8, 11)] == [1.0, 2.0, 3.0]


def test_a_watcher_that_looks_seldom_counts_more_for_each_look():
    silence = Silence(period_s(20.0))
    silence.seconds("a", 0.0)
    silence.seconds("b", 5.0)
    assert [silence.seconds("b", now) for now in (10.0, 15.0, 1000.0)] == [5.0, 10.0, 20.0]
