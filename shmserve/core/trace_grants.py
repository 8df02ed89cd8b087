"""Which trace stands in which file: numbers that hold for all processes together. Pure."""

from __future__ import annotations

from msgspec import Struct

ALL_IN_ONE = -1  # the place of traces that are in the file without a number


class GrantedTraces(Struct, frozen=True, array_like=True):
    """Traces that may be written.

    Attributes:
        count: how many.
        first: the id of the first of them, those of steps among them.
        places: in their order, how many go to the file of which number.
    """

    count: int = 0
    first: int = 1
    places: tuple[tuple[int, int], ...] = ()


class TraceFiles(Struct, frozen=True, array_like=True):
    """How far they are.

    Attributes:
        traces: how many there have been, with those of steps: each has an id.
        begun: how many files with numbers have been begun.
        open: by scope, a model or (empty) all that have no own frequency: the file's number, how
            many it holds, and how many it will.
    """

    traces: int = 0
    begun: int = 0
    open: dict[str, tuple[int, int, int]] = {}

    def allot(
        self, scope: str, frequency: int, count: int, ids: int
    ) -> tuple[TraceFiles, GrantedTraces]:
        """After `count` more traces that need so many `ids` with those within them, of files that
        get `frequency` each (0: all in one)."""
        ids, first = self.traces + ids, self.traces + 1
        if not frequency:
            granted = GrantedTraces(count, first, ((ALL_IN_ONE, count),))
            return TraceFiles(ids, self.begun, self.open), granted
        begun, left = self.begun, count
        number, held, size = self.open.get(scope, (ALL_IN_ONE, 0, 0))
        places: list[tuple[int, int]] = []
        while left:
            if held >= size or size != frequency:
                number, held, size, begun = begun, 0, frequency, begun + 1
            here = min(left, size - held)
            places.append((number, here))
            held, left = held + here, left - here
        opened = {**self.open, scope: (number, held, size)}
        return TraceFiles(ids, begun, opened), GrantedTraces(count, first, tuple(places))
