"""The batcher against a short model, under a clock that only the test moves."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from shmserve.core.scheduling.batch_policy import BatchPolicy, QueuePolicy
from shmserve.core.scheduling.batch_queue import BatchQueue, Turn, Waiting  # type: ignore[attr-defined]

_POLICIES = st.builds(
    QueuePolicy,
    delays=st.booleans(),
    timeout_ns=st.sampled_from([0, 7, 30]),
    overridable=st.booleans(),
    max_size=st.sampled_from([0, 2, 5]),
)


class Asked:
    """The model's record of a waiting request."""

    def __init__(self, waiting: Waiting[int, int], level: int, policy: QueuePolicy) -> None:
        self.waiting = waiting
        self.level = level
        self.policy = policy
        self.expires = waiting.expires_ns
        self.is_delayed = False


class BatcherMachine(RuleBasedStateMachine):
    @initialize(
        max_size=st.integers(1, 8),
        delay=st.sampled_from([0, 5, 40]),
        levels=st.lists(_POLICIES, min_size=1, max_size=3),
        data=st.data(),
    )
    def begin(
        self, max_size: int, delay: int, levels: list[QueuePolicy], data: st.DataObject
    ) -> None:
        preferred = data.draw(st.frozensets(st.integers(1, max_size), max_size=3))
        default = data.draw(st.integers(0, len(levels) - 1))
        self.policy = BatchPolicy(
            max_size, preferred or frozenset((max_size,)), delay, tuple(levels), default
        )
        self.queue: BatchQueue[int, int] = BatchQueue(self.policy)
        self.now = 1000
        self.number = 0
        self.model: list[Asked] = []
        self.pushed = self.told = 0

    @rule(
        rows=st.integers(1, 8),
        kind=st.sampled_from("ab"),
        priority=st.integers(0, 4),
        timeout=st.sampled_from([0, 3, 50]),
        deadline=st.sampled_from([0, 10, 100]),
    )
    def push(self, rows: int, kind: str, priority: int, timeout: int, deadline: int) -> None:
        self.number += 1
        policy = self.policy
        level = policy.default_level
        if 1 <= priority <= len(policy.levels):
            level = priority - 1
        own = policy.levels[level]
        waiting = Waiting(
            self.number,
            -self.number,
            min(rows, policy.max_size),
            kind,
            self.now,
            self.now + deadline if deadline else 0,
        )
        taken = self.queue.push(waiting, priority, timeout)
        waits = sum(asked.level == level for asked in self.model)
        assert taken is not (own.max_size > 0 and waits >= own.max_size)
        if not taken:
            return
        limits = [own.timeout_ns, timeout if own.overridable else 0]
        limit = min((each for each in limits if each), default=0)
        assert waiting.expires_ns == (self.now + limit if limit else 0)
        self.model.append(Asked(waiting, level, own))
        self.pushed += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.model))
        assert self.queue.cancel(asked.waiting.key) == -asked.waiting.key
        assert self.queue.cancel(asked.waiting.key) is None
        self.model.remove(asked)
        self.told += 1

    @rule(step=st.integers(0, 20))
    def wait(self, step: int) -> None:
        self.now += step

    @rule(hurry=st.booleans())
    def turn(self, hurry: bool) -> None:
        self._check_ended(turn := self.queue.next(self.now, hurry))
        expected = self._in_order()
        count = len(turn.batch)
        batch = [asked.waiting for asked in expected[:count]]
        assert [-item for item in turn.batch] == [waiting.key for waiting in batch]
        del expected[:count]
        assert sum(waiting.rows for waiting in batch) <= self.policy.max_size
        assert len({waiting.kind for waiting in batch}) <= 1
        if not count and self.model:  # the batch waits for more requests, within the delay
            oldest = min(asked.waiting.arrived_ns for asked in self.model)
            assert not hurry
            assert self.now < oldest + self.policy.max_delay_ns
            assert turn.wait_ns is not None
            ends = [asked.waiting.deadline_ns or 1 << 63 for asked in self.model]
            assert self.now + turn.wait_ns <= min(oldest + self.policy.max_delay_ns, *ends)
        if count and self.policy.max_delay_ns and not hurry:
            self._check_reason(batch, expected)
        self.model = [asked for asked in self.model if asked in expected]
        self.told += count
        assert len(self.queue.waiting) == len(self.model)
        assert self.pushed == self.told + len(self.model)

    def _check_reason(self, batch: list[Waiting[int, int]], left: list[Asked]) -> None:
        """With a delay, a batch leaves early only if its size is preferred or it cannot grow."""
        rows = sum(waiting.rows for waiting in batch)
        most = max(self.policy.preferred)
        is_blocked = bool(left) and (
            left[0].waiting.kind != batch[0].kind or rows + left[0].waiting.rows > most
        )
        is_due = min(w.arrived_ns for w in batch) + self.policy.max_delay_ns <= self.now
        assert is_due or is_blocked or rows in self.policy.preferred or rows >= most

    def _check_ended(self, turn: Turn[int]) -> None:
        late, rejected = [], []
        for asked in list(self.model):
            waiting = asked.waiting
            if waiting.deadline_ns and self.now >= waiting.deadline_ns:
                late.append(waiting.item)
            elif asked.is_delayed or not 0 < asked.expires <= self.now:
                continue
            elif asked.policy.delays:
                asked.is_delayed = True
                self.model.remove(asked)
                self.model.append(asked)
                continue
            else:
                rejected.append(waiting.item)
            self.model.remove(asked)
            self.told += 1
        assert sorted(turn.late) == sorted(late)
        assert sorted(turn.rejected) == sorted(rejected)

    def _in_order(self) -> list[Asked]:
        return sorted(self.model, key=lambda asked: (asked.level, asked.is_delayed))


TestBatcher = BatcherMachine.TestCase
