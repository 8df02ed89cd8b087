"""Messages of the control plane: frozen Structs, msgpack, one union per channel.

Rules (docs/ARCHITECTURE.md, message table): tagged, array-like, fields are only
ever appended and then have defaults, encoders and decoders are reused, and a peer
of another `VERSION` is refused at hello. Tensor bytes never travel in a message;
descriptors name them.

Two kinds of channel:
- *data channel*, frontend <-> executor: `ToExecutor`, `ToFrontend`
- *link*, every process <-> coordinator: `ToCoordinator`, `FromCoordinator`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.protocol.message import Message
from shmserve.protocol.region_messages import (
    DropRegions,
    NeedRegion,
    RegionAnswer,
    RegionGiven,
    RegionsGone,
    RegionShrunk,
    RegisterRegion,
    StoredRegions,
    StoreRegions,
    UnregisterRegions,
)
from shmserve.tensor.spec import ModelSpec

VERSION = 1

# What a request parameter can be (Open Inference Protocol V2, "parameters")
Parameter = bool | int | float | str


# ---------------------------------------------------------------- data channel


class Descriptor(Struct, frozen=True, array_like=True, gc=False, tag=0):
    """A tensor's bytes in an arena: `segment` is an id of the arena's owner.

    `offset` and `nbytes` are bytes within the segment; `slot` and `generation`
    name the lease to give back.
    """

    segment: int
    slot: int
    generation: int
    offset: int
    nbytes: int


class RegionRef(Struct, frozen=True, array_like=True, gc=False, tag=1):
    """A tensor's bytes in client memory: `offset` from the start of region number `region`."""

    region: int
    offset: int
    nbytes: int


class SegmentOffer(Struct, frozen=True, array_like=True, gc=False):
    """A segment the sender owns, whose read-only fd rides along (SCM_RIGHTS, same order)."""

    segment: int
    size: int


class WireTensor(Struct, frozen=True, array_like=True, gc=False):
    """A tensor of a request or an answer.

    `alias` >= 0 (answers only): the bytes are those of the request's input of that
    index (among the inputs that lie in slots), at `at.offset` from its start; the frontend
    reads its own arena. In an answer a `RegionRef` says that the output lies in the client's
    memory already.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    at: Descriptor | RegionRef
    alias: int = -1


class OutputPlace(Struct, frozen=True, array_like=True, gc=False):
    """Where the client wants an output: at most `at.nbytes` bytes of its region."""

    name: str
    at: RegionRef


class Execute(Message, frozen=True):
    """Run one request. Times are CLOCK_MONOTONIC nanoseconds (0: no deadline)."""

    request: int
    id: str
    inputs: tuple[WireTensor, ...]
    outputs: tuple[str, ...]  # requested outputs, empty: all
    parameters: dict[str, Parameter]
    sent_ns: int
    deadline_ns: int
    release: tuple[tuple[int, int], ...] = ()  # (slot, generation) of earlier outputs
    offers: tuple[SegmentOffer, ...] = ()
    dropped: tuple[int, ...] = ()  # segments of the sender that are no more
    places: tuple[OutputPlace, ...] = ()  # outputs that go into client memory


class Cancel(Message, frozen=True):
    """The request is not wanted any more; if it has not started it never will."""

    request: int


class Release(Message, frozen=True):
    """Output slots the frontend is done with."""

    slots: tuple[tuple[int, int], ...]


class FrontendHello(Message, frozen=True):
    """First message of a data channel."""

    version: int
    process: str


class Timing(Struct, frozen=True, array_like=True, gc=False):
    """Nanoseconds per stage as the executor saw them."""

    queue: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0


class Copied(Struct, frozen=True, array_like=True, gc=False):
    """Bytes of tensor data that the executor copied, by stage of the receipt."""

    batch: int = 0
    out: int = 0
    device: int = 0
    inputs: int = 0


class Answer(Message, frozen=True):
    """Result of one `Execute`: outputs, or `error_code` and `error`."""

    request: int
    outputs: tuple[WireTensor, ...] = ()
    error_code: str = ""
    error: str = ""
    parameters: dict[str, Parameter] = {}  # noqa: RUF012 (msgspec makes a new one each time)
    timing: Timing = Timing()
    copied: Copied = Copied()
    offers: tuple[SegmentOffer, ...] = ()
    dropped: tuple[int, ...] = ()
    final: bool = True
    retained: tuple[int, ...] = ()  # inputs (as for alias) the model holds: they stay leased
    freed: tuple[tuple[int, int], ...] = ()  # (slot, generation) of earlier retained inputs


class ExecutorHello(Message, frozen=True):
    """Reply to `FrontendHello`; the fd of the executor's status page rides along."""

    version: int
    process: str
    instance: str


