"""Trace grants: the trace file and the ids of each trace, numbered across all processes. Pure."""

from __future__ import annotations

from msgspec import Struct

ALL_IN_ONE = -1  # file number of traces that go to the file without a number


class GrantedTraces(Struct, frozen=True, array_like=True):
    """Traces that a process may write. `count`: number of traces. `first`: first of the traces'
    ids; traces of steps take ids, too. `places`: (file number, number of traces for the file), in
    order."""

    count: int = 0
    first: int = 1
    places: tuple[tuple[int, int], ...] = ()


class TraceFiles(Struct, frozen=True, array_like=True):
    """Numbers of traces and trace files so far.

    Attributes:
        traces: ids used so far, by traces and traces of steps.
        begun: numbered files begun so far.
        open: scope -> (file number, traces in the file, capacity of the file). A scope is a model,
            or empty for all models without their own frequency.
    """

    traces: int = 0
    begun: int = 0
    open: dict[str, tuple[int, int, int]] = {}

    def allot(
        self, scope: str, frequency: int, count: int, ids: int
    ) -> tuple[TraceFiles, GrantedTraces]:
        """Return the numbers after `count` more traces, and the granted traces.

        `ids`: ids needed by the traces and the traces within them. `frequency`: traces per file;
        0: all in one file.
        """
        ids, first = self.traces + ids, self.traces + 1
        if not frequency:
            granted = GrantedTraces(count, first, ((ALL_IN_ONE, count),))
            return TraceFiles(ids, self.begun, self.open), granted
        begun, remaining = self.begun, count
        number, filled, size = self.open.get(scope, (ALL_IN_ONE, 0, 0))
        places: list[tuple[int, int]] = []
        while remaining:
            if filled >= size or size != frequency:
                number, filled, size, begun = begun, 0, frequency, begun + 1
            share = min(remaining, size - filled)
            places.append((number, share))
            filled, remaining = filled + share, remaining - share
        opened = {**self.open, scope: (number, filled, size)}
        return TraceFiles(ids, begun, opened), GrantedTraces(count, first, tuple(places))
