"""The book of open connections against a plain search through all of them."""

import math
from collections import Counter
from collections.abc import Iterator

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmserve.frontends.connections.open_connections import CROWDED_IDLE_S, OpenConnections

LIMIT = 6
SHARE = 4  # per caller
CALLERS = st.integers(1, 3)


class FakeConnection:
    """Connection whose use the test controls. It ends when the book forgets it."""

    looks = 0

    def __init__(self, caller: int, now: float) -> None:
        self.caller = caller
        self.since = now
        self.asked = False

    @property
    def idle_since(self) -> float:
        FakeConnection.looks += 1
        return math.inf if self.asked else self.since

    def give_way(self) -> None:
        assert not self.asked
        self.asked = True


class OpenConnectionsMachine(RuleBasedStateMachine):
    """Connections come, are used, fall idle and end, and each new connection needs a place."""

    def __init__(self) -> None:
        super().__init__()
        self.book: OpenConnections[FakeConnection] = OpenConnections(LIMIT, SHARE / LIMIT)
        self.open: list[FakeConnection] = []
        self.now = 100.0

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def longest_idle(self, caller: int | None) -> FakeConnection | None:
        """Return the connection that should give way, by a search through all."""
        idle = [
            connection
            for connection in self.open
            if not connection.asked
            and connection.since <= self.now - CROWDED_IDLE_S
            and caller in (None, connection.caller)
        ]
        return min(idle, key=lambda connection: connection.since, default=None)

    @rule(caller=CALLERS)
    def come(self, caller: int) -> None:
        held = sum(connection.caller == caller for connection in self.open)
        full = held >= SHARE or len(self.open) >= LIMIT
        expected = self.longest_idle(caller if held >= SHARE else None) if full else None
        asked = [connection.asked for connection in self.open]
        room = self.book.make_room(caller, self.now)
        assert room == (not full or expected is not None)
        changed = [c for c, before in zip(self.open, asked, strict=True) if c.asked != before]
        if expected is None:
            assert changed == []
        else:
            assert [c.since for c in changed] == [expected.since]
        if room:
            self.open.append(FakeConnection(caller, self.now))
            self.book.add(self.open[-1], caller)

    @rule(caller=st.none() | CALLERS)
    def run_out_of_descriptors(self, caller: int | None) -> None:
        expected = self.longest_idle(caller)
        assert self.book.end_longest_idle(self.now, caller) == (expected is not None)
        assert expected is None or any(c.asked and c.since == expected.since for c in self.open)

    def drawn(self, data: st.DataObject) -> FakeConnection:
        return data.draw(st.sampled_from(self.open))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        self.drawn(data).since = math.inf

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def fall_idle(self, data: st.DataObject) -> None:
        self.drawn(data).since = self.now

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        connection = self.drawn(data)
        before = self.book.ended
        for _ in range(2):
            self.book.discard(connection)
        assert self.book.ended == before + 1
        self.open.remove(connection)

    @invariant()
    def the_book_has_what_is_open(self) -> None:
        assert list(self.book) == self.open
        assert len(self.book) == len(self.open)

    @invariant()
    def no_caller_has_more_than_its_share_in_use(self) -> None:
        """Connections that were asked to end may still be there."""
        staying = Counter(c.caller for c in self.open if not c.asked)
        assert max(staying.values(), default=0) <= SHARE
        assert staying.total() <= LIMIT


TestOpenConnections = OpenConnectionsMachine.TestCase


def seconds(count: int) -> Iterator[float]:
    return (100 + number / count for number in range(count))


def test_ten_thousand_connections_are_not_looked_at_for_each_new_one() -> None:
    book: OpenConnections[FakeConnection] = OpenConnections(10_000)
    for number in range(10_000):
        book.add(FakeConnection(number % 7, 50.0 if number % 100 == 0 else math.inf), number % 7)
    FakeConnection.looks = 0
    gave_way = sum(book.make_room(1, now) for now in seconds(1000))
    assert gave_way == 100
    assert FakeConnection.looks < 21_000, "of all twice, of those that give way once"
