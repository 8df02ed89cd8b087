"""Messages of processes to decisions of the fleet, and those back to messages.

Knows no sockets: the service calls `hello`, `handle`, `gone` and `tick`, and gives it a
`send` that never blocks and never fails.
"""

from __future__ import annotations

import logging

import msgspec

from shmserve.coordinator import plan as plans
from shmserve.coordinator.models.desired_models import Wanted
from shmserve.coordinator.models.model_control import ModelControl
from shmserve.coordinator.models.supervisor_sync import Orders, Send
from shmserve.coordinator.plan import Plan, PlanFile
from shmserve.coordinator.regions.registrations import Regions
from shmserve.coordinator.runtime_settings import TuningDesk
from shmserve.coordinator.stats.introspection import Information
from shmserve.core.control.effects import (
    AnswerGrant,
    AskTrim,
    Desire,
    Dismiss,
    Effect,
    Forget,
    Publish,
    Report,
)
from shmserve.core.control.lifecycle import State
from shmserve.core.control.reconciler import Fleet
from shmserve.core.control.records import Incarnation, VersionRecord
from shmserve.errors import ProtocolViolation
from shmserve.protocol.control.link_messages import (
    AskStats,
    Drain,
    Exited,
    GiveBack,
    Grant,
    Granted,
    Hello,
    Loaded,
    LoadFailed,
    Started,
    Stats,
    Stop,
    Trim,
)
from shmserve.protocol.control.model_messages import LoadModel, UnloadModel
from shmserve.protocol.control.region_messages import (
    DropRegions,
    StoredRegions,
)
from shmserve.protocol.control.settings_messages import ChangeLog, ChangeTrace, TakeTraces
from shmserve.protocol.grps_messages import OnlineSet, SetOnline
from shmserve.protocol.messages import ToCoordinator
from shmserve.shm.registry_page import RegistryWriter
from shmserve.transport.questions import close_all

_log = logging.getLogger(__name__)

_WATCHDOG_S = 1.0


