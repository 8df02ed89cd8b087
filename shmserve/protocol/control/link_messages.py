"""Messages of the link between every process and the coordinator. `messages` has the unions."""

from typing import Any

from msgspec import Struct

from shmserve.core.scheduling.rate_limit_policy import RateLimit
from shmserve.protocol.control.message import Message
from shmserve.tensor.spec import ModelSpec


class Loaded(Message, frozen=True):
    """Report of an executor: the instance takes requests at `endpoint`.

    Attributes:
        endpoint: name of a socket in the run directory.
        device: device on which the model computes; empty: the device of the `Instance`.
        rate_limit: resources that the instance must acquire before each execution.
    """

    instance: str
    spec: ModelSpec
    endpoint: str
    device: str = ""
    rate_limit: RateLimit | None = None


class LoadFailed(Message, frozen=True):
    """Report of an executor: the instance could not load its model. `reason` may be shown to
    clients."""

    instance: str
    reason: str


class Hello(Message, frozen=True):
    """First message of a link.

    Attributes:
        held_bytes: pool budget that was already granted to the process, in bytes.
        loaded: an executor's `Loaded`, repeated for a restarted coordinator.
        acquired: ticket of the resources that an executor holds; 0: no resources.
        first_bytes: size of the arena's first segment, which the process keeps; 0: the size from
            the Welcome.
    """

    version: int
    role: str  # one of `coordinator.links.ROLES`
    process: str
    pid: int
    held_bytes: int = 0
    loaded: Loaded | None = None
    instance: str = ""  # executors: name of the instance, sent also before the model is loaded
    acquired: int = 0
    first_bytes: int = 0


class Grant(Message, frozen=True):
    """Request for `nbytes` of the pool's budget."""

    ticket: int
    nbytes: int


class GiveBack(Message, frozen=True):
    nbytes: int


class AcquireResources(Message, frozen=True):
    """Request of an executor for the resources of one execution (`Loaded.rate_limit`). The request
    also gives back the resources that the executor has held until now."""

    ticket: int


class ReleaseResources(Message, frozen=True):
    """Report of an executor: nothing to execute, and no resources held any more."""


class Started(Message, frozen=True):
    """Report of the supervisor: the instance's process runs. `instance` may instead name a role of
    frontends, such as ``grpc``: then a process of this role serves, and `pid` is 0."""

    instance: str
    pid: int


class Exited(Message, frozen=True):
    """Report of the supervisor: the instance's process has ended. `instance` may instead name a
    role of frontends, as in `Started`: then no process of this role has served for longer than a
    restart takes. `reason` is written for operators."""

    instance: str
    pid: int
    reason: str


class Show(Message, frozen=True):
    """Request of the command line for a table: processes, models, segments, slots or queues."""

    ticket: int
    what: str


class Stats(Message, frozen=True):
    """Reply to `AskStats`: numbers of the replying process (`ProcessStats` as plain data)."""

    ticket: int
    stats: dict[str, Any]


class Drain(Message, frozen=True):
    """Report of the supervisor: the service is about to stop. Frontends and executors are told.
    With `announce`, only frontends are told. Executors are needed until a second `Drain` comes
    without `announce`."""

    reason: str
    announce: bool = False


class Welcome(Message, frozen=True):
    """Reply to `Hello`. `arena_bytes`: size for the first segment of an arena, in bytes.
    `pool_bytes`: limit of all arenas together, in bytes; 0 from a coordinator that does not send
    the limit."""

    version: int
    epoch: str
    arena_bytes: int = 0
    pool_bytes: int = 0


class Granted(Message, frozen=True):
    ticket: int
    granted: bool
    reason: str = ""


class ResourcesAcquired(Message, frozen=True):
    """Reply to `AcquireResources`: the executor holds the resources. They are free again when the
    executor releases them or its link ends."""

    ticket: int


class Trim(Message, frozen=True):
    """Order to give back up to `nbytes` of unused segments: other processes need budget."""

    nbytes: int


class AskStats(Message, frozen=True):
    ticket: int
    what: str


class Instance(Struct, frozen=True, array_like=True):
    """An instance of a model version, for the supervisor to run.

    Attributes:
        directory: folder of the model.
        device: for example ``cpu`` or ``cuda:0``, numbered among the devices visible to the
            service.
        auto: the instance may run on the CPU if the device cannot be used.
    """

    name: str
    spec: ModelSpec
    directory: str
    device: str = "cpu"
    auto: bool = False


class Desired(Message, frozen=True):
    """Order of the coordinator to the supervisor: run exactly these instances.

    The socket's buffer bounds a message, so the list comes in parts; all parts but the last have
    `more`. Executors of other instances finish the requests they have accepted. The supervisor
    does not wait for the stuck instances in `hurry`.
    """

    instances: tuple[Instance, ...]
    more: bool = False
    hurry: tuple[str, ...] = ()


class Forgive(Message, frozen=True):
    """Order of the coordinator to the supervisor: restart an instance's process without a pause. A
    client is to blame for the latest end of the process."""

    instance: str


class Adopt(Message, frozen=True):
    """Running executors, sent by the coordinator to a new supervisor. Each entry is (instance, pid,
    name of the process)."""

    instances: tuple[tuple[str, int, str], ...]


class Shown(Message, frozen=True):
    """Reply to `Show`: rows of a table, in parts like `Desired`."""

    ticket: int
    rows: tuple[dict[str, Any], ...]
    error: str = ""
    more: bool = False


class RegistryChanged(Message, frozen=True):
    """Report of the coordinator to frontends and the supervisor: a snapshot was published. Requests
    read the registry anyway; the message wakes threads that wait for a change."""


class Stop(Message, frozen=True):
    """Order to finish the accepted requests and exit."""

    reason: str


class LaneOffered(Message, frozen=True):
    """Offer of the coordinator to an executor: a local program's lane rides along. `uid`, `pid` and
    `started` identify the program, as read from the kernel."""

    uid: int
    pid: int
    started: int


class LanesOpen(Message, frozen=True):
    """Report of an executor about its lanes, by the uid of the program's user. With `ended`: users
    of lanes that have ended. Without: users of all lanes, sent to a new coordinator."""

    uids: tuple[int, ...]
    ended: bool = False


class MoveLanes(Message, frozen=True):
    """Order of the coordinator to an executor: take no further requests from lanes. The programs
    ask the coordinator for new lanes and learn their new executor."""
