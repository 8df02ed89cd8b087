"""Places of a stream against a short model: begins, answers and bounds."""

from collections import defaultdict
from collections.abc import Hashable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmserve.frontends.grpc.inference.stream_order import StreamOrder, StreamPlace

LIMIT_BYTES = 10


class OrderMachine(RuleBasedStateMachine):
    @initialize(limit=st.integers(1, 6))
    def begin(self, limit: int) -> None:
        self.order: StreamOrder[StreamPlace] = StreamOrder(limit)
        self.limit = limit
        self.entered: list[StreamPlace] = []  # with `in_order`
        self.due: list[StreamPlace] = []
        self.running: list[StreamPlace] = []
        self.lines: dict[Hashable, list[StreamPlace]] = defaultdict(list)  # begun or waiting
        self.bytes: dict[StreamPlace, int] = {}

    def _begun(self, place: StreamPlace) -> None:
        line = self.lines[place.sequence] if place.sequence is not None else [place]
        assert line[0] is place
        assert place not in self.running
        self.running.append(place)

    def _passed(self, place: StreamPlace) -> None:
        waits = place.sequence is not None and not place.passed
        following = self.order.passed(place)
        if waits:
            line = self.lines[place.sequence]
            assert line.pop(0) is place
            assert following is (line[0] if line else None)
        else:
            assert following is None
        if following is not None:
            self._begun(following)

    @rule(
        in_order=st.booleans(),
        nbytes=st.integers(0, 12),
        sequence=st.none() | st.integers(1, 3),
    )
    def enter(self, in_order: bool, nbytes: int, sequence: int | None) -> None:
        kept = sum(self.bytes.values())
        room = len(self.bytes) < self.limit and kept <= LIMIT_BYTES
        assert self.order.has_room(LIMIT_BYTES) is room
        if not room:
            assert self.bytes  # a request alone always has room
            return
        place = StreamPlace(in_order, nbytes, sequence)
        self.bytes[place] = nbytes
        if in_order:
            self.entered.append(place)
        if sequence is not None:
            self.lines[sequence].append(place)
        if self.order.enter(place):
            self._begun(place)
        else:
            assert self.lines[sequence][0] is not place

    @rule(data=st.data())
    def pass_early(self, data: st.DataObject) -> None:
        if self.running:
            self._passed(data.draw(st.sampled_from(self.running)))

    @rule(data=st.data(), nbytes=st.integers(0, 5))
    def finish(self, data: st.DataObject, nbytes: int) -> None:
        if not self.running:
            return
        place = data.draw(st.sampled_from(self.running))
        self.running.remove(place)
        self._passed(place)
        if not place.in_order:
            self.order.leave(place)
            del self.bytes[place]
            return
        self.bytes[place] += nbytes
        self.due += self.order.finish(place, nbytes)

    @rule()
    def answer(self) -> None:
        if self.due:
            place = self.due.pop(0)
            assert place is self.entered.pop(0)
            self.order.leave(place)
            del self.bytes[place]

    @invariant()
    def what_is_due_is_due(self) -> None:
        """No answer waits if all earlier answers are known."""
        if not hasattr(self, "order"):
            return
        known = []
        for place in self.entered:
            if not place.finished:
                break
            known.append(place)
        assert self.due == known
        assert list(self.order.places) == list(self.bytes)
        assert self.order.nbytes == sum(self.bytes.values())


TestOrder = OrderMachine.TestCase
