"""Admission: limits hold, no caller starves, and every place is given back."""

import math
from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmserve.core.scheduling.admission import Admission, AdmissionLimits, CallPlace, CallTurn, Full
from shmserve.errors import QueueFull

CALLERS, SUBJECTS = st.integers(1, 3), st.sampled_from([b"", b"a", b"b"])
LIMITS = AdmissionLimits(8, 4, caller_share=0.5, subject_share=0.5, subject_limit=5)


class AdmissionMachine(RuleBasedStateMachine):
    """Calls that take places, begin, end, and leave, in any order that a server may have."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(LIMITS)
        self.placed: list[CallPlace] = []  # have not begun
        self.waiting: list[CallTurn] = []
        self.running: list[CallTurn] = []
        self.left: set[int] = set()  # calls that ended while the rpc still runs

    def began(self, turn: CallTurn) -> None:
        self.waiting.remove(turn)
        self.running.append(turn)

    @rule(caller=CALLERS)
    def enter(self, caller: int) -> None:
        held = Counter(self.holders())
        full = self.admission.full(caller)
        if held[caller] >= math.ceil(LIMITS.places * LIMITS.caller_share):
            assert full is Full.SHARE
        elif held.total() >= LIMITS.places:
            assert full is Full.PLACES
        else:
            assert full is None
            self.placed.append(self.admission.enter(caller))

    @precondition(lambda self: self.placed)
    @rule(data=st.data(), line=st.integers(0, 1), subject=SUBJECTS)
    def begin(self, data: st.DataObject, line: int, subject: bytes) -> None:
        place = self.placed.pop(data.draw(st.integers(0, len(self.placed) - 1)))
        turn = CallTurn((line, subject), place, lambda: None, subject)
        known = sum(t.subject == subject for t in self.waiting + self.running)
        try:
            runs = self.admission.begin(turn)
        except QueueFull:
            assert subject
            assert known >= LIMITS.subject_limit
            self.admission.leave(place)
            return
        (self.running if runs else self.waiting).append(turn)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        turn = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        for following in self.admission.end(turn):
            self.began(following)
        if id(turn) in self.left:
            self.left.remove(id(turn))
        else:
            self.admission.leave(turn.place)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave_while_waiting(self, data: st.DataObject) -> None:
        turn = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.admission.leave(turn.place, turn)

    @precondition(lambda self: any(id(turn) not in self.left for turn in self.running))
    @rule(data=st.data())
    def leave_while_running(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from([t for t in self.running if id(t) not in self.left]))
        assert not self.admission.leave(turn.place, turn)
        self.left.add(id(turn))

    def holders(self) -> list[int]:
        turns = self.waiting + self.running
        return [place.caller for place in self.placed + [turn.place for turn in turns]]

    @invariant()
    def bounds_hold(self) -> None:
        assert self.admission.count == len(self.holders())
        assert len(self.running) <= 4
        callers = Counter(turn.place.caller for turn in self.running)
        subjects = Counter(turn.subject for turn in self.running)
        assert max([*callers.values(), *subjects.values()], default=0) <= 2

    @invariant()
    def nobody_waits_who_may_run(self) -> None:
        callers = Counter(turn.place.caller for turn in self.running)
        subjects = Counter(turn.subject for turn in self.running)
        if len(self.running) == 4:
            return
        firsts: dict[object, CallTurn] = {}
        for turn in self.waiting:
            firsts.setdefault((turn.place.caller, turn.line), turn)
        for turn in firsts.values():
            assert callers[turn.place.caller] == 2 or subjects[turn.subject] == 2


TestAdmission = AdmissionMachine.TestCase


def turns(admission: Admission, caller: int, lines: str) -> list[CallTurn]:
    """Return turns of one caller, one for each line name in `lines`. All have begun."""
    made = [CallTurn(line, admission.enter(caller), lambda: None) for line in lines]
    for turn in made:
        admission.begin(turn)
    return made


def test_callers_take_turns_and_so_do_the_connections_of_each() -> None:
    admission = Admission(AdmissionLimits(100, 1))
    (running,) = turns(admission, 1, "0")
    flood, quiet = turns(admission, 1, "aabbc"), turns(admission, 2, "x")
    order = []
    while following := admission.end(running):
        (running,) = following
        order.append(running.line)
    assert order == ["a", "x", "b", "c", "a", "b"]
    assert {turn.place.uses for turn in flood + quiet} == {1}, "of the call itself"
