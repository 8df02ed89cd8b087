"""A stream's life against a short model: which side may send, and how much."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmserve.core.scheduling.stream_flow import TRANSITIONS, Flow, Gate, StreamEvent, StreamState
from shmserve.errors import ProtocolViolation


def test_every_event_but_the_models_own_mistakes_is_allowed_everywhere() -> None:
    missing = {
        (state, event)
        for state in StreamState
        for event in StreamEvent
        if event not in TRANSITIONS[state]
    }
    assert missing == {
        (StreamState.CLOSED, StreamEvent.SEND),
        (StreamState.CLOSED, StreamEvent.FINISH),
    }


class StreamMachine(RuleBasedStateMachine):
    @initialize(credit=st.integers(1, 5))
    def begin(self, credit: int) -> None:
        self.flow = Flow(credit)
        self.limit = credit
        self.on_the_way = 0  # answers sent and not acknowledged
        self.finished = self.failed = self.muted = False
        self.finals = 0  # final answers that were sent

    @rule(full=st.booleans(), final=st.booleans())
    def send(self, full: bool, final: bool) -> None:
        if not (full or final):
            return
        if self.finished:
            with pytest.raises(ProtocolViolation):
                self.flow.send(full, final)
            return
        gate = self.flow.send(full, final)
        if self.failed:
            assert gate is Gate.DROP
        elif self.muted:
            assert gate is (Gate.GO if final else Gate.DROP)
        elif full and self.on_the_way == self.limit:
            assert gate is Gate.WAIT
        else:
            assert gate is Gate.GO
            self.on_the_way += full
        if gate is Gate.WAIT:
            return
        if final and not self.failed:
            self.finished = True
            self.finals += 1

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.limit))
        if count > self.on_the_way:
            with pytest.raises(ProtocolViolation):
                self.flow.grant(count)
        else:
            self.flow.grant(count)
            self.on_the_way -= count

    @rule()
    def cancel_or_frontend_dies(self) -> None:
        changed = self.flow.apply(StreamEvent.MUTE)
        assert changed is (not (self.muted or self.finished or self.failed))
        self.muted = self.muted or changed

    @rule()
    def model_raises_or_lets_go(self) -> None:
        changed = self.flow.apply(StreamEvent.FAIL)
        assert changed is (not (self.finished or self.failed))
        self.failed = self.failed or changed
        self.finals += changed  # the server sends the final answer

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "flow"):
            return
        assert self.flow.credit == self.limit - self.on_the_way >= 0
        assert self.flow.live is (not (self.finished or self.failed))
        # exactly one final answer, at the end
        assert self.finals == (self.finished or self.failed)


TestStream = StreamMachine.TestCase
