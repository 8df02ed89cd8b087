"""Deadlines of messages during reception: how deadlines grow, and up to which limit."""

from hypothesis import given
from hypothesis import strategies as st

from shmserve.config import Settings
from shmserve.frontends.grpc.http2_engine.begun_messages import AHEAD, MessageDeadlines

SETTINGS = Settings(body_timeout_s=30.0, min_bytes_per_s=1 << 20)


@given(
    st.integers(1, 1 << 31),
    st.lists(st.tuples(st.floats(0, 40), st.integers(0, 20 << 20)), max_size=50),
)
def test_nobody_is_waited_for_longer_than_what_came_has_earned(
    size: int, steps: list[tuple[float, int]]
) -> None:
    deadlines, now, came = MessageDeadlines(SETTINGS), 0.0, 0
    deadlines.look(1, size, now)
    for pause, count in steps:
        now += pause
        if deadlines.overdue(now):
            break
        came = min(came + count, size - 1)
        deadlines.look(1, size - came, now)
        earned = (came + AHEAD) / SETTINGS.min_bytes_per_s
        assert deadlines.next_due <= SETTINGS.body_timeout_s + earned
        assert deadlines.next_due <= now + SETTINGS.body_timeout_s + 2 * AHEAD / (1 << 20)
    del deadlines.open[1]
    assert deadlines.next_due == float("inf")
    assert deadlines.overdue(1e9) == []


def test_a_client_at_twice_the_least_rate_is_waited_for() -> None:
    deadlines, left = MessageDeadlines(SETTINGS), 1 << 30
    for second in range(500):
        assert not deadlines.overdue(second)
        deadlines.look(1, left, second)
        left -= 2 << 20
    deadlines.look(1, 100, 500)
    deadlines.look(1, 5 << 20, 501)  # the next message of a stream
    assert deadlines.next_due == 501 + 30 + 5
    assert deadlines.overdue(536.5) == [1]