def leases(outputs: Iterable[WireTensor]) -> list[tuple[int, int]]:
    """(slot, generation) of the outputs that lie in slots of the executor."""
    return [
        (tensor.at.slot, tensor.at.generation)
        for tensor in outputs
        if tensor.alias < 0 and isinstance(tensor.at, Descriptor)
    ]


ToExecutor = FrontendHello | Execute | Cancel | Release
ToFrontend = ExecutorHello | Answer


# ------------------------------------------------------------------------ link


class Loaded(Message, frozen=True):
    """The instance can take requests at `endpoint` (a socket's name in the run directory)."""

    instance: str
    spec: ModelSpec
    endpoint: str


class LoadFailed(Message, frozen=True):
    """The instance could not load its model; `reason` may be shown to clients."""

    instance: str
    reason: str


class Hello(Message, frozen=True):
    """First message of a link. `held_bytes`: pool budget already granted to this process.

    `loaded` repeats an executor's `Loaded` after the coordinator was restarted.
    """

    version: int
    role: str  # http, grpc, executor, supervisor, cli
    process: str
    pid: int
    held_bytes: int = 0
    loaded: Loaded | None = None
    instance: str = ""  # executors: what they run, also before it is loaded


class Grant(Message, frozen=True):
    """Ask for `nbytes` of the pool's budget."""

    ticket: int
    nbytes: int


class GiveBack(Message, frozen=True):
    nbytes: int


class Started(Message, frozen=True):
    """Supervisor: the instance's process runs."""

    instance: str
    pid: int


class Exited(Message, frozen=True):
    """Supervisor: the instance's process has ended. `reason` is written for operators."""

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
    """Supervisor: the service is about to stop; tell frontends and executors."""

    reason: str


class Welcome(Message, frozen=True):
    """Reply to `Hello`."""

    version: int
    epoch: str


class Granted(Message, frozen=True):
    ticket: int
    granted: bool
    reason: str = ""


class Trim(Message, frozen=True):
    """Others need budget: give back up to `nbytes` of unused segments."""

    nbytes: int


class AskStats(Message, frozen=True):
    ticket: int
    what: str


class Instance(Struct, frozen=True, array_like=True):
    """What the supervisor must run: one instance of one model version.

    `directory` is the model's folder, `config` the config.pbtxt-derived JSON
    (`ModelSpec.config_json`), `device` e.g. ``cpu`` or ``cuda:0``.
    """

    name: str
    spec: ModelSpec
    directory: str
    device: str = "cpu"


class Desired(Message, frozen=True):
    """Coordinator to supervisor: exactly these instances should run.

    A message is bounded by the socket's buffer: the list comes in parts, all but the
    last with `more`.
    """

    instances: tuple[Instance, ...]
    more: bool = False


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


class Stop(Message, frozen=True):
    """Finish what was accepted and exit."""

    reason: str


ToCoordinator = (
    Hello | Grant | GiveBack | Loaded | LoadFailed | Started | Exited | Show | Stats | Drain
    | RegisterRegion | UnregisterRegions | NeedRegion | RegionShrunk | StoredRegions
)  # fmt: skip
FromCoordinator = (
    Welcome | Granted | Trim | AskStats | Desired | Shown | Stop | Adopt
    | RegionAnswer | RegionGiven | RegionsGone | StoreRegions | DropRegions
)  # fmt: skip

encoder = msgspec.msgpack.Encoder()
encode = encoder.encode
decode_to_executor = msgspec.msgpack.Decoder(ToExecutor).decode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator).decode
decode_from_coordinator = msgspec.msgpack.Decoder(FromCoordinator).decode
