"""The sequences of an instance against a model of a few lines, under a clock of the test's own."""

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from shmserve.core.scheduling.scheduler import Turn
from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_queue import SequenceQueue
from shmserve.core.scheduling.sequence_slots import Step

_IDS: list[int | str] = [1, 2, "1", "two", 5, 6, 7]
_PATIENCE = 30


class Life:
    """The model's record of a sequence. `ran`: a request that began it has run, and no end."""

    def __init__(self, caller: int) -> None:
        self.caller = caller
        self.waiting: list[Step[int, int]] = []
        self.running: Step[int, int] | None = None
        self.ran = False
        self.slot = -1
        self.quiet_ns = 0


class SequenceMachine(RuleBasedStateMachine):
    @initialize(
        slots=st.integers(1, 4),
        max_size=st.integers(1, 4),
        by_slot=st.booleans(),
        delay=st.sampled_from([0, 10, 50]),
        enough=st.integers(1, 3),
        most=st.integers(1, 4),
        share=st.sampled_from([0.5, 0.75, 1.0]),
        preferred=st.frozensets(st.integers(1, 4), min_size=1, max_size=2),
    )
    def begin(
        self,
        slots: int,
        max_size: int,
        by_slot: bool,
        delay: int,
        enough: int,
        most: int,
        share: float,
        preferred: frozenset[int],
    ) -> None:
        self.policy = SequencePolicy(
            slots, slots if by_slot else max_size, by_slot, preferred, enough, delay, 100, most,
            share, _PATIENCE,
        )  # fmt: skip
        self.queue: SequenceQueue[int, int] = SequenceQueue(self.policy, self)
        self.lives: dict[int | str, Life] = {}
        self.now = 1000
        self.number = self.told = 0
        self.orphaned: set[int] = set()  # to be told at the next turn
        self.given_up: set[int] = set()  # in this turn
        self.gone: list[Life] = []  # lives that gave way
        self.beginning = 0  # caller whose request is pushed

    # --------------------------------------------------------- the machine is the listener

    def began(self, sequence: int | str) -> None:
        assert sequence not in self.lives
        self.lives[sequence] = Life(self.beginning)

    def ended(self, sequence: int | str) -> None:
        life = self.lives.pop(sequence)
        assert not life.waiting
        assert life.running is None

    def gave_way(self, sequence: int | str) -> None:
        life, held = self.lives[sequence], self.held()
        assert not life.waiting
        assert life.running is None
        least = min(held[caller] for caller in self.waiting_callers())
        assert held[life.caller] >= least + 2
        quiet = self.now - life.quiet_ns >= _PATIENCE
        assert quiet or held[life.caller] > self.policy.slots * self.policy.caller_share
        self.gone.append(life)

    def gave_up(self, items: list[int]) -> None:
        (life,) = [each for each in self.lives.values() if [-s.key for s in each.waiting] == items]
        life.waiting.clear()
        self.given_up |= {-item for item in items}
        self.told += len(items)

    def has_slot(self, id: int | str) -> bool:
        return self.queue._live[id].slot is not None

    def held(self) -> Counter[int]:
        """Return the number of slots of each caller."""
        return Counter(life.caller for id, life in self.lives.items() if self.has_slot(id))

    def waiting_callers(self) -> set[int]:
        return {life.caller for id, life in self.lives.items() if not self.has_slot(id)}

    # --------------------------------------------------------------------- rules

    @rule(
        id=st.sampled_from(_IDS),
        start=st.booleans(),
        end=st.booleans(),
        kind=st.sampled_from("aaab"),
        deadline=st.sampled_from([0, 0, 30, 90]),
        patience=st.sampled_from([0, 0, 20, 100]),
        caller=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def push(
        self, id: int | str, start: bool, end: bool, kind: str, deadline: int, patience: int,
        caller: int,
    ) -> None:  # fmt: skip
        life = self.lives.get(id)
        if not start and not self.queue.knows(id):
            return
        if life is None and not self.queue.has_room_for(caller):
            waiting = [other.caller for id, other in self.lives.items() if not self.has_slot(id)]
            alone = self.policy.caller_share == 1
            has = len(waiting) if alone else waiting.count(caller)
            most = self.policy.max_waiting
            assert len(waiting) >= most or has >= most * self.policy.caller_share
            return
        self.beginning = 0 if self.policy.caller_share == 1 else caller
        if not start:
            assert life is not None
            last = life.waiting[-1] if life.waiting else life.running
            assert not last.end if last is not None else life.ran
        self.number += 1
        step = Step(
            self.number, -self.number, 1, kind, self.now, self.now + deadline if deadline else 0,
            self.now + patience if patience else 0, caller, start=start, end=end,
        )  # fmt: skip
        self.queue.push(id, step)
        self.lives[id].waiting.append(step)

    @rule()
    def begin_many(self) -> None:
        for id in _IDS[:4]:
            self.push(id, True, False, "a", 0, 0, 1)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        keys = [step.key for life in self.lives.values() for step in life.waiting]
        key = data.draw(st.sampled_from(keys)) if keys else 0
        self.forget_one(key)
        assert self.queue.cancel(key) == (-key if keys else None)

    @rule(odd=st.booleans())
    def disconnect(self, odd: bool) -> None:
        for life in list(self.lives.values()):
            for step in list(life.waiting):
                if step.key % 2 == odd:
                    self.forget_one(step.key)
        for key in [key for key in self.queue.waiting if key % 2 == odd]:
            self.queue.cancel(key)

    def forget_one(self, key: int) -> None:
        """Remove a request from the model. With a first request, later requests of its sequence go
        too, which the next turn reports."""
        for life in self.lives.values():
            for index, step in enumerate(life.waiting):
                if step.key == key:
                    stop = index + 1
                    while step.start and stop < len(life.waiting) and not life.waiting[stop].start:
                        stop += 1
                    self.orphaned |= {each.key for each in life.waiting[index + 1 : stop]}
                    del life.waiting[index:stop]
                    self.told += 1
                    return

    @rule(by=st.sampled_from([1, 9, 60, 120]))
    def wait(self, by: int) -> None:
        self.now += by

    def is_running(self) -> bool:
        return any(life.running is not None for life in self.lives.values())

    @precondition(lambda self: not self.is_running())
    @rule(hurry=st.booleans())
    def turn(self, hurry: bool) -> None:
        lives = dict(self.lives)
        impatient = self.impatient()
        for life in list(lives.values()):
            for step in list(life.waiting):
                is_late = step.deadline_ns and self.now >= step.deadline_ns
                if step in life.waiting and is_late and step.key not in impatient:
                    self.forget_one(step.key)
        self.given_up = set()
        self.gone = []
        turn = self.queue.next(self.now, hurry)
        assert self.given_up == impatient
        assert {-item for item in turn.rejected} == self.orphaned
        self.told += len(turn.rejected)
        self.orphaned = set()
        for life in lives.values():
            is_over = life not in self.lives.values() and life not in self.gone
            if is_over and life.ran and not hurry and not turn.late:
                assert self.now >= life.quiet_ns + self.policy.idle_ns
        self.check(turn, hurry)

    def impatient(self) -> set[int]:
        """Return requests of sequences without a slot, if a request of the sequence has expired."""
        waiting = [life.waiting for id, life in self.lives.items() if not self.has_slot(id)]
        return {
            step.key
            for steps in waiting
            if any(step.expires_ns and self.now >= step.expires_ns for step in steps)
            for step in steps
        }

    def check(self, turn: Turn[int], hurry: bool) -> None:
        waits = {step.key: step for life in self.lives.values() for step in life.waiting}
        batch = [waits[-item] for item in turn.batch]
        assert len(batch) <= self.policy.max_size
        assert len({waiting.kind for waiting in batch}) <= 1
        of_batch = []
        for waiting in batch:
            (id, life), = [
                (id, life) for id, life in self.lives.items() if waiting in life.waiting
            ]  # fmt: skip
            step = life.waiting.pop(0)
            assert step is waiting  # the first waiting request of its sequence
            assert step.start or life.ran
            slot = self.queue.slot_of(id)
            if life.ran and life.slot >= 0:
                assert slot == life.slot
            life.running, life.slot, life.ran = step, slot, not step.end
            of_batch.append(slot)
            self.told += 1
        assert len(set(of_batch)) == len(of_batch)
        if self.policy.by_slot:
            assert of_batch == sorted(of_batch)
        else:
            arrivals = [waiting.arrived_ns for waiting in batch]
            assert arrivals == sorted(arrivals)
        in_slots = [life for life in self.lives.values() if life.ran or life.running]
        assert len(in_slots) <= self.policy.slots
        if not turn.batch and (hurry or not self.policy.max_delay_ns):
            assert not any(life.waiting for life in in_slots)
            assert not len(self.queue.waiting) or len(in_slots) == self.policy.slots

    @precondition(lambda self: self.is_running())
    @rule(odd=st.booleans())
    def some_run_again(self, odd: bool) -> None:
        """Run requests again in their slots. Requests of iterative sequences have both flags."""
        again = {}
        for life in self.lives.values():
            if life.running is not None and life.running.key % 2 == odd:
                step = replace(life.running, start=False, arrived_ns=self.now)
                again[step.key] = step
                life.running, life.ran, life.quiet_ns = None, True, self.now
                life.waiting.insert(0, step)
                self.told -= 1
        self.done(again)

    @precondition(lambda self: self.is_running())
    @rule()
    def all_are_done(self) -> None:
        self.done({})

    def done(self, again: dict[int, Step[int, int]]) -> None:
        for life in self.lives.values():
            if life.running is not None:
                life.quiet_ns = self.now
                if life.running.end:
                    life.slot = -1
                life.running = None
        self.queue.done(self.now, again)

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "queue"):
            return
        waiting = {step.key for life in self.lives.values() for step in life.waiting}
        assert set(self.queue.waiting) == waiting
        assert len(self.queue.waiting) + self.told + len(self.orphaned) == self.number
        free = self.policy.slots - len(self.lives)
        assert self.queue.free_slots == max(0, free)
        in_slots = sum(self.held().values())
        assert in_slots == min(len(self.lives), self.policy.slots)

    def teardown(self) -> None:
        """With `hurry`, every request leaves the queue."""
        if not hasattr(self, "queue"):
            return
        for _ in range(2 * self.number + 2):
            if self.is_running():
                self.done({})
            self.turn(hurry=True)
        assert len(self.queue.waiting) == 0


TestSequences = SequenceMachine.TestCase
