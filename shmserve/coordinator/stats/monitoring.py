"""Once a second: what all processes have counted, hold and use becomes history.

Everything is read off pages of counters, /proc and the coordinator's own books; executors are
asked for the values that models report about themselves. No process waits for any of it, and
requests never come near. The history ends with this process.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from shmserve.coordinator.stats.counter_deltas import Growth, Model
from shmserve.coordinator.stats.counter_totals import Counters, Reading, Send
from shmserve.coordinator.stats.incident_detector import Watch
from shmserve.coordinator.stats.process_usage import Uses
from shmserve.core.control.reconciler import Fleet
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.stats import aggregation as rates
from shmserve.core.stats import model_metrics as reported
from shmserve.core.stats.counter_pages import add_each
from shmserve.core.stats.time_series import LEVELS, History, Kind, Sample
from shmserve.observe.gpu_use import MOST as MOST_GPUS
from shmserve.observe.gpu_use import GpuUse
from shmserve.protocol.control.history_messages import (
    AskHistory,
    GpuHistory,
    HistoryReport,
    ModelHistory,
    ValueHistory,
)
from shmserve.protocol.control.link_messages import AskStats
from shmserve.protocol.control.stats_messages import GpuReport

_MAX_VALUES = 512  # names that models report, of all models
_TOTAL, _SYSTEM = ("total",), ("system",)
_ROLES = ("http", "grpc", "executor", "coordinator", "supervisor")
_GAUGES = ("connections", "slots", "slot_bytes", "abandoned")
_MODEL_KIND = Kind(
    rates.MODEL_COLUMNS,
    rates.WIDTH,
    rates.of_model,
    (("depth", "max"), ("cpu", "mean"), ("memory", "mean")),
)
_TOTAL_KIND = Kind(rates.ALL_COLUMNS, rates.WIDTH, rates.of_all, (("depth", "max"),))
_SYSTEM_KIND = Kind(
    (),
    0,
    None,
    (
        ("cpu", "mean"),
        *((f"cpu_{role}", "mean") for role in _ROLES),
        ("memory", "mean"),
        ("memory_percent", "mean"),
        ("pool_used", "mean"),
        *((name, "mean") for name in _GAUGES),
        ("regions", "mean"),
        ("region_bytes", "mean"),
        ("processes", "mean"),
    ),
)
_GPU_COLUMNS = ("utilization", "memory", "temperature", "power")
_GPU_KIND = Kind((), 0, None, tuple((name, "mean") for name in _GPU_COLUMNS))
_VALUE_KINDS = {
    **{kind: Kind((), 0, None, (("value", way),)) for kind, way in reported.KINDS.items()},
    reported.CDF: Kind(
        (), 0, None, tuple((f"p{percent}", "mean") for percent in reported.CDF_COLUMNS)
    ),
}
Samples = dict[Hashable, tuple[Kind, Sample]]


class Monitoring:
    """See the module.

    Args:
        counters, fleet, book, gpus: what is read.
        send: to a process, if it is there.
        epoch: the service's.
        models: how many model versions a frontend counts apart.
        again: there was a coordinator before in this epoch.
        now: of a monotonic clock.

    Attributes:
        due: when `tick` has something to do.
    """

    def __init__(
        self,
        counters: Counters,
        fleet: Fleet,
        book: RegionBook,
        gpus: GpuUse,
        send: Send,
        epoch: str,
        models: int,
        again: bool,
        now: float,
    ) -> None:
        # In the middle of the clock's seconds, by which executors put values together: an
        # answer is of the second before, and of each second there is one
        self._start = self._sampled_at = math.floor(now - 0.5) + 0.5
        self.due = self._start + 1.0
        self._counters = counters
        self._fleet = fleet
        self._book = book
        self._gpus = gpus
        self._send = send
        self._life = f"{epoch}-{time.time_ns():x}"
        self._again = again
        self._history = History(2 * models + _MAX_VALUES + MOST_GPUS + 2)
        self._growth = Growth()
        self._uses = Uses(now)
        self._watch = Watch(counters.ends)
        self._told: dict[str, dict[str, reported.Reported]] = {}
        self._latest: list[float] = []
        self._distributions: dict[Hashable, Sequence[float]] = {}
        counters.on_end = self._growth.ended

    def tick(self, now: float) -> None:
        """Sample if that is due."""
        if now < self.due:
            return
        elapsed = int(now - self._start)
        self.due = self._start + elapsed + 1.0
        self._sample(elapsed - 1, now)
        self._told.clear()
        for record in self._fleet.processes.values():
            if record.role == "executor":
                self._send(record.name, AskStats(0, "values"))

    def told(self, process: str, stats: Mapping[str, Any]) -> None:
        """An executor's answer to our question, if it is one."""
        if "values" in stats:
            self._told[process] = reported.parse(stats["values"])

    def report(self, asked: AskHistory, now: float) -> HistoryReport | None:
        """What a frontend asked for; None: there is no such level."""
        if not 0 <= asked.level < len(LEVELS):
            return None
        history, level = self._history, asked.level
        since = asked.since if asked.life == self._life else 0
        first, until = history.span(level, since)
        values: list[ValueHistory] = []
        models: list[ModelHistory] = []
        gpus: list[GpuHistory] = []
        for key, track in history.tracks.items():
            columns = track.part(level, first, until, history.runs(level))
            match key:
                case ("value", str(model), str(version), str(name), str(kind)):
                    latest = tuple(self._distributions.get(key, ()))
                    values.append(ValueHistory(model, version, name, kind, columns, latest))
                case ("gpu", int(index), str(uuid), str(name)):
                    gpus.append(GpuHistory(uuid, index, name, columns))
                case ("model", str(model), str(version)) if not asked.brief:
                    models.append(ModelHistory(model, version, columns))
        brief = asked.brief
        return HistoryReport(
            self._life,
            level,
            first,
            until,
            history.runs(level),
            time.time() - (now - self._start) + until * LEVELS[level].seconds,
            now - self._start,
            history.part(_TOTAL, level, since),
            history.part(_SYSTEM, level, since),
            tuple(values),
            tuple(self._latest),
            tuple(models),
            () if brief else self._uses.list(self._fleet, now),
            () if brief else self._watch.troubles.list(),
            None if brief else self._counters.report(self._fleet, self._book, self._gpus.latest()),
            self._uses.machine,
            os.cpu_count() or 0,
            tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        )

    def exited(self, instance: str, why: str) -> None:
        """An executor has ended that should have gone on."""
        self._watch.troubles.add(time.time(), instance, why)

    # ------------------------------------------------------------------- inside

    def _is_new(self, pid: int) -> bool:
        """Whether all that the process has counted came about in our time."""
        return not self._again or self._uses.is_new(pid)

    def _sample(self, second: int, now: float) -> None:
        seconds, self._sampled_at = now - self._sampled_at, now
        readings = self._counters.readings()
        self._uses.look(self._fleet, now)
        counts = self._growth.since(readings, self._is_new)
        wall = time.time()
        for (model, version), grown in counts.items():
            self._watch.requests(wall, model, version, grown)
        self._watch.look(wall, self._fleet, self._book, self._counters.ends)
        samples: Samples = {}
        self._models(samples, readings, counts)
        samples[_SYSTEM] = _SYSTEM_KIND, Sample(gauges=self._system(readings))
        for gpu in self._gpus.latest():
            key = ("gpu", gpu.index, gpu.uuid, gpu.name)
            samples[key] = _GPU_KIND, Sample(gauges=_gauges(gpu))
        self._values(samples, readings)
        self._history.add(second, seconds, samples)

    def _models(
        self, samples: Samples, readings: Sequence[Reading], counts: Mapping[Model, list[int]]
    ) -> None:
        gauges: dict[Model, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for reading in readings:
            owner = reading.owner
            use = self._uses.of(owner.pid)
            if owner.role == "executor":
                sums = gauges[owner.model, owner.version]
                for index, value in enumerate((reading.depth, use.cpu_percent, use.private)):
                    sums[index] += value
        total = [0] * rates.WIDTH
        slowest = 0
        for model in {*gauges, *counts}:
            grown = counts.get(model, ())
            top = rates.slowest_ns(grown) if grown else 0
            sample = Sample(grown, top, gauges.get(model, ()))
            samples["model", *model] = _MODEL_KIND, sample
            slowest = max(slowest, top)
            if grown:
                add_each(total, grown)
        depth = sum(values[0] for values in gauges.values())
        samples[_TOTAL] = _TOTAL_KIND, Sample(total, slowest, [depth])
        self._latest = rates.distribution_ms(total, slowest)

    def _system(self, readings: Sequence[Reading]) -> list[float]:
        uses, regions = self._uses, self._book.regions.values()
        pool = self._fleet.ledger.total
        by_role = [uses.cpu_of(role) for role in _ROLES]
        memory = uses.memory
        share = 100 * (memory + pool) / uses.machine if uses.machine else math.nan
        held = [sum(getattr(reading.gauges, name) for reading in readings) for name in _GAUGES]
        return [
            sum(by_role),
            *by_role,
            memory,
            share,
            pool,
            *held,
            len(regions),
            sum(region.byte_size for region in regions),
            uses.count,
        ]

    def _values(self, samples: Samples, readings: Sequence[Reading]) -> None:
        parts: dict[tuple[str, str, str], list[reported.Reported]] = defaultdict(list)
        for reading in readings:
            owner = reading.owner
            for name, one in self._told.get(owner.process, {}).items():
                parts[owner.model, owner.version, name].append(one)
        self._distributions.clear()
        for of, some in parts.items():
            one = reported.merged(some)
            key = ("value", *of, one.kind)
            samples[key] = _VALUE_KINDS[one.kind], Sample(gauges=reported.gauges(one))
            if one.kind == reported.CDF:
                self._distributions[key] = one.points


def _gauges(gpu: GpuReport) -> list[float]:
    """By `_GPU_COLUMNS`."""
    percent = None if gpu.utilization is None else 100 * gpu.utilization
    found = (percent, gpu.memory_used, gpu.temperature, gpu.power)
    return [math.nan if value is None else value for value in found]
