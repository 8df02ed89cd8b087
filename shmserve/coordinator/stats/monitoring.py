"""Monitoring: samples counts, holdings and usage of all processes into the history once a second.

The coordinator reads counter pages, /proc and its own books in the middle of the clock's second.
Only executors whose page shows values reported by the model are asked. No process waits for
sampling, and no request is involved. The coordinator alone keeps the history, so every HTTP worker
answers alike. `history_file` keeps the history for the next coordinator.

If no page has changed, /proc is read at most every five seconds, and the sample repeats the last.
`counter_deltas` compares each process with itself, so processes may start and end. After a
coordinator's restart, older processes count from the first look.

Measured on 2 cores, shared: 0.8 ms a second for 5 models and 3 frontends, 20 ms for 128 models and
6 frontends with all of them busy.
"""

from __future__ import annotations

import math
import operator
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from shmserve.coordinator.stats.counter_deltas import CounterDeltas, Model
from shmserve.coordinator.stats.counter_totals import CounterReading, Send
from shmserve.coordinator.stats.process_usage import ProcessUsage
from shmserve.coordinator.stats.stats_sources import StatsSources
from shmserve.core.control.lifecycle import State
from shmserve.core.control.records import refused
from shmserve.core.stats import aggregation, model_metrics, time_series
from shmserve.core.stats.counter_pages import add_each
from shmserve.core.stats.event_ring import RecordedEvent
from shmserve.core.stats.incidents import Incidents
from shmserve.core.stats.request_counters import Reason
from shmserve.observe.gpu_use import MOST as MOST_GPUS
from shmserve.protocol.control import history_messages as wire
from shmserve.protocol.control.link_messages import AskStats
from shmserve.protocol.control.stats_messages import GpuReport, RequestFailed

_MAX_VALUES = 512  # most names of reported values, over all models
_TOTAL, _SYSTEM = ("total",), ("system",)
_ROLES = ("http", "grpc", "executor", "coordinator", "supervisor")
_GAUGES = ("connections", "slots", "slot_bytes", "abandoned")
_MODEL_KIND = time_series.SeriesKind(
    aggregation.MODEL_COLUMNS,
    aggregation.WIDTH,
    aggregation.of_model,
    (("depth", "max"), ("cpu", "mean"), ("memory", "mean")),
)
_TOTAL_KIND = time_series.SeriesKind(
    aggregation.ALL_COLUMNS, aggregation.WIDTH, aggregation.of_all, (("depth", "max"),)
)
_SYSTEM_KIND = time_series.means(
    "cpu",
    *(f"cpu_{role}" for role in _ROLES),
    *("memory", "memory_percent", "pool_used"),
    *_GAUGES,
    *("regions", "region_bytes", "processes"),
)
_GPU_KIND = time_series.means("utilization", "memory", "temperature", "power")
_VALUE_KINDS = {
    **{
        kind: time_series.SeriesKind(gauges=(("value", way),))
        for kind, way in model_metrics.KINDS.items()
    },
    model_metrics.CDF: time_series.means(*(f"p{percent}" for percent in model_metrics.CDF_COLUMNS)),
}
Readings = Sequence[CounterReading]
Counts = Mapping[Model, list[int]]
Samples = dict[time_series.Key, tuple[time_series.SeriesKind, time_series.Sample]]


