"""Messages of the link about what happened lately; `messages` has their unions."""

from __future__ import annotations

from msgspec import Struct

from shmserve.core.stats.incidents import Incident
from shmserve.core.stats.time_series import Column
from shmserve.protocol.control.message import Message
from shmserve.protocol.control.stats_messages import Report


class AskHistory(Message, frozen=True):
    """A frontend wants the series of one level of `core.stats.time_series.LEVELS`.

    Of history `life` it has all periods before number `since`. `brief`: without models'
    series, processes and counters.
    """

    ticket: int
    level: int
    since: int = 0
    life: str = ""
    brief: bool = False


class HistoryGiven(Message, frozen=True):
    """Reply: a `HistoryReport` lies in the file that rides along; `nbytes` 0: none is kept."""

    ticket: int
    nbytes: int


class ModelHistory(Struct, frozen=True, array_like=True):
    """Series of one model version."""

    model: str
    version: str
    columns: dict[str, Column]


class ValueHistory(Struct, frozen=True, array_like=True):
    """Series of a value that a model reports about itself.

    `kind`: avg, max, min, inc or cdf; `latest`: of cdf, the last second's by
    `core.stats.aggregation.PERCENTS`, or empty.
    """

    model: str
    version: str
    name: str
    kind: str
    columns: dict[str, Column]
    latest: tuple[float, ...] = ()


class GpuHistory(Struct, frozen=True, array_like=True):
    """Series of one GPU: utilization (percent), memory (bytes), temperature (degrees Celsius),
    power (watts)."""

    uuid: str
    index: int
    name: str
    columns: dict[str, Column]


class ProcessUse(Struct, frozen=True, array_like=True):
    """A process of the service right now. `cpu_percent`: 100 is one core; None: unknown."""

    role: str
    instance: str
    up_s: float
    cpu_percent: float | None = None
    private_bytes: int | None = None


class HistoryReport(Struct, frozen=True, array_like=True):
    """What the coordinator tells of the last periods of one level.

    Attributes:
        life: another one means that all numbers have begun anew.
        first, until: number of the first period, and of the one that runs now.
        running: whether all columns have one value more, of the period that runs.
        ended_at: when period `until` began, in seconds since 1970.
        age_s: how old this history is.
        latest: milliseconds by `core.stats.aggregation.PERCENTS` of the last second's requests,
            or empty.
        machine_bytes, processors: what the machine has.
    """

    life: str
    level: int
    first: int
    until: int
    running: bool
    ended_at: float
    age_s: float
    total: dict[str, Column]
    system: dict[str, Column]
    values: tuple[ValueHistory, ...] = ()
    latest: tuple[float, ...] = ()
    models: tuple[ModelHistory, ...] = ()
    processes: tuple[ProcessUse, ...] = ()
    incidents: tuple[Incident, ...] = ()
    report: Report | None = None
    machine_bytes: int = 0
    processors: int = 0
    gpus: tuple[GpuHistory, ...] = ()
