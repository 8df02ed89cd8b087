"""Message router: turns messages of processes into decisions of the reconciler.

The router knows no sockets. The loop calls `hello`, `handle`, `gone` and `tick`, and provides a
`send` that never blocks and never fails.
"""

from __future__ import annotations

import logging

from shmserve.coordinator.assembly import Parts
from shmserve.coordinator.models.supervisor_sync import Send
from shmserve.core.control.lifecycle import State
from shmserve.core.control.watchdog import Verdict
from shmserve.core.effects import Effect
from shmserve.core.registry import FRONTENDS
from shmserve.errors import ProtocolViolation
from shmserve.log_fields import log_fields
from shmserve.protocol.control import link_messages as link
from shmserve.protocol.control import settings_messages as settings
from shmserve.protocol.control.messages import ToCoordinator
from shmserve.protocol.control.model_messages import LoadModel, ModelsFetched, UnloadModel
from shmserve.protocol.control.region_messages import DropRegions, SharedRegions, StoredRegions
from shmserve.transport.channel import close_all

_log = logging.getLogger(__name__)


SUCCESSOR = "successor"  # role of the next generation's coordinator
_LOOK_S = 0.9  # a little less than 1 s, since the loop may turn slightly early


class MessageRouter:
    """Hands each message to the responsible part, and time to all parts."""

    def __init__(self, parts: Parts, send: Send) -> None:
        self._reconciler = parts.reconciler
        self._regions = parts.regions
        self._introspection = parts.introspection
        self._runtime_settings = parts.runtime_settings
        self._sync = parts.sync
        self._publication = parts.publication
        self._control = parts.control
        self._watchdog = parts.watchdog
        self._memory = parts.memory
        self._lanes = parts.lanes
        self._turns = parts.turns
        self._effects = parts.effects
        self._perform = parts.effects.perform
        self._send = send
        self._looked_at = 0.0
        self._successor = ""

    @property
    def urgent(self) -> bool:
        """True if a part waits for time to pass, so `tick` should be called soon."""
        leaving = any(model.leaving for model in self._reconciler.models.by_name.values())
        return bool(
            self._reconciler.ledger.waiting
            or self._introspection.urgent
            or self._sync.waiting
            or self._regions.urgent
            or self._turns.urgent
            or leaving
        )

    def hello(self, message: link.Hello, pid: int, now: float) -> None:
        """Take in the hello of a process that has just been welcomed."""
        process, held, loaded = message.process, message.held_bytes, message.loaded
        instance = loaded.instance if loaded else message.instance
        effects = self._reconciler.hello(
            process, message.role, pid, held, instance, now, message.first_bytes
        )
        if loaded is not None:
            spec, endpoint, device = loaded.spec, loaded.endpoint, loaded.device
            effects += self._reconciler.loaded(process, spec, endpoint, now, device)
        self._turns.hello(message)
        if message.role == "supervisor":
            self._sync.joined(process)
            self._regions.store_all(process)
            self._introspection.counters.store_all(process)
        if message.role == SUCCESSOR:
            self._successor = process
            self._regions.sharing.begin(lambda told, fds: self._send(process, told, fds), True)
        if message.role == "fetcher":
            self._control.remote.hello(process)
        self._runtime_settings.hello(process)
        self._perform(effects)

    def gone(self, process: str, now: float) -> None:
        if process == self._successor:
            self._successor = ""
            self._regions.sharing.end()
        self._introspection.gone(process, now)
        self._sync.gone(process)
        self._control.remote.gone(process)
        self._perform(self._reconciler.gone(process, now))
        self._regions.gone(process)
        self._turns.gone(process)
        self._watchdog.gone(process)
        self._memory.gone(process)
        self._lanes.gone(process)

    def handle(
        self, process: str, role: str, message: ToCoordinator, fds: list[int], now: float
    ) -> None:
        """Handle one message, with descriptors, from a process that has said hello. Raise
        ProtocolViolation if a process of this role must not send the message now."""
        if self._handle_regions(process, role, message, fds, now):
            return
        supervisor = self._sync.supervisor
        if self._introspection.handle(process, role, message, fds, supervisor, now):
            return
        close_all(fds)  # no other message brings descriptors
        if self._regions.handle(process, role, message, now):
            return
        reconciler = self._reconciler
        effects: list[Effect] = []
        match message, role:
            case link.Grant(), _:
                effects = reconciler.ledger.grant(process, message.ticket, message.nbytes, now)
            case link.GiveBack(), _:
                effects = reconciler.ledger.give_back(process, message.nbytes, now)
            case link.Loaded(), "executor":
                effects = self._loaded(process, message, now)
            case ((link.AcquireResources() | link.ReleaseResources()), "executor"):
                self._turns.handle(process, message)
            case link.LoadFailed(), "executor":
                effects = reconciler.load_failed(process, message.reason, now)
            case link.Stats(), _:
                effects = self._stats(process, role, message, now)
            case ModelsFetched(), "fetcher":
                self._control.remote.answered(message)
            case link.LanesOpen(), "executor":
                self._lanes.told(process, message)
            case ((link.Started() | link.Exited() | link.Drain()), "supervisor"):
                effects = self._from_supervisor(message, now)
            case _, ("http" | "grpc" | "model"):
                self._from_frontend(process, message)
            case _:
                raise _out_of_place(message, role)
        self._perform(effects)

    def _loaded(self, process: str, message: link.Loaded, now: float) -> list[Effect]:
        if reason := self._memory.looked(process, loaded=True):
            return self._reconciler.outgrown(process, reason, now)
        spec, endpoint, device = message.spec, message.endpoint, message.device
        effects = self._reconciler.loaded(process, spec, endpoint, now, device)
        self._turns.loaded(process, message)
        return effects

    def _handle_regions(
        self, process: str, role: str, message: ToCoordinator, fds: list[int], now: float
    ) -> bool:
        """Take in regions kept by the supervisor or by another generation. Return False for any
        other message."""
        match message, role:
            case StoredRegions(), "supervisor":
                if useless := self._regions.stored(message, fds, now):
                    self._send(process, DropRegions(tuple(useless)))
            case SharedRegions(), "successor":
                self._regions.take(message, fds, now)
            case _:
                return False
        return True

    def tick(self, now: float) -> None:
        """Do due work: timeouts, questions, the watchdog, news for the supervisor."""
        models = self._reconciler.models
        if models.awaits_runs:
            models.note_oldest_run(self._introspection.counters.oldest_run())
        self._perform(self._reconciler.tick(now))
        self._turns.tick(now, self._reconciler.awaiting)
        self._regions.tick(now)
        self._introspection.tick(self._sync.supervisor, now)
        self._regions.settle(self._publication.publish, self._sync.supervisor)
        self._lanes.settle()
        self._control.turn(now)
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            self._look(now)
        self._sync.tell()

    def drain(self, reason: str, announce: bool = False) -> None:
        if not self._reconciler.draining:
            _log.info("draining", extra=log_fields(reason=reason))
        self._perform(self._reconciler.drain(announce))

    def _look(self, now: float) -> None:
        self._effects.look()
        for record in list(self._reconciler.processes.values()):
            if record.role == "executor":
                self._watch(record.name, now)

    def _watch(self, process: str, now: float) -> None:
        """Check an executor by reading its counter page, and /proc if its model has `max_memory`.
        Reading wakes no process, and also works for an executor that is stopped or whose model
        holds the interpreter lock."""
        busy_ms = self._introspection.counters.busy_ms(process)
        if busy_ms is not None and (effects := self._reconciler.busy(process, busy_ms, now)):
            self._perform(effects)
        if reason := self._memory.looked(process):
            self._perform(self._reconciler.outgrown(process, reason, now))
        rests = self._introspection.rests(process) and not self._lanes.has(process)
        match self._watchdog.looked(process, busy_ms, rests):
            case Verdict.ASK:
                self._send(process, link.AskStats(0, "busy"))
            case Verdict.REPLACE:
                self._perform(self._reconciler.silent(process, now))

    def _from_frontend(self, process: str, message: ToCoordinator) -> None:
        """Carry out changes that clients ask for: models, logs, traces, flags of extensions."""
        match message:
            case LoadModel() | UnloadModel():
                self._control.ask(process, message)
            case settings.SetFlag():
                self._publication.set_flag(message.name, message.value)
                self._send(process, settings.FlagSet(message.ticket))
            case settings.ChangeLog() | settings.ChangeTrace() | settings.TakeTraces():
                names = set(self._reconciler.models.by_name)
                everybody = [p.name for p in self._reconciler.processes.values() if p.role != "cli"]
                self._runtime_settings.handle(
                    process, message, names, self._publication.publish, everybody
                )
            case _:
                raise _out_of_place(message, "frontend")

    def _from_supervisor(
        self, message: link.Started | link.Exited | link.Drain, now: float
    ) -> list[Effect]:
        if isinstance(message, link.Drain):
            self.drain(message.reason, message.announce)
            return []
        if message.instance in FRONTENDS:
            reason = message.reason if isinstance(message, link.Exited) else ""
            return self._reconciler.serving(message.instance, reason)
        if message.instance not in self._reconciler.instances:
            return []  # the model is no longer served
        if isinstance(message, link.Started):
            return self._reconciler.started(message.instance, message.pid, now)
        if self._regions.executor_ended("SIGBUS" in message.reason):
            self._send(self._sync.supervisor, link.Forgive(message.instance))
        record = self._reconciler.instances[message.instance]
        if not record.left and not self._reconciler.draining:
            # stopped by us, and the record has the reason
            stopped = record.state is State.STOPPING
            reason = record.reason if stopped else f"its executor ended: {message.reason}"
            self._introspection.exited(message.instance, reason)
        return self._reconciler.exited(message.instance, message.pid, message.reason, now)

    def _stats(self, process: str, role: str, message: link.Stats, now: float) -> list[Effect]:
        self._watchdog.answered(process)
        if self._introspection.answered(process, message, now):
            return []
        busy_ms = message.stats.get("busy_ms", 0)
        if role != "executor" or not isinstance(busy_ms, int):
            return []
        return self._reconciler.busy(process, busy_ms, now)


def _out_of_place(message: ToCoordinator, role: str) -> ProtocolViolation:
    return ProtocolViolation(f"{type(message).__name__} from a process of role {role}")
