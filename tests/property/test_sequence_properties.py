"""The sequences of an instance against a model of a few lines, under a clock of the test's own."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from shmserve.core.scheduling.batch_queue import Turn  # type: ignore[attr-defined]
from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_queue import SequenceQueue, Step

_IDS: list[int | str] = [1, 2, "1", "two", 5]


class Life:
    """The model's record of a sequence. `ran`: a request that began it has run, and no end."""

    def __init__(self) -> None:
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
        most=st.integers(2, 5),
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
        preferred: frozenset[int],
    ) -> None:
        self.policy = SequencePolicy(
            slots, slots if by_slot else max_size, by_slot, preferred, enough, delay, 100, most
        )
        self.queue: SequenceQueue[int, int] = SequenceQueue(self.policy, self)
        self.lives: dict[int | str, Life] = {}
        self.now = 1000
        self.number = self.told = 0
        self.orphaned: set[int] = set()  # to be told at the next turn
        self.given_up: set[int] = set()  # in this turn

    # --------------------------------------------------------- the machine is the listener

    def began(self, sequence: int | str) -> None:
        assert sequence not in self.lives
        self.lives[sequence] = Life()

    def ended(self, sequence: int | str) -> None:
        life = self.lives.pop(sequence)
        assert not life.waiting
        assert life.running is None

    def gave_up(self, items: list[int]) -> None:
        (life,) = [each for each in self.lives.values() if [-s.key for s in each.waiting] == items]
        life.waiting.clear()
        self.given_up |= {-item for item in items}
        self.told += len(items)

    # --------------------------------------------------------------------- rules

    @rule(
        id=st.sampled_from(_IDS),
        start=st.booleans(),
        end=st.booleans(),
        kind=st.sampled_from("aaab"),
        deadline=st.sampled_from([0, 0, 30, 90]),
        patience=st.sampled_from([0, 0, 20, 100]),
    )
    def push(
        self, id: int | str, start: bool, end: bool, kind: str, deadline: int, patience: int
    ) -> None:
        life = self.lives.get(id)
        if not start and not self.queue.knows(id):
            return
        if start and not self.queue.has_room_for(id):
            assert life is None
            assert len(self.lives) == self.policy.max_sequences
            return
        if not start:
            assert life is not None
            last = life.waiting[-1] if life.waiting else life.running
            assert not last.end if last is not None else life.ran
        self.number += 1
        step = Step(
            self.number, -self.number, 1, kind, self.now, self.now + deadline if deadline else 0,
            self.now + patience if patience else 0, start=start, end=end,
        )  # fmt: skip
        self.queue.push(id, step)
        self.lives[id].waiting.append(step)

    @rule()
    def begin_many(self) -> None:
        for id in _IDS[:4]:
            self.push(id, True, False, "a", 0, 0)

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
        turn = self.queue.next(self.now, hurry)
        assert self.given_up == impatient
        assert {-item for item in turn.rejected} == self.orphaned
        self.told += len(turn.rejected)
        self.orphaned = set()
        for life in lives.values():
            if life not in self.lives.values() and life.ran and not hurry and not turn.late:
                assert self.now >= life.quiet_ns + self.policy.idle_ns
        self.check(turn, hurry)

    def impatient(self) -> set[int]:
        """Return requests of sequences without a slot, if a request of the sequence has expired."""
        waiting = [self.lives[sequence.id].waiting for sequence in self.queue.backlog]
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
        assert bool(self.queue.backlog) <= (free < 0)

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
