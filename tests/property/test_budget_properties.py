"""The ledger against a short model: grants, and requests still to be answered."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmserve.core.effects import AnswerGrant, AskTrim
from shmserve.core.memory.budget import MAX_PARKED, PARK_S, Ledger

POOL, FLOOR, LESS = 1000, 100, 10
NAMES = st.sampled_from(["a", "b", "c", "d"])


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.ledger = Ledger(POOL, FLOOR)
        self.held: dict[str, int] = {}
        self.floors: dict[str, int] = {}
        self.owed: dict[tuple[str, int], tuple[int, float]] = {}
        self.ticket = 0
        self.now = 0.0

    def take(self, effects):
        for effect in effects:
            if isinstance(effect, AnswerGrant):
                nbytes, _ = self.owed.pop((effect.process, effect.ticket))  # once, and only owed
                if effect.granted:
                    self.held[effect.process] += nbytes
            if isinstance(effect, AskTrim):
                floor = self.floors[effect.process] or FLOOR
                assert self.held[effect.process] - effect.nbytes >= floor

    @rule(name=NAMES, first=st.sampled_from([0, LESS]))
    def join(self, name, first):
        if name not in self.held:
            self.ledger.joined(name, 0, first)
            self.held[name], self.floors[name] = 0, first

    @rule(name=NAMES)
    def leave(self, name):
        self.held.pop(name, None)
        self.owed = {key: value for key, value in self.owed.items() if key[0] != name}
        self.take(self.ledger.left(name, self.now))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), nbytes=st.integers(1, POOL + 100))
    def ask(self, data, nbytes):
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.ticket += 1
        self.owed[name, self.ticket] = (nbytes, self.now)
        fits = sum(self.held.values()) + nbytes <= POOL
        self.take(self.ledger.grant(name, self.ticket, nbytes, self.now))
        if fits:
            assert (name, self.ticket) not in self.owed

    @precondition(lambda self: self.held)
    @rule(data=st.data(), nbytes=st.integers(0, POOL))
    def give_back(self, data, nbytes):
        name = data.draw(st.sampled_from(sorted(self.held)))
        nbytes = min(nbytes, self.held[name])
        self.held[name] -= nbytes
        self.take(self.ledger.give_back(name, nbytes, self.now))

    @rule(seconds=st.floats(0, 1))
    def wait(self, seconds):
        self.now += seconds
        self.take(self.ledger.expire(self.now))
        assert all(self.now - asked < PARK_S for _, asked in self.owed.values())

    @invariant()
    def agrees(self):
        assert self.ledger.total == sum(self.held.values()) <= POOL
        assert self.ledger.waiting == len(self.owed) <= MAX_PARKED
        for name, held in self.held.items():
            assert self.ledger.held(name) == held

    @invariant()
    def nobody_waits_who_fits(self):
        free = POOL - sum(self.held.values())
        assert all(nbytes > free for nbytes, _ in self.owed.values())


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_nothing_is_granted_before_the_ledger_has_settled():
    ledger = Ledger(POOL, FLOOR, settle_until=10.0)
    ledger.joined("a", 0)
    assert ledger.grant("a", 1, 400, 9.9) == []
    ledger.joined("b", 800)  # said hello again meanwhile
    assert [e.granted for e in ledger.expire(10.2)] == [False]


def test_holders_beyond_their_floor_are_asked_to_trim_and_the_asker_is_not():
    ledger = Ledger(POOL, FLOOR)
    ledger.joined("a", 500)
    ledger.joined("b", 400)
    assert ledger.grant("b", 1, 300, 0.0) == [AskTrim("a", 200)]
    assert ledger.give_back("a", 200, 0.1) == [AnswerGrant("b", 1, True)]


def test_who_began_with_less_is_asked_for_all_beyond_that():
    ledger = Ledger(POOL, FLOOR)
    ledger.joined("executor", 80, LESS)
    ledger.joined("frontend", 80)
    ledger.joined("asks", 800)
    assert ledger.grant("asks", 1, 100, 0.0) == [AskTrim("executor", 60)]
    ledger.left("executor", 0.1)
    ledger.joined("executor", 80)  # another process of that name, which has said nothing
    assert [e.granted for e in ledger.grant("asks", 2, 120, 0.3)] == [False]


def test_if_trimming_cannot_suffice_the_answer_is_no_at_once():
    ledger = Ledger(POOL, FLOOR)
    ledger.joined("a", 150)
    ledger.joined("b", 800)
    (answer,) = ledger.grant("b", 1, 300, 0.0)
    assert (answer.granted, answer.reason) == (
        False,
        "300 bytes asked of a pool of 1000 with 50 free",
    )


def test_after_a_restart_holders_may_exceed_the_pool_and_then_nothing_is_granted():
    ledger = Ledger(POOL, FLOOR)
    ledger.joined("a", 800)
    ledger.joined("b", 800)
    assert isinstance(ledger.grant("a", 1, 1, 0.0)[0], AskTrim)
