"""Slots by caller: who gives way and who enters, equal numbers while all wait, and order of arrival
for a single caller."""

from collections import Counter
from math import ceil

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_slots import LiveSequence, SequenceSlots, Step

_PATIENCE = 30


def slots_of(count: int, share: float = 0.75) -> SequenceSlots[int, int]:
    return SequenceSlots(SequencePolicy(count, count, caller_share=share))


def held(slots: SequenceSlots[int, int]) -> Counter[int]:
    return Counter(each.caller for each in slots.slots if each is not None)


class SlotsMachine(RuleBasedStateMachine):
    """Slots under a clock of the test's own. A sequence in a slot is idle, or has a request."""

    @initialize(count=st.integers(1, 6), share=st.sampled_from([0.5, 0.75]))
    def begin(self, count: int, share: float) -> None:
        self.share = ceil(count * share)
        self.slots: SequenceSlots[int, int] = SequenceSlots(
            SequencePolicy(count, count, caller_share=share, patience_ns=_PATIENCE)
        )
        self.now = 1000
        self.number = 0

    def pick(self, data: st.DataObject, idle: bool) -> LiveSequence[int, int] | None:
        found = [each for each in self.slots.slots if each is not None and each.is_idle == idle]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(caller=st.sampled_from([1, 1, 1, 2, 3]), many=st.integers(1, 6))
    def arrive(self, caller: int, many: int) -> None:
        for _ in range(many):
            self.number += 1
            sequence: LiveSequence[int, int] = LiveSequence(self.number, caller)
            self.slots.add(sequence)
            self.slots.fill()
            self.ask(sequence)

    def ask(self, sequence: LiveSequence[int, int]) -> None:
        sequence.waiting.append(Step(0, 0, 1, None, self.now))
        sequence.is_open = True

    @rule(data=st.data())
    def request(self, data: st.DataObject) -> None:
        sequence = self.pick(data, idle=True)
        if sequence is not None:
            self.ask(sequence)

    @rule()
    def all_run(self) -> None:
        for sequence in self.slots.slots:
            if sequence is not None and sequence.waiting:
                sequence.waiting.popleft()
                sequence.quiet_ns = self.now

    @rule(data=st.data(), idle=st.booleans())
    def end(self, data: st.DataObject, idle: bool) -> None:
        sequence = self.pick(data, idle)
        if sequence is not None:
            self.slots.remove(sequence)
            self.slots.fill()

    @rule(by=st.sampled_from([1, 10, _PATIENCE]))
    def wait(self, by: int) -> None:
        self.now += by

    @rule()
    def give_way(self) -> None:
        sequence, at_ns = self.slots.next_to_yield(self.now)
        while sequence is not None:
            assert self.now >= at_ns
            before, least = held(self.slots)[sequence.caller], self.least()
            assert sequence.is_idle
            assert before >= least + 2
            assert self.now - sequence.quiet_ns >= _PATIENCE or before > self.share
            self.slots.remove(sequence)
            self.slots.fill()
            assert None not in self.slots.slots
            sequence, at_ns = self.slots.next_to_yield(self.now)
        assert self.now < at_ns
        self.nobody_waits_in_vain()

    def least(self) -> int:
        """Return the fewest slots of a waiting caller."""
        return min(held(self.slots)[each.caller] for each in self.slots.waiting())

    def nobody_waits_in_vain(self) -> None:
        """A waiting caller with the fewest slots waits for no idle sequence of a caller with two
        more, if the sequence has been silent for long enough, or if that caller has more than its
        share and this caller has waited for long enough."""
        if not self.slots.backlog:
            return
        counts, least = held(self.slots), self.least()
        waits = [each for each in self.slots.waiting() if counts[each.caller] == least]
        latest = max(each.waiting[0].arrived_ns for each in waits)
        for each in self.slots.slots:
            if each is not None and each.is_idle and counts[each.caller] >= least + 2:
                assert self.now - each.quiet_ns < _PATIENCE
                if counts[each.caller] > self.share:
                    assert self.now - latest < _PATIENCE

    @invariant()
    def each_sequence_has_one_place(self) -> None:
        if not hasattr(self, "slots"):
            return
        inside = [each for each in self.slots.slots if each is not None]
        waiting = list(self.slots.waiting())
        assert len({each.id for each in inside + waiting}) == len(inside) + len(waiting)
        assert self.slots.backlog == len(waiting)
        assert all(self.slots.slots[each.slot or 0] is each for each in inside)
        assert not waiting or None not in self.slots.slots


TestSlots = SlotsMachine.TestCase


@given(
    count=st.integers(1, 12),
    first=st.lists(st.integers(1, 3), min_size=12, max_size=12),
    order=st.randoms(use_true_random=False),
)
def test_each_caller_gets_equally_many_slots_as_sequences_end(
    count: int, first: list[int], order: object
) -> None:
    slots = slots_of(count)
    for number, caller in enumerate(first[:count]):
        slots.add(LiveSequence(number, caller))
    slots.fill()
    begun = {each for each in slots.slots if each is not None}
    for number in range(100, 400):
        slots.add(LiveSequence(number, 1 + number % 3))
    slots.fill()
    while begun & set(slots.slots):
        ended = order.choice([each for each in slots.slots if each is not None])  # type: ignore[attr-defined]
        slots.remove(ended)
        slots.fill()
        assert None not in slots.slots
        if not slots.backlog:
            return
    counts = [held(slots)[caller] for caller in (1, 2, 3)]
    assert max(counts) - min(counts) <= 1


@given(count=st.integers(1, 6), ends=st.lists(st.integers(0, 5), max_size=30))
def test_a_single_callers_sequences_enter_in_order_and_keep_their_slots(
    count: int, ends: list[int]
) -> None:
    slots = slots_of(count)
    for number in range(1, 41):
        slots.add(LiveSequence(number, 7))
    slots.fill()
    expected: list[int | str] = list(range(1, count + 1))
    for end in ends:
        sequence = slots.slots[end % count]
        assert sequence is not None
        slots.remove(sequence)
        slots.fill()
        expected[end % count] = max(map(int, expected)) + 1
        assert [each.id for each in slots.slots if each is not None] == expected
        assert slots.next_to_yield(1 << 60)[0] is None


def test_one_caller_may_have_its_share_of_the_places_to_wait() -> None:
    policy = SequencePolicy(1, 1, max_waiting=4, caller_share=0.75)
    slots: SequenceSlots[int, int] = SequenceSlots(policy)
    for number in range(4):
        assert slots.has_room_for(1)
        slots.add(LiveSequence(number, 1))
        slots.fill()
    assert not slots.has_room_for(1)
    assert slots.has_room_for(2)
    slots.add(LiveSequence(9, 2))
    assert not slots.has_room_for(3)
