"""Stream order: places of the requests of one stream, and the order of their answers. Pure.

A request has a place from its start until its answer is taken to be sent, so a stream's requests
and waiting answers are bounded together. Requests run side by side, with two exceptions:

- a sequence's requests begin in order, each once the earlier request has passed;
- answers of requests with `in_order` are due in the order of requests.

Invariants (tests/property/test_stream_order_properties.py):
- answers with `in_order` are due exactly once, in the order in which requests entered;
- between a request's begin and pass, no other request of the sequence begins.
"""

from collections import deque
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar


class StreamPlace:
    """Place of a request.

    Attributes:
        in_order: True if the request's answer waits for the answers of earlier requests.
        nbytes: bytes kept by the request, and by the answer as far as expected or known.
        expected: bytes of the answer, as expected before the answer is known.
        sequence: sequence of the request, or None.
        passed: True once later requests of the sequence need not wait for this request.
        finished: True once the request's answer is known.
    """

    __slots__ = ("expected", "finished", "in_order", "nbytes", "passed", "sequence")

    def __init__(
        self, in_order: bool, nbytes: int, sequence: Hashable = None, expected: int = 0
    ) -> None:
        self.in_order = in_order
        self.nbytes = nbytes + expected
        self.expected = expected
        self.sequence = sequence
        self.passed = sequence is None
        self.finished = False


Place = TypeVar("Place", bound=StreamPlace)


class StreamOrder(Generic[Place]):
    """Places of a stream. `limit`: largest number of places. `places`: all places, the earliest
    first. `nbytes`: bytes kept by all places."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.places: dict[Place, None] = {}
        self.nbytes = 0
        self._unanswered: deque[Place] = deque()  # with `in_order`, whose answers are not due yet
        self._sequences: dict[Hashable, deque[Place]] = {}  # places that have not passed

    def has_room(self, limit_bytes: int) -> bool:
        """Return True if another request may enter. `limit_bytes`: bytes beyond which no request
        may enter beside earlier requests."""
        return len(self.places) < self._limit and self.nbytes <= limit_bytes

    @property
    def unanswered(self) -> Collection[Place]:
        """Places with `in_order` without a due answer."""
        return self._unanswered

    def is_next(self, place: Place) -> bool:
        """Return True if no earlier place with `in_order` waits for an answer."""
        return bool(self._unanswered) and self._unanswered[0] is place

    def enter(self, place: Place) -> bool:
        """Give a request a place. Return True if the request begins now. Return False if the
        request begins when `passed` returns its place."""
        self.places[place] = None
        self.nbytes += place.nbytes
        if place.in_order:
            self._unanswered.append(place)
        if place.sequence is None:
            return True
        line = self._sequences.setdefault(place.sequence, deque())
        line.append(place)
        return len(line) == 1

    def passed(self, place: Place) -> Place | None:
        """Let the next request of the sequence of a begun request begin. Return the next request's
        place, or None if no request waits. Idempotent."""
        if place.passed:
            return None
        place.passed = True
        line = self._sequences[place.sequence]
        line.popleft()
        if line:
            return line[0]
        del self._sequences[place.sequence]
        return None

    def finish(self, place: Place, nbytes: int = 0) -> list[Place]:
        """Note that a request's answer, which keeps `nbytes` bytes, is known. Return the places
        whose answers are due now, in order."""
        place.finished = True
        nbytes -= place.expected
        place.nbytes += nbytes
        self.nbytes += nbytes
        due: list[Place] = []
        while self._unanswered and self._unanswered[0].finished:
            due.append(self._unanswered.popleft())
        return due

    def leave(self, place: Place) -> None:
        """Free the place of a request whose answers were taken."""
        del self.places[place]
        self.nbytes -= place.nbytes
