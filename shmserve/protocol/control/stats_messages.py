"""Messages of the link about counters; `messages` has the unions they belong to."""

from __future__ import annotations

from collections import Counter

from msgspec import Struct, field

from shmserve.core.scheduling.rate_limiter import ResourceUse
from shmserve.core.stats.counter_pages import Gauges
from shmserve.core.stats.custom_metrics import InstanceMetrics
from shmserve.core.stats.executor_counters import ExecutorCounts
from shmserve.core.stats.request_counters import RequestCounts
from shmserve.protocol.control.message import Message


class PageOwner(Struct, frozen=True, array_like=True):
    """Whose page of counters it is. `model`, `version`, `instance`: of executors."""

    process: str
    role: str
    pid: int
    model: str = ""
    version: str = ""
    instance: str = ""


class CounterPage(Message, frozen=True):
    """Sent after each Welcome: the page this process counts on; its fd rides along."""

    nbytes: int
    model: str = ""
    version: str = ""
    instance: str = ""


class StorePages(Message, frozen=True):
    """To the supervisor: keep the fds that ride along for the next coordinator."""

    owners: tuple[PageOwner, ...]


class DropPages(Message, frozen=True):
    """To the supervisor: these pages have been added up."""

    owners: tuple[PageOwner, ...]


class StoredPages(Message, frozen=True):
    """Supervisor to a new coordinator: fds it keeps, which ride along; the last has no `more`."""

    owners: tuple[PageOwner, ...]
    more: bool = False


class RequestFailed(Message, frozen=True):
    """What a client was told for this reason (a `Reason`): the latest text since the last one."""

    model: str
    version: str
    reason: int
    text: str


class AskReport(Message, frozen=True):
    """A frontend wants all numbers."""

    ticket: int


class ReportGiven(Message, frozen=True):
    """Reply to `AskReport`: a `Report` lies in the file that rides along."""

    ticket: int
    nbytes: int


class ModelReport(Struct, array_like=True):
    """What a model version has done; `requests` by the frontends' role (http, grpc)."""

    model: str
    version: str
    runs: ExecutorCounts = field(default_factory=ExecutorCounts)
    requests: dict[str, RequestCounts] = field(default_factory=dict)

    def all_requests(self) -> RequestCounts:
        """Over all protocols."""
        total = RequestCounts()
        for counts in self.requests.values():
            total.add(counts)
        return total


class ProcessReport(Struct, frozen=True, array_like=True):
    """A process that counts. `depth`, `busy_ns`: of executors, requests waiting or running
    and since when with one of them; `running`: those that do not wait."""

    owner: PageOwner
    gauges: Gauges
    depth: int = 0
    busy_ns: int = 0
    running: int = 0


class RegionsReport(Struct, frozen=True, array_like=True):
    """Registered client memory of one kind."""

    kind: str
    regions: int
    nbytes: int
    quarantined: int


class GpuReport(Struct, frozen=True, array_like=True):
    """A GPU as its driver sees it; None: that is not told of this one.

    Attributes:
        uuid, name: NVML's, e.g. GPU-4f0c… and NVIDIA H200.
        index: NVML's number, that of nvidia-smi.
        utilization: 0 to 1, for how much of the last moments anything ran.
        memory_used, memory_total: bytes; what the driver keeps for itself is used.
        temperature: degrees Celsius.
        power, power_limit: watts.
        energy: joules since the driver was loaded.
    """

    uuid: str
    index: int
    name: str
    utilization: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: int | None = None
    power: float | None = None
    power_limit: float | None = None
    energy: float | None = None


class Report(Struct, frozen=True, array_like=True):
    """All numbers at one moment.

    `starts` and `ends`: processes by role since the service began. `unreadable`: pages
    that could not be read, left out of everything above. `gpus`: those that answer. `keys`:
    requests by the names of the keys they came with. `resources`: of the rate limiter, with the
    names of instances. `custom`: metrics that models make for themselves.
    """

    models: tuple[ModelReport, ...]
    processes: tuple[ProcessReport, ...]
    starts: dict[str, int]
    ends: dict[str, int]
    pool_bytes: int = 0
    pool_used: int = 0
    regions: tuple[RegionsReport, ...] = ()
    unreadable: int = 0
    gpus: tuple[GpuReport, ...] = ()
    keys: dict[str, int] = {}
    resources: tuple[ResourceUse, ...] = ()
    custom: tuple[InstanceMetrics, ...] = ()

    def pending(self) -> dict[tuple[str, str], int]:
        """Requests that wait to be executed, by model version: those that frontends have sent to
        executors, wherever they are on their way, but those that the models work on."""
        running: Counter[tuple[str, str]] = Counter()
        for process in self.processes:
            running[process.owner.model, process.owner.version] += process.running
        return {
            (m.model, m.version): max(0, m.all_requests().in_flight - running[m.model, m.version])
            for m in self.models
        }