class Desk:
    """See the module."""

    def __init__(
        self,
        fleet: Fleet,
        writer: RegistryWriter,
        epoch: str,
        send: Send,
        regions: Regions,
        information: Information,
        tuning: TuningDesk,
        orders: Orders,
        plan: PlanFile,
        grps_online: bool = False,
    ) -> None:
        self.fleet = fleet
        self.regions = regions
        self.information = information
        self.tuning = tuning
        self.control: ModelControl
        self._orders = orders
        self._plan = plan
        self._writer = writer
        self._epoch = epoch
        self._send = send
        self._grps_online = grps_online
        self._asked_at = 0.0

    @property
    def urgent(self) -> bool:
        """Whether something waits for time to pass, so `tick` should come soon."""
        leaving = any(model.leaving for model in self.fleet.models.by_name.values())
        return bool(
            self.fleet.ledger.waiting
            or self.information.urgent
            or self._orders.waiting
            or self.regions.urgent
            or leaving
        )

    @property
    def due(self) -> float:
        """When `tick` should come even if nothing else happens."""
        return self.information.due

    def begin(self, wanted: Wanted, marks: dict[str, str], now: float) -> None:
        """The repository has been scanned for the first time: serve it.

        `marks`: the fingerprints of all folders.
        """
        effects: list[Effect] = []
        by_model: dict[str, list[VersionRecord]] = {}
        for spec, instances in wanted.versions:
            by_model.setdefault(spec.name, []).append(self.control.version(spec, instances, 1))
        for name, versions in by_model.items():
            failed = {
                key.partition("/")[2]: why
                for key, why in wanted.failures.items()
                if key.startswith(f"{name}/")
            }
            incarnation = Incarnation(1, versions, failed, marks.get(name, ""))
            effects += self.fleet.models.load(name, incarnation, now, required=True)
        self.control.tried = dict(marks)
        for name, reason in wanted.failures.items():
            _log.error("model cannot be served model=%s reason=%s", name, reason)
        self.perform([*effects, *self.fleet.scanned(wanted.failures)])

    def resume(self, plan: Plan, load_timeout_s: float, now: float) -> None:
        """Go on where an earlier coordinator was when it ended."""
        self._orders.instances = plans.restore(plan, self.fleet, now + load_timeout_s, now)
        self.control.tried = dict(plan.tried)
        effects = self.fleet.scanned(plan.failures)
        if self._writer.previous is not None:
            self.fleet.restore(self._writer.previous, now)
            self.regions.restore(self._writer.previous, now)
            self._grps_online = self._writer.previous.grps_online
            self.tuning.restore(self._writer.previous)
        self._orders.hold(now)
        self._orders.changed()
        self.perform(effects)

    def hello(self, message: Hello, pid: int, now: float) -> None:
        """A process has a link; it has been welcomed."""
        instance = message.loaded.instance if message.loaded else message.instance
        effects = self.fleet.hello(
            message.process, message.role, pid, message.held_bytes, instance, now
        )
        if message.loaded is not None:
            effects += self.fleet.loaded(
                message.process,
                message.loaded.spec,
                message.loaded.endpoint,
                now,
                message.loaded.device,
            )
        if message.role == "supervisor":
            self._orders.joined(message.process)
            self.regions.store_all(message.process)
            self.information.counters.store_all(message.process)
        self.tuning.hello(message.process)
        self.perform(effects)

    def gone(self, process: str, now: float) -> None:
        self._orders.gone(process)
        self.perform(self.fleet.gone(process, now))
        self.regions.gone(process)
        self.information.gone(process, now)

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
        supervisor = self._orders.supervisor
        if self.information.handle(process, role, message, fds, supervisor, now):
            return
        close_all(fds)  # no other message comes with any
        if self.regions.handle(process, role, message, now):
            return
        fleet = self.fleet
        effects: list[Effect] = []
        match message, role:
            case Grant(), _:
                effects = fleet.ledger.grant(process, message.ticket, message.nbytes, now)
            case GiveBack(), _:
                effects = fleet.ledger.give_back(process, message.nbytes, now)
            case Loaded(), "executor":
                effects = fleet.loaded(process, message.spec, message.endpoint, now, message.device)
            case LoadFailed(), "executor":
                effects = fleet.load_failed(process, message.reason, now)
            case Stats(), _:
                effects = self._stats(process, role, message, now)
            case ((Started() | Exited() | Drain()), "supervisor"):
                effects = self._from_supervisor(message, now)
            case _, ("http" | "grpc"):
                self._from_frontend(process, message)
            case _:
                raise _out_of_place(message, role)
        self.perform(effects)

    def tick(self, now: float) -> None:
        """What is due: timeouts, questions, the watchdog, a supervisor to be told."""
        self.perform(self.fleet.tick(now))
        self.regions.tick(now)
        self.information.tick(self._orders.supervisor, now)
        self.regions.settle(self._publish, self._orders.supervisor)
        self.control.turn(now)
        if now - self._asked_at >= _WATCHDOG_S:
            self._asked_at = now
            for record in list(self.fleet.processes.values()):
                if record.role in ("executor", "supervisor"):  # the latter sees we are alive
                    self._send(record.name, AskStats(0, "busy"))
        self._orders.tell()

    def drain(self, reason: str, announce: bool = False) -> None:
        if not self.fleet.draining:
            _log.info("draining reason=%s", reason)
        self.perform(self.fleet.drain(announce))

    # ------------------------------------------------------------------- inside

    def _from_frontend(self, process: str, message: ToCoordinator) -> None:
        """What clients want changed: models, logs, traces, the readiness of GRPS."""
        match message:
            case LoadModel() | UnloadModel():
                self.control.ask(process, message)
            case SetOnline():
                self._grps_online = message.online
                self._publish()
                self._send(process, OnlineSet(message.ticket))
            case ChangeLog() | ChangeTrace() | TakeTraces():
                names = set(self.fleet.models.by_name)
                everybody = [p.name for p in self.fleet.processes.values() if p.role != "cli"]
                self.tuning.handle(process, message, names, self._publish, everybody)
            case _:
                raise _out_of_place(message, "frontend")

    def _from_supervisor(self, message: Started | Exited | Drain, now: float) -> list[Effect]:
        if isinstance(message, Drain):
            self.drain(message.reason, message.announce)
            return []
        if message.instance not in self.fleet.instances:
            return []  # of a model that is no longer served
        if isinstance(message, Started):
            return self.fleet.started(message.instance, message.pid, now)
        self.regions.executor_ended()
        record = self.fleet.instances[message.instance]
        if not record.left and not self.fleet.draining:
            stopped = record.state is State.STOPPING  # by us, who know why
            why = record.reason if stopped else f"its executor ended: {message.reason}"
            self.information.exited(message.instance, why)
        return self.fleet.exited(message.instance, message.pid, message.reason, now)

    def _stats(self, process: str, role: str, message: Stats, now: float) -> list[Effect]:
        if self.information.told(process, message, now):
            return []
        busy_ms = message.stats.get("busy_ms", 0)
        if role != "executor" or not isinstance(busy_ms, int):
            return []
        return self.fleet.busy(process, busy_ms, now)

    def perform(self, effects: list[Effect]) -> None:
        """Do what was decided."""
        # What was decided together is written down, then published, then told.
        if any(isinstance(effect, Publish | Desire | Forget) for effect in effects):
            self._plan.write(self.fleet, self._orders.instances, self.control.tried)
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
                    self._orders.changed()
                case Forget():
                    for name in effect.instances:
                        self._orders.instances.pop(name, None)
                    if effect.overrides:
                        self.control.forgotten(effect.overrides)
                case Report():
                    _log.warning("%s", effect.text)
        self._orders.tell()

    def _publish(self) -> None:
        book = self.regions.book
        self.regions.changed = False
        snapshot = self.fleet.snapshot(self._epoch)
        self._writer.publish(
            msgspec.structs.replace(
                snapshot,
                models=self.tuning.traced(snapshot.models),
                regions=book.regions,
                next_region=book.next_number,
                grps_online=self._grps_online,
                tuning=self.tuning.tuning,
            )
        )


def _out_of_place(message: ToCoordinator, role: str) -> ProtocolViolation:
    return ProtocolViolation(f"{type(message).__name__} from a process of role {role}")