class Monitoring:
    """History of the service, sampled once a second.

    `models`: most model versions counted separately by a frontend. `again`: true if this epoch had
    an earlier coordinator. `due`: monotonic time of the next sample. `resting`: idle executors, as
    far as visible from outside, with no request waiting. `usage`: use of the machine by process.
    """

    def __init__(
        self, sources: StatsSources, send: Send, epoch: str, models: int, again: bool, now: float
    ) -> None:
        # Sample in the middle of the clock's second. Executors gather values by the clock's
        # seconds, so each answer is about the second before, and each second has exactly one
        # answer.
        self._start = self._sampled_at = math.floor(now - 0.5) + 0.5
        self.due = self._start + 1.0
        self._sources = sources
        self._send = send
        self._life = f"{epoch}-{time.time_ns():x}"
        self._again = again
        self._history = time_series.TimeSeries(2 * models + _MAX_VALUES + MOST_GPUS + 2)
        self._deltas = CounterDeltas()
        self.usage = ProcessUsage(now)
        self.incidents = Incidents()
        self._metrics: dict[str, dict[str, model_metrics.ModelMetrics]] = {}
        # number of values, and second of the last change
        self._reported: dict[str, tuple[int, int]] = {}
        self._latest: list[float] = []
        self._readings: Readings = ()
        # samples of the last second, if nothing was counted
        self._of_models: Samples | None = None
        self.resting: frozenset[str] = frozenset()
        self._distributions: dict[time_series.Key, Sequence[float]] = {}

    def tick(self, now: float) -> None:
        """Take a sample when due."""
        if now < self.due:
            return
        elapsed = int(now - self._start)
        self.due = self._start + elapsed + 1.0
        self._ask(self._sample(elapsed - 1, now), elapsed)

    def saved(self, now: float) -> time_series.SavedSeries:
        """Return the history, for `resume`."""
        return self._history.saved(time.time() - (now - self._start) + self._history.next)

    def resume(self, saved: time_series.SavedSeries) -> None:
        """Continue an earlier history. Call before the first `tick`. The time in between has no
        values; if the clock was set back meanwhile, there is no gap."""
        gap = max(0, round(time.time() - saved.ended))
        self._history.restore(saved, gap, _kind_of)
        self._start -= self._history.next

    def _ask(self, readings: Readings, second: int) -> None:
        """Ask executors for values that may have changed: models that reported in this second or
        the last, or whose latest answer counted values. Answers of other executors, with empty
        counts, stay valid."""
        reported, metrics = self._reported, self._metrics
        self._reported, self._metrics = {}, {}
        for reading in readings:
            if reading.runs is None:
                continue
            process = reading.owner.process
            count, since = reported.get(process, (0, -2))
            if reading.values != count:
                since = second
            self._reported[process] = reading.values, since
            known = metrics.get(process, {})
            if second - since <= 1 or any(metric.count for metric in known.values()):
                self._send(process, AskStats(0, "values"))
            elif known:
                self._metrics[process] = known

    def answered(self, process: str, stats: Mapping[str, Any]) -> None:
        """Take in values of an executor. Other numbers are ignored."""
        if "values" in stats:
            self._metrics[process] = model_metrics.parse(stats["values"])

    def report(self, asked: wire.AskHistory, now: float) -> wire.HistoryReport | None:
        """Return the history that a frontend asked for. Return None if the level does not exist."""
        if not 0 <= asked.level < len(time_series.LEVELS):
            return None
        history, level = self._history, asked.level
        since = asked.since if asked.life == self._life else 0
        first, until = history.span(level, since)
        values: list[wire.ValueHistory] = []
        models: list[wire.ModelHistory] = []
        gpus: list[wire.GpuHistory] = []
        for key, track in history.tracks.items():
            columns = track.part(level, first, until, history.runs(level))
            match key:
                case ("value", str(model), str(version), str(name), str(kind)):
                    latest = tuple(self._distributions.get(key, ()))
                    values.append(wire.ValueHistory(model, version, name, kind, columns, latest))
                case ("gpu", int(index), str(uuid), str(name)):
                    gpus.append(wire.GpuHistory(uuid, index, name, columns))
                case ("model", str(model), str(version)) if not asked.brief:
                    models.append(wire.ModelHistory(model, version, columns))
        brief = asked.brief
        return wire.HistoryReport(
            self._life,
            level,
            first,
            until,
            history.runs(level),
            time.time() - (now - self._start) + until * time_series.LEVELS[level].seconds,
            now - self._start,
            history.part(_TOTAL, level, since),
            history.part(_SYSTEM, level, since),
            tuple(values),
            tuple(self._latest),
            tuple(models),
            () if brief else self.usage.list(self._sources.reconciler, now),
            () if brief else self.incidents.list(),
            None if brief else self._sources.report(),
            self.usage.machine,
            os.cpu_count() or 0,
            tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        )

    def rates(self) -> dict[Model, float]:
        """Return requests per second in the last second, by model version, without idle
        versions."""
        _, until = self._history.span(0)
        rates: dict[Model, float] = {}
        for key, track in self._history.tracks.items():
            match key:
                case ("model", str(model), str(version)) if until:
                    (rate,) = track.part(0, until - 1, until, running=False)["requests"]
                    if rate:
                        rates[model, version] = rate
        return rates

    def take_over(self) -> None:
        """Record failures that an earlier coordinator saw and that persist."""
        reconciler = self._sources.reconciler
        unserved = {**refused(reconciler.models.by_name.values()), **reconciler.failures}
        for name, reason in unserved.items():
            self.happened("model failed", name, reason)
        for record in reconciler.instances.values():
            if record.state is State.FAILED and not record.left:
                self.happened("instance failed", record.name, record.reason)

    def ended(self, reading: CounterReading) -> None:
        self._deltas.ended(reading)
        self.happened("process ended", reading.owner.role)

    def told(self, failed: RequestFailed) -> None:
        """Note the error text sent to the client of a failed request."""
        if 0 <= failed.reason < len(Reason):
            reason = Reason(failed.reason)
            self._failed((failed.model, failed.version), reason, 0, failed.text)

    def happened(
        self, kind: str, subject: str, text: str = "", count: int = 1, said: str = ""
    ) -> None:
        """Record an event as an incident."""
        now = time.time()
        self.incidents.take(RecordedEvent(0, now, now, kind, subject, text, count, said))

    def _failed(self, model: Model, reason: Reason, count: int, said: str = "") -> None:
        self.happened("request failed", "/".join(model), reason.name.lower(), count, said)

    def _sample(self, second: int, now: float) -> Readings:
        seconds, self._sampled_at = now - self._sampled_at, now
        last, self._readings = self._readings, self._sources.counters.readings()
        readings = self._readings
        idle = len(readings) == len(last) and all(map(operator.is_, readings, last))
        looked = self.usage.look(self._sources.reconciler, now, idle)
        again = self._again  # without an earlier coordinator all counts are from our time
        changed = () if idle else readings
        counts = self._deltas.since(changed, lambda pid: not again or self.usage.is_new(pid))
        for model, grown in counts.items():
            for reason, count in zip(Reason, aggregation.failures(grown), strict=True):
                if count:
                    self._failed(model, reason, count)
        if counts or looked or not idle or self._of_models is None:
            sent = in_flight(readings)
            models = self._models(readings, counts, sent)
            self._of_models = None if counts else models
            self.resting = self._resting(readings, sent)
        else:
            models = self._of_models
        samples = dict(models)
        samples[_SYSTEM] = _SYSTEM_KIND, time_series.Sample(gauges=self._system(readings))
        for gpu in self._sources.gpus.latest():
            key = ("gpu", gpu.index, gpu.uuid, gpu.name)
            samples[key] = _GPU_KIND, time_series.Sample(gauges=_gauges(gpu))
        self._values(samples, readings)
        self._history.add(second, seconds, samples)
        return readings

    def _resting(self, readings: Readings, sent: Mapping[Model, int]) -> frozenset[str]:
        return frozenset(
            reading.owner.process
            for reading in readings
            if reading.owner.role == "executor"
            and self.usage.of(reading.owner.pid).rests
            and (reading.owner.model, reading.owner.version) not in sent
        )

    def _models(self, readings: Readings, counts: Counts, sent: Mapping[Model, int]) -> Samples:
        samples: Samples = {}
        gauges: dict[Model, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        for reading in readings:
            owner = reading.owner
            use = self.usage.of(owner.pid)
            if owner.role == "executor":
                sums = gauges[owner.model, owner.version]
                for index, value in enumerate((reading.depth, use.cpu_percent, use.private)):
                    sums[index] += value
        for model, count in sent.items():  # an executing executor reads no requests
            gauges[model][0] = max(gauges[model][0], count)
        total = [0] * aggregation.WIDTH
        slowest = 0
        for model in {*gauges, *counts}:
            grown = counts.get(model, ())
            top = aggregation.slowest_ns(grown) if grown else 0
            sample = time_series.Sample(grown, top, gauges.get(model, ()))
            samples["model", *model] = _MODEL_KIND, sample
            slowest = max(slowest, top)
            if grown:
                add_each(total, grown)
        depth = sum(values[0] for values in gauges.values())
        samples[_TOTAL] = _TOTAL_KIND, time_series.Sample(total, slowest, [depth])
        self._latest = aggregation.distribution_ms(total, slowest)
        return samples

    def _system(self, readings: Readings) -> list[float]:
        usage, regions = self.usage, self._sources.book.regions.values()
        pool = self._sources.reconciler.ledger.total
        by_role = [usage.cpu_of(role) for role in _ROLES]
        memory = usage.memory
        share = 100 * (memory + pool) / usage.machine if usage.machine else math.nan
        held = [sum(getattr(reading.gauges, name) for reading in readings) for name in _GAUGES]
        client = (len(regions), sum(region.byte_size for region in regions))
        return [usage.cpu, *by_role, memory, share, pool, *held, *client, usage.count]

    def _values(self, samples: Samples, readings: Readings) -> None:
        parts: dict[tuple[str, str, str], list[model_metrics.ModelMetrics]] = defaultdict(list)
        for reading in readings:
            owner = reading.owner
            for name, metrics in self._metrics.get(owner.process, {}).items():
                parts[owner.model, owner.version, name].append(metrics)
        self._distributions.clear()
        for name_of, several in parts.items():
            merged = model_metrics.merged(several)
            key = ("value", *name_of, merged.kind)
            gauges = model_metrics.gauges(merged)
            samples[key] = _VALUE_KINDS[merged.kind], time_series.Sample(gauges=gauges)
            if merged.kind == model_metrics.CDF:
                self._distributions[key] = merged.points


def _kind_of(key: time_series.Key) -> time_series.SeriesKind | None:
    """Return the columns of a track. Return None for an unknown key."""
    match key:
        case ("total",):
            return _TOTAL_KIND
        case ("system",):
            return _SYSTEM_KIND
        case ("model", str(), str()):
            return _MODEL_KIND
        case ("gpu", int(), str(), str()):
            return _GPU_KIND
        case ("value", str(), str(), str(), str(kind)):
            return _VALUE_KINDS.get(kind)
    return None


def in_flight(readings: Readings) -> Mapping[Model, int]:
    """Return the requests that frontends have sent to executors, by model version."""
    counts: dict[Model, int] = defaultdict(int)
    for reading in readings:
        for model, row in reading.rows.items():
            if row.in_flight:
                counts[model] += row.in_flight
    return counts


def _gauges(gpu: GpuReport) -> list[float]:
    """Return the values in the order of `_GPU_KIND`."""
    percent = None if gpu.utilization is None else 100 * gpu.utilization
    values = (percent, gpu.memory_used, gpu.temperature, gpu.power)
    return [math.nan if value is None else value for value in values]
