"""The executor's queue: turns between callers, against lists."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmserve.core.scheduling.request_queue import RequestQueue

CALLERS = st.integers(0, 4)


class TurnsMachine(RuleBasedStateMachine):
    """Requests of several callers.

    `waiting`: requests by caller, oldest first. `overtaken`: for each caller, how often each other
    caller was served since the caller's last turn or arrival.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: RequestQueue[int, int] = RequestQueue()
        self.waiting: dict[int, list[int]] = {}
        self.overtaken: dict[int, Counter[int]] = {}
        self.deadlines: dict[int, int] = {}
        self.number = self.now = 0

    @rule(caller=CALLERS, count=st.integers(1, 20), limit=st.sampled_from([0, 5, 50]))
    def push(self, caller: int, count: int, limit: int) -> None:
        for _ in range(count):
            self.number += 1
            self.deadlines[self.number] = self.now + limit if limit else 0
            self.queue.push(self.number, -self.number, self.deadlines[self.number], caller)
            self.waiting.setdefault(caller, []).append(self.number)
            self.overtaken.setdefault(caller, Counter())

    @rule(step=st.integers(0, 10))
    def wait(self, step: int) -> None:
        self.now += step

    def expected_late(self) -> list[int]:
        return sorted(n for n, end in self.deadlines.items() if end and self.now >= end)

    def check_late(self, late: Sequence[int], expected: list[int]) -> None:
        assert sorted(-item for item in late) == expected
        for number in expected:
            self._gone(number)
        ends = [end for end in self.deadlines.values() if end]
        assert self.queue.next_end_ns <= min(ends, default=1 << 63)

    @rule(may_run=st.booleans())
    def next(self, may_run: bool) -> None:
        late = self.expected_late()
        ordered = [-item for item in self.queue.in_turn()]
        assert self.queue.peek() == (-ordered[0] if ordered else None)
        turn = self.queue.next(self.now, may_run=may_run)
        self.check_late(turn.late, late)
        assert turn.is_due is bool(self.waiting)
        assert len(turn.batch) == (may_run and turn.is_due)
        for item in turn.batch:
            if not late:  # else turns may have passed to other callers
                assert -item == ordered[0]
            self._served(-item)
        if not late:
            assert [-item for item in self.queue.in_turn()] == ordered[len(turn.batch) :]
        ends = [end for end in self.deadlines.values() if end]
        if turn.is_due and not may_run and ends:
            assert turn.wait_ns is not None
            assert self.now + turn.wait_ns <= min(ends)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def take_some_in_turn(self, data: st.DataObject) -> None:
        """As a batch does."""
        ordered = [-item for item in self.queue.in_turn()]
        count = data.draw(st.integers(1, len(ordered)))
        for number in ordered[:count]:
            assert self.queue.take(number) == -number
            self._served(number)
        assert [-item for item in self.queue.in_turn()] == ordered[count:]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([n for line in self.waiting.values() for n in line]))
        ordered = [-item for item in self.queue.in_turn() if item != -number]
        assert self.queue.cancel(number) == -number
        assert self.queue.cancel(number) is None
        self._gone(number)
        if len(self.waiting) == 1:
            assert [-item for item in self.queue.in_turn()] == ordered

    @rule()
    def expire(self) -> None:
        expected = self.expected_late()
        late, rejected = self.queue.expire(self.now)
        assert not rejected
        self.check_late(late, expected)

    def _served(self, number: int) -> None:
        caller = self._gone(number)
        for other, times in self.overtaken.items():
            if other != caller:
                times[caller] += 1
                assert times[caller] <= 1, "one is served twice while another waits"
        if caller in self.overtaken:
            self.overtaken[caller].clear()

    def _gone(self, number: int) -> int:
        del self.deadlines[number]
        caller = next(c for c, line in self.waiting.items() if number in line)
        line = self.waiting[caller]
        line.remove(number)
        if not line:
            del self.waiting[caller], self.overtaken[caller]
        return caller

    @invariant()
    def callers_keep_their_order(self) -> None:
        ordered = [-item for item in self.queue.in_turn()]
        for line in self.waiting.values():
            assert [number for number in ordered if number in line] == line
        assert len(self.queue.waiting) == len(ordered) == sum(map(len, self.waiting.values()))
        assert sorted(self.queue.waiting) == sorted(ordered)
        if len(self.waiting) == 1:
            assert ordered == sorted(ordered)


TestTurnsMachine = TurnsMachine.TestCase
