"""Messages of processes to decisions of the fleet, and those back to messages.

Knows no sockets: the service calls `hello`, `handle`, `gone` and `tick`, and gives it a
`send` that never blocks and never fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import msgspec

from shmserve.coordinator import shows
from shmserve.coordinator.regions import Regions
from shmserve.coordinator.wanted import Wanted
from shmserve.core.effects import (
    AnswerGrant,
    AskTrim,
    Desire,
    Dismiss,
    Effect,
    Publish,
    Report,
)
from shmserve.core.fleet import Fleet
from shmserve.errors import ProtocolViolation
from shmserve.protocol import messages
from shmserve.protocol.grps_messages import OnlineSet, SetOnline
from shmserve.protocol.link_messages import (
    Adopt,
    AskStats,
    Desired,
    Drain,
    Exited,
    GiveBack,
    Grant,
    Granted,
    Hello,
    Instance,
    Loaded,
    LoadFailed,
    Show,
    Shown,
    Started,
    Stats,
    Stop,
    Trim,
)
from shmserve.protocol.messages import FromCoordinator, ToCoordinator
from shmserve.protocol.region_messages import (
    DropRegions,
    NeedRegion,
    RegionShrunk,
    RegisterRegion,
    StoredRegions,
    UnregisterRegions,
)
from shmserve.shm.registry_page import RegistryWriter
from shmserve.transport.questions import close_all

_log = logging.getLogger(__name__)

SETTLE_S = 0.5  # after a restart: executors that still load have so long to say hello
_WATCHDOG_S = 1.0
_PART_BYTES = 96 * 1024

Send = Callable[[str, FromCoordinator], None]


class Desk:
    """See the module. `own`: the coordinator's process id, pid and start."""

    def __init__(
        self,
        fleet: Fleet,
        writer: RegistryWriter,
        epoch: str,
        send: Send,
        own: tuple[str, int, float],
        regions: Regions,
        grps_online: bool = False,
    ) -> None:
        self.fleet = fleet
        self.regions = regions
        self._writer = writer
        self._epoch = epoch
        self._send = send
        self._own = own
        self._grps_online = grps_online
        self._instances: dict[str, Instance] = {}
        self._questions = shows.Questions(send)
        self._supervisor = ""
        self._adopted = False  # whether the supervisor has been told what runs already
        self._desire = False  # whether it must be told what should run
        self._hold_until = 0.0
        self._asked_at = 0.0

    @property
    def urgent(self) -> bool:
        """Whether something waits for time to pass, so `tick` should come soon."""
        return bool(
            self.fleet.ledger.waiting or len(self._questions) or (self._desire and self._supervisor)
        )

    def begin(self, wanted: Wanted, now: float) -> None:
        """The repository has been scanned: publish it, on top of what was there before."""
        effects: list[Effect] = []
        for spec, instances in wanted.versions:
            effects += self.fleet.add_version(spec, [i.name for i in instances], now)
            self._instances.update({i.name: i for i in instances})
        effects += self.fleet.scanned(wanted.failures)
        if self._writer.previous is not None:
            self.fleet.restore(self._writer.previous, now)
            self.regions.restore(self._writer.previous, now)
            self._grps_online = self._writer.previous.grps_online
            self._hold_until = now + SETTLE_S
        for name, reason in wanted.failures.items():
            _log.error("model cannot be served model=%s reason=%s", name, reason)
        self._perform(effects)

    def hello(self, message: Hello, pid: int, now: float) -> None:
        """A process has a link; it has been welcomed."""
        instance = message.loaded.instance if message.loaded else message.instance
        effects = self.fleet.hello(
            message.process, message.role, pid, message.held_bytes, instance, now
        )
        if message.loaded is not None:
            effects += self.fleet.loaded(
                message.process, message.loaded.spec, message.loaded.endpoint, now
            )
        if message.role == "supervisor":
            self._supervisor, self._adopted = message.process, False
            self.regions.store_all(message.process)
        self._perform(effects)

    def gone(self, process: str, now: float) -> None:
        if process == self._supervisor:
            self._supervisor = ""
        self._perform(self.fleet.gone(process, now))
        self._questions.gone(process, now)

    def handle(
        self, process: str, role: str, message: ToCoordinator, fds: list[int], now: float
    ) -> None:
        """One message of a process that has said hello, with its fds.

        Raises:
            ProtocolViolation: not a message for a process of this role in this state.
        """
        if isinstance(message, StoredRegions) and role == "supervisor":
            useless = self.regions.stored(message.numbers, fds, message.more, now)
            if useless:
                self._send(process, DropRegions(tuple(useless)))
            return
        close_all(fds)  # no other message comes with any
        fleet = self.fleet
        effects: list[Effect] = []
        match message, role:
            case Grant(), _:
                effects = fleet.ledger.grant(process, message.ticket, message.nbytes, now)
            case GiveBack(), _:
                effects = fleet.ledger.give_back(process, message.nbytes, now)
            case Loaded(), "executor":
                effects = fleet.loaded(process, message.spec, message.endpoint, now)
            case LoadFailed(), "executor":
                effects = fleet.load_failed(process, message.reason, now)
            case Stats(), _:
                effects = self._stats(process, role, message, now)
            case ((Started() | Exited() | Drain()), "supervisor"):
                effects = self._from_supervisor(message, now)
            case Show(), "cli":
                self._show(process, message, now)
            case RegisterRegion(), ("http" | "grpc"):
                self.regions.register(process, message, self._supervisor)
            case UnregisterRegions(), ("http" | "grpc"):
                self.regions.unregister(process, message, now)
            case SetOnline(), ("http" | "grpc"):
                self._grps_online = message.online
                self._publish()
                self._send(process, OnlineSet(message.ticket))
            case NeedRegion(), "executor":
                self.regions.need(process, message, now)
            case RegionShrunk(), "executor":
                self.regions.shrunk(message.number)
            case _:
                raise ProtocolViolation(f"{type(message).__name__} from a process of role {role}")
        self._perform(effects)

    def tick(self, now: float) -> None:
        """What is due: timeouts, questions, the watchdog, a supervisor to be told."""
        self._perform(self.fleet.tick(now))
        self._questions.tick(now)
        self.regions.tick(now)
        self.regions.settle(self._publish, self._supervisor)
        if now - self._asked_at >= _WATCHDOG_S:
            self._asked_at = now
            for record in list(self.fleet.processes.values()):
                if record.role in ("executor", "supervisor"):  # the latter sees we are alive
                    self._send(record.name, AskStats(0, "busy"))
        if self._desire and self._supervisor and now >= self._hold_until:
            self._tell_supervisor()

    def drain(self, reason: str, announce: bool = False) -> None:
        if not self.fleet.draining:
            _log.info("draining reason=%s", reason)
        self._perform(self.fleet.drain(announce))

    # ------------------------------------------------------------------- inside

    def _from_supervisor(self, message: Started | Exited | Drain, now: float) -> list[Effect]:
        if isinstance(message, Drain):
            self.drain(message.reason, message.announce)
            return []
        if message.instance not in self.fleet.instances:
            return []  # of a model that is no longer served
        if isinstance(message, Started):
            return self.fleet.started(message.instance, message.pid, now)
        self.regions.executor_ended()
        return self.fleet.exited(message.instance, message.pid, message.reason, now)

    def _stats(self, process: str, role: str, message: Stats, now: float) -> list[Effect]:
        if message.ticket:
            self._questions.answered(process, message.ticket, message.stats, now)
            return []
        busy_ms = message.stats.get("busy_ms", 0)
        if role != "executor" or not isinstance(busy_ms, int):
            return []
        return self.fleet.busy(process, busy_ms, now)

    def _show(self, asker: str, message: Show, now: float) -> None:
        if message.what in shows.ASKED:
            of = [p.name for p in self.fleet.processes.values() if p.role != "cli"]
            self._questions.ask(asker, message.ticket, message.what, of, now)
            return
        if message.what == "processes":
            rows = shows.process_rows(self.fleet, now, self._own)
        elif message.what == "models":
            rows = shows.model_rows(self.fleet)
        elif message.what == "regions":
            rows = shows.region_rows(self.regions.book)
        else:
            self._send(asker, Shown(message.ticket, (), f"nothing is called {message.what!r}"))
            return
        for part in shows.parts(message.ticket, rows):
            self._send(asker, part)

    def _perform(self, effects: list[Effect]) -> None:
        # What was decided together is published together, and before anyone hears of it.
        if any(isinstance(effect, Publish) for effect in effects):
            self._publish()
        for effect in effects:
            match effect:
                case AnswerGrant():
                    self._send(
                        effect.process, Granted(effect.ticket, effect.granted, effect.reason)
                    )
                case AskTrim():
                    self._send(effect.process, Trim(effect.nbytes))
                case Dismiss():
                    self._send(effect.process, Stop(effect.reason))
                case Desire():
                    self._desire = True
                case Report():
                    _log.warning("%s", effect.text)
        if self._desire and self._supervisor:
            self._tell_supervisor()

    def _publish(self) -> None:
        book = self.regions.book
        self.regions.changed = False
        self._writer.publish(
            msgspec.structs.replace(
                self.fleet.snapshot(self._epoch),
                regions=book.regions,
                next_region=book.next_number,
                grps_online=self._grps_online,
            )
        )

    def _tell_supervisor(self) -> None:
        """What runs already (once), and what should run.

        Not while executors published before a restart may still say hello: they would
        be started a second time.
        """
        if self.fleet.draining:
            self._desire = False
        if not self._desire or self.fleet.awaiting or time.monotonic() < self._hold_until:
            return
        self._desire = False
        if not self._adopted:
            self._adopted = True
            self._send(self._supervisor, Adopt(tuple(self.fleet.running())))
        wanted = [self._instances[name] for name in self.fleet.desired()]
        for part in _parts(wanted):
            self._send(self._supervisor, part)


def _parts(instances: list[Instance]) -> Iterator[Desired]:
    part: list[Instance] = []
    size = 0
    for instance in instances:
        nbytes = len(messages.encode(instance))
        if part and size + nbytes > _PART_BYTES:
            yield Desired(tuple(part), more=True)
            part, size = [], 0
        part.append(instance)
        size += nbytes
    yield Desired(tuple(part))
