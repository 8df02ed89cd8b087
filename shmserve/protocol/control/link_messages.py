"""Messages of the link, every process <-> coordinator; `messages` has their unions."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.core.scheduling.rate_limit_policy import RateLimit
from shmserve.protocol.control.message import Message
from shmserve.tensor.spec import ModelSpec


class Loaded(Message, frozen=True):
    """The instance can take requests at `endpoint` (a socket's name in the run directory).

    `device`: where its model computes; empty: where it should (`Instance`). `rate_limit`: what
    it must acquire before it executes.
    """

    instance: str
    spec: ModelSpec
    endpoint: str
    device: str = ""
    rate_limit: RateLimit | None = None


class LoadFailed(Message, frozen=True):
    """The instance could not load its model; `reason` may be shown to clients."""

    instance: str
    reason: str


class Hello(Message, frozen=True):
    """First message of a link. `held_bytes`: pool budget already granted to this process.

    `loaded` repeats an executor's `Loaded` after the coordinator was restarted; `acquired` is the
    ticket of the resources that it holds (0: none). `first_bytes`: of its arena's first segment,
    which it keeps; 0: as many as the Welcome says.
    """

    version: int
    role: str  # one of `coordinator.links.ROLES`
    process: str
    pid: int
    held_bytes: int = 0
    loaded: Loaded | None = None
    instance: str = ""  # executors: what they run, also before it is loaded
    acquired: int = 0
    first_bytes: int = 0


class Grant(Message, frozen=True):
    """Ask for `nbytes` of the pool's budget."""

    ticket: int
    nbytes: int


class GiveBack(Message, frozen=True):
    nbytes: int


class AcquireResources(Message, frozen=True):
    """Executor: wants to execute once, and to hold what `Loaded.rate_limit` says meanwhile. What
    it held until now it gives back."""

    ticket: int


class ReleaseResources(Message, frozen=True):
    """Executor: holds nothing any more, and has nothing to execute."""


class Started(Message, frozen=True):
    """Supervisor: the instance's process runs. `instance` may be a role of frontends, such as
    ``grpc``: then a process of this role serves, and `pid` is 0."""

    instance: str
    pid: int


class Exited(Message, frozen=True):
    """Supervisor: the instance's process has ended. `reason` is written for operators.

    `instance` may be a role of frontends, as in `Started`: then no process of this role serves, for
    longer than a restart takes.
    """

    instance: str
    pid: int
    reason: str


class Show(Message, frozen=True):
    """CLI: what is going on? `what`: processes, models, segments, slots, queues."""

    ticket: int
    what: str


class Stats(Message, frozen=True):
    """Reply to `AskStats`: the process's own numbers (`ProcessStats` as plain data)."""

    ticket: int
    stats: dict[str, Any]


class Drain(Message, frozen=True):
    """Supervisor: the service is about to stop; tell frontends and executors.

    `announce`: frontends only; executors are still needed, until this is said again.
    """

    reason: str
    announce: bool = False


class Welcome(Message, frozen=True):
    """Reply to `Hello`. `arena_bytes`: what the first segment of an arena should have;
    `pool_bytes`: what all arenas together may have, 0 from a coordinator that does not say."""

    version: int
    epoch: str
    arena_bytes: int = 0
    pool_bytes: int = 0


class Granted(Message, frozen=True):
    ticket: int
    granted: bool
    reason: str = ""


class ResourcesAcquired(Message, frozen=True):
    """The executor holds its resources until it says otherwise or its link ends."""

    ticket: int


class Trim(Message, frozen=True):
    """Others need budget: give back up to `nbytes` of unused segments."""

    nbytes: int


class AskStats(Message, frozen=True):
    ticket: int
    what: str


class Instance(Struct, frozen=True, array_like=True):
    """What the supervisor must run: one instance of one model version.

    `directory` is the model's folder, `config` the config.pbtxt-derived JSON
    (`ModelSpec.config`), `device` e.g. ``cpu`` or ``cuda:0`` (numbered among the devices
    that are visible to the service). `auto`: if the device cannot be used, the CPU will do.
    """

    name: str
    spec: ModelSpec
    directory: str
    device: str = "cpu"
    auto: bool = False


class Desired(Message, frozen=True):
    """Coordinator to supervisor: exactly these instances should run.

    A message is bounded by the socket's buffer: the list comes in parts, all but the
    last with `more`. Executors of other instances finish what they have accepted, but for
    those of `hurry`, which are stuck.
    """

    instances: tuple[Instance, ...]
    more: bool = False
    hurry: tuple[str, ...] = ()


class Forgive(Message, frozen=True):
    """Coordinator to supervisor: a client is to blame for the latest end of this instance's
    process, so it is started again without a pause."""

    instance: str


class Adopt(Message, frozen=True):
    """Coordinator to a new supervisor: executors that run already.

    Each as (instance, pid, process id).
    """

    instances: tuple[tuple[str, int, str], ...]


class Shown(Message, frozen=True):
    """Reply to `Show`: rows of a table, in parts like `Desired`."""

    ticket: int
    rows: tuple[dict[str, Any], ...]
    error: str = ""
    more: bool = False


class RegistryChanged(Message, frozen=True):
    """Coordinator to frontends: something was published. Requests find that out by themselves;
    this is for those who wait for it."""


class Stop(Message, frozen=True):
    """Finish what was accepted and exit."""

    reason: str


class LaneOffered(Message, frozen=True):
    """Coordinator to an executor: a local program's lane rides along. `uid`, `pid`, `started`: who
    asked for it, as the kernel says."""

    uid: int
    pid: int
    started: int


class LanesOpen(Message, frozen=True):
    """Executor: to a new coordinator: whose lanes it has; else: of which users one has ended."""

    uids: tuple[int, ...]
    ended: bool = False


class MoveLanes(Message, frozen=True):
    """Coordinator to an executor: its lanes take no further requests; their programs ask for
    others, and are told where to go."""
