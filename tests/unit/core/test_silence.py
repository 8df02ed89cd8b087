"""How long somebody was silent is counted in what the watcher saw."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.core.control.silence import Silence


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
