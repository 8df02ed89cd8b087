"""Messages of the link about recent history. `messages` has the unions."""

from msgspec import Struct

from shmserve.core.stats.incidents import Incident
from shmserve.core.stats.time_series import Column
from shmserve.protocol.control.message import Message
from shmserve.protocol.control.stats_messages import Report


class AskHistory(Message, frozen=True):
    """Request of a frontend for the series of one level of `core.stats.time_series.LEVELS`.
    `since`: number of the first period to send; the frontend has all earlier periods of history
    `life`. `brief`: omit the models' series, processes, incidents and the report."""

    ticket: int
    level: int
    since: int = 0
    life: str = ""
    brief: bool = False


class HistoryGiven(Message, frozen=True):
    """Reply to `AskHistory`. The file that rides along holds a `HistoryReport`. `nbytes` is 0 if
    there is no such history."""

    ticket: int
    nbytes: int


class ModelHistory(Struct, frozen=True, array_like=True):
    """Series of one model version."""

    model: str
    version: str
    columns: dict[str, Column]


class ValueHistory(Struct, frozen=True, array_like=True):
    """Series of a value that a model reports about itself. `kind`: avg, max, min, inc or cdf.
    `latest`: for cdf, the last second's values at `core.stats.aggregation.PERCENTS`, or empty."""

    model: str
    version: str
    name: str
    kind: str
    columns: dict[str, Column]
    latest: tuple[float, ...] = ()


class GpuHistory(Struct, frozen=True, array_like=True):
    """Series of one GPU. The columns: utilization (percent), memory (bytes), temperature (degrees
    Celsius), power (watts)."""

    uuid: str
    index: int
    name: str
    columns: dict[str, Column]


class ProcessUse(Struct, frozen=True, array_like=True):
    """Present resource use of a process of the service. `cpu_percent`: 100 is one core; None:
    unknown."""

    role: str
    instance: str
    up_s: float
    cpu_percent: float | None = None
    private_bytes: int | None = None


class HistoryReport(Struct, frozen=True, array_like=True):
    """The coordinator's series for the last periods of one level.

    Attributes:
        life: identifier of the history; a new identifier means that all numbers have begun anew.
        first: number of the first period in the series.
        until: number of the running period.
        running: True if every column has one value more, for the running period.
        ended_at: start of period `until`, in seconds since 1970.
        age_s: age of the history, in seconds.
        latest: latency of the last second's requests at `core.stats.aggregation.PERCENTS`, in
            milliseconds, or empty.
        machine_bytes: memory of the machine, in bytes.
        processors: number of the machine's processors.
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
