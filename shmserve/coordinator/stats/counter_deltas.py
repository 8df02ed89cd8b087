"""Counter deltas: growth of processes' counts between two looks at their counter pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shmserve.coordinator.stats.counter_totals import CounterReading
from shmserve.core.stats import aggregation
from shmserve.core.stats.counter_pages import add_each

Model = tuple[str, str]  # name, version


class CounterDeltas:
    """Growth of counts between two looks, while processes start and end.

    Each process is compared only with itself. A new process counts from zero. A process that an
    earlier coordinator may have known counts from the first look, because the earlier coordinator
    has already used the counts before.
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[Model, list[int]]] = {}
        self._readings: dict[str, CounterReading] = {}
        self._ended: dict[Model, list[int]] = {}

    def ended(self, reading: CounterReading) -> None:
        """Take in the final counts of an ended process."""
        self._readings.pop(reading.owner.process, None)
        last = self._last.pop(reading.owner.process, None)
        if last is not None:
            _compare(_rows(reading), last, self._ended)

    def since(
        self, readings: Sequence[CounterReading], is_new: Callable[[int], bool]
    ) -> dict[Model, list[int]]:
        """Return the growth since the last call by model version, without versions that did not
        grow. `is_new`: returns True if the process with this pid has counted only during this
        coordinator's life."""
        grown_by_model, self._ended = self._ended, {}
        for reading in readings:
            process = reading.owner.process
            if self._readings.get(process) is reading:  # unchanged
                continue
            self._readings[process] = reading
            rows = _rows(reading)
            last = self._last.get(process)
            if last is None:
                last = {} if is_new(reading.owner.pid) else rows
            _compare(rows, last, grown_by_model)
            self._last[process] = rows
        return grown_by_model


def _rows(reading: CounterReading) -> dict[Model, list[int]]:
    if reading.runs is not None:
        return {(reading.owner.model, reading.owner.version): aggregation.from_runs(reading.runs)}
    return {model: aggregation.from_requests(counts) for model, counts in reading.rows.items()}


def _compare(
    now: Mapping[Model, list[int]], last: Mapping[Model, list[int]], into: dict[Model, list[int]]
) -> None:
    for model, counts in now.items():
        earlier = last.get(model)
        if counts == earlier:
            continue
        grown = aggregation.growth(counts, earlier or [0] * aggregation.WIDTH)
        if any(grown):
            add_each(into.setdefault(model, [0] * aggregation.WIDTH), grown)
