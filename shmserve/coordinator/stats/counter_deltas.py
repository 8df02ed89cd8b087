"""What processes have counted since the last look at their pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shmserve.coordinator.stats.counter_totals import CounterReading
from shmserve.core.stats import aggregation
from shmserve.core.stats.counter_pages import add_each

Model = tuple[str, str]  # name, version


class CounterDeltas:
    """What was counted between two looks, whoever has begun or ended meanwhile.

    Each process is compared with itself. One that is new counts from zero; one that an earlier
    coordinator may have known counts from where it is found: the rest was its.
    """

    def __init__(self) -> None:
        self._last: dict[str, dict[Model, list[int]]] = {}
        self._readings: dict[str, CounterReading] = {}
        self._ended: dict[Model, list[int]] = {}

    def ended(self, reading: CounterReading) -> None:
        """A process is over; this is all it has counted."""
        self._readings.pop(reading.owner.process, None)
        last = self._last.pop(reading.owner.process, None)
        if last is not None:
            _compare(_rows(reading), last, self._ended)

    def since(
        self, readings: Sequence[CounterReading], is_new: Callable[[int], bool]
    ) -> dict[Model, list[int]]:
        """By model version, since the last call; without those where nothing was.

        `is_new`: whether the process of this pid has counted in this coordinator's time only.
        """
        grown_by_model, self._ended = self._ended, {}
        for reading in readings:
            process = reading.owner.process
            if self._readings.get(process) is reading:  # nothing has changed
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
