"""Messages of the link about counters. `messages` has the unions."""

from collections import Counter

from msgspec import Struct, field

from shmserve.core.scheduling.rate_limiter import ResourceUse
from shmserve.core.stats.counter_pages import Gauges
from shmserve.core.stats.custom_metrics import InstanceMetrics
from shmserve.core.stats.executor_counters import OTHER_SIZES, ExecutorCounts
from shmserve.core.stats.request_counters import RequestCounts
from shmserve.protocol.control.message import Message


class PageOwner(Struct, frozen=True, array_like=True):
    """Owner of a page of counters. Executors also name their model, version and instance."""

    process: str
    role: str
    pid: int
    model: str = ""
    version: str = ""
    instance: str = ""


class CounterPage(Message, frozen=True):
    """Counter page of the sending process, sent after each Welcome. The page's fd rides along."""

    nbytes: int
    model: str = ""
    version: str = ""
    instance: str = ""


class StorePages(Message, frozen=True):
    """Order to the supervisor: keep the fds that ride along for the next coordinator."""

    owners: tuple[PageOwner, ...]


class DropPages(Message, frozen=True):
    """Order to the supervisor: drop these pages, because they are part of the totals."""

    owners: tuple[PageOwner, ...]


class StoredPages(Message, frozen=True):
    """Descriptors kept by the supervisor, sent to a new coordinator in parts. The fds ride along.
    `more`: further parts follow."""

    owners: tuple[PageOwner, ...]
    more: bool = False


class RequestFailed(Message, frozen=True):
    """Report of a frontend: the latest client error text of a `Reason` since the last report."""

    model: str
    version: str
    reason: int
    text: str


class AskReport(Message, frozen=True):
    """Request of a frontend for all numbers."""

    ticket: int


class ReportGiven(Message, frozen=True):
    """Reply to `AskReport`. The file that rides along holds a `Report`."""

    ticket: int
    nbytes: int


class ModelReport(Struct, array_like=True):
    """Counts of a model version. `requests` is keyed by the frontends' role (http, grpc)."""

    model: str
    version: str
    runs: ExecutorCounts = field(default_factory=ExecutorCounts)
    requests: dict[str, RequestCounts] = field(default_factory=dict)

    def all_requests(self) -> RequestCounts:
        """Return the sum over all protocols."""
        total = RequestCounts()
        for counts in self.requests.values():
            total.add(counts)
        return total

    def all_runs(self) -> ExecutorCounts:
        """Return the runs. An ensemble has no executor of its own: frontends count its runs, with
        the times of their steps."""
        runs = ExecutorCounts()
        for size, (last_ms, count, elements, *times) in self.all_requests().batches.items():
            runs.last_inference_ms = max(runs.last_inference_ms, last_ms)
            runs.add_batches(size, [count, *times])
            if size == OTHER_SIZES:
                runs.inferences += elements
        runs.requests = runs.executions
        runs.add(self.runs)
        return runs


class ProcessReport(Struct, frozen=True, array_like=True):
    """A process that counts.

    Attributes:
        depth: executors: requests that wait or run.
        busy_ns: executors: when the running request began, in CLOCK_MONOTONIC nanoseconds; 0:
            idle.
        running: executors: requests that run.
    """

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
    """A GPU as its driver reports it. None: the driver does not report the value for this GPU.

    Attributes:
        uuid: NVML's identifier, e.g. GPU-4f0c….
        name: NVML's name, e.g. NVIDIA H200.
        index: NVML's number, as in nvidia-smi.
        utilization: 0 to 1, part of the last moments in which a kernel ran.
        memory_used: bytes, including the driver's own memory.
        memory_total: bytes.
        temperature: degrees Celsius.
        power: watts.
        power_limit: watts.
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


class UsageReport(Struct, frozen=True, array_like=True):
    """Processor time and memory of processes with one owner.

    Attributes:
        model, version: executors: model version; "": versions that are not served any more.
        cpu_s: processor time in seconds since the coordinator's start, ended processes included.
        private: bytes of memory that the processes have now, without shared memory.
        resident: bytes of memory that the processes have now, shared memory included.
    """

    role: str
    model: str = ""
    version: str = ""
    cpu_s: float = 0.0
    private: int = 0
    resident: int = 0


class Report(Struct, frozen=True, array_like=True):
    """All numbers at one moment.

    Attributes:
        starts: started processes by role, since the service began.
        ends: ended processes by role, since the service began.
        unreadable: number of pages that could not be read and are missing from the other numbers.
        gpus: GPUs whose driver answers.
        keys: requests by name of the caller's key.
        resources: use of the rate limiter's resources, with the names of instances.
        custom: metrics that models report about themselves.
        usage: processor time and memory by role and model, as last sampled.
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
    usage: tuple[UsageReport, ...] = ()

    def pending(self) -> dict[tuple[str, str], int]:
        """Return the number of requests waiting to be executed, by model version. Counted are
        requests that frontends have sent to executors, minus the requests that models work on."""
        running: Counter[tuple[str, str]] = Counter()
        for process in self.processes:
            running[process.owner.model, process.owner.version] += process.running
        return {
            (m.model, m.version): max(0, m.all_requests().in_flight - running[m.model, m.version])
            for m in self.models
        }
