"""Reconciler: the coordinator's decisions, from events of processes to `Effect`s.

Owner: the coordinator alone. Pure: no I/O, time is an argument (seconds of a monotonic clock).
Invariants (tests/property/test_reconciler_properties.py):
- an instance is published exactly while its executor has loaded the model and has a link (or may
  still come back within the grace after a coordinator restart);
- an instance has at most one executor; of two executors, the supervisor's latest stays;
- an instance is not started again if its model cannot be loaded, or if `load_attempts` processes
  have ended before any had loaded the model;
- the supervisor should run every instance except failed and stopping ones.
`core.control.rollout` decides which revision of a model has which instances.
"""

from shmserve.core.control.lifecycle import Event, State
from shmserve.core.control.records import InstanceRecord, ProcessRecord, refused
from shmserve.core.control.rollout import Rollouts
from shmserve.core.effects import (
    Desire,
    Dismiss,
    DropEndpoint,
    Effect,
    LogForOperators,
    Publish,
    given_up,
)  # fmt: skip
from shmserve.core.memory.budget import Ledger
from shmserve.core.registry import ModelState, Snapshot
from shmserve.errors import ProtocolViolation
from shmserve.log_fields import LogFields
from shmserve.tensor.spec import ModelSpec

WORKERS_S = 10.0  # seconds without any HTTP worker, longer than a restart takes
GRACE_S = 2.0  # after a restart: seconds for executors to say hello again

_LOAD_ATTEMPTS = 3  # processes that may end during an instance's first load


class Reconciler:
    """Models, instances, processes and the pool's budget."""

    def __init__(
        self,
        ledger: Ledger,
        execute_timeout_s: float,
        load_timeout_s: float,
        load_attempts: int = _LOAD_ATTEMPTS,
        shortage: str = "",
        models: Rollouts | None = None,
    ) -> None:
        self.ledger = ledger
        self._execute_timeout_s = execute_timeout_s
        self._load_timeout_s = load_timeout_s
        self._load_attempts = load_attempts
        self.models = models or Rollouts(load_timeout_s)
        self.instances = self.models.instances
        self.processes: dict[str, ProcessRecord] = {}
        self.failures: dict[str, str] = {}
        self.complete = False
        self.draining = False
        self.shortage = shortage  # lack of memory at start
        # frontend role -> reason why no process of the role serves
        self.unserved: dict[str, str] = {}
        self._workers_seen_at: float | None = None  # when an HTTP worker was last linked
        self._dismissed = False  # executors were told to finish

    # ------------------------------------------------------------ what should be

    def scanned(self, failures: dict[str, str]) -> list[Effect]:
        """Note that every folder of the repository has been read."""
        self.failures = dict(failures)
        self.complete = True
        return [Publish()]

    def excuse(self, model: str) -> list[Effect]:
        """Forget why a model could not be served at start."""
        failures = self.failures.items()
        self.failures = {name: reason for name, reason in failures if name.split("/")[0] != model}
        return [Publish()]

    def restore(self, previous: Snapshot, now: float) -> None:
        """Restore the published state after a restart, and trust it until the grace is over."""
        self.unserved = {**previous.unserved, **self.unserved}
        for model in self.models.by_name.values():
            for version in model.serving.versions if model.serving is not None else []:
                entry = previous.models.get(model.name, {}).get(version.spec.version)
                if entry is None or version.spec.steps:
                    continue
                if entry.state is ModelState.READY:
                    version.spec, version.loaded = entry.spec, True
                live = {instance.name: instance for instance in entry.instances}
                for record in version.instances:
                    published = live.get(record.name)
                    if published is not None:
                        record.restore(published, now, now + GRACE_S)

    def desired(self) -> list[str]:
        return [r.name for r in self.instances.values() if r.desired]

    def hurried(self) -> list[str]:
        return [r.name for r in self.instances.values() if r.hurried]

    def running(self) -> list[tuple[str, int, str]]:
        """Return (instance, pid, process) of linked executors, for adoption by a new supervisor."""
        linked = [r for r in self.instances.values() if r.process in self.processes]
        return [(r.name, r.pid, r.process) for r in linked]

    @property
    def awaiting(self) -> bool:
        """True if executors published before a restart may still say hello."""
        return any(record.awaited_until for record in self.instances.values())

    def snapshot(self, epoch: str) -> Snapshot:
        """Return the registry to publish (the writer sets the generation)."""
        return Snapshot(
            epoch=epoch,
            generation=0,
            models=self.models.entries(),
            complete=self.complete,
            failed=self.failures,
            draining=self.draining,
            refused={
                name: reason
                for name, reason in refused(self.models.by_name.values()).items()
                if name not in self.failures
            },
            shortage=self.shortage,
            unserved=dict(self.unserved),
        )

    # ----------------------------------------------------------- any process

    def hello(
        self,
        process: str,
        role: str,
        pid: int,
        held_bytes: int,
        instance: str,
        now: float,
        first_bytes: int = 0,
    ) -> list[Effect]:
        effects = self.gone(process, now) if process in self.processes else []
        self.ledger.joined(process, held_bytes, first_bytes)
        self.processes[process] = ProcessRecord(process, role, pid, now)
        if role == "http" and role in self.unserved:
            effects += [LogForOperators("HTTP is served again"), *self.serving(role, "")]
        if role == "executor":
            effects += self._executor_joined(process, pid, instance, now)
        if role == "supervisor":
            effects += self._supervisor_joined(now)
        return effects

    def gone(self, process: str, now: float) -> list[Effect]:
        """Handle the end of a process's link: the process takes no requests and holds nothing."""
        ended = self.processes.pop(process, None)
        if ended is None:
            return []
        effects = self.ledger.left(process, now)
        if ended.role == "http":
            self._workers_seen_at = now
        record = self.instances.get(ended.instance)
        if record is not None and record.process == process:
            was_live = record.live
            record.step(Event.LOST, now)
            record.lose_link()
            effects += [Publish()] if was_live else []
            effects += self._settle(record, now)
        return effects

    def serving(self, role: str, reason: str) -> list[Effect]:
        """Note whether frontends of a role serve. `reason`: cause if no frontend serves, else
        empty."""
        if self.unserved.get(role, "") == reason:
            return []
        self.unserved.pop(role, None)
        if reason:
            self.unserved[role] = reason
        return [Publish()]

    def _look_for_workers(self, now: float) -> list[Effect]:
        """Report a long absence of linked HTTP workers, although gunicorn starts workers again. A
        coordinator counts from its first look, because its predecessor may have seen the last
        worker end."""
        linked = any(p.role == "http" for p in self.processes.values())
        if linked or self._workers_seen_at is None:
            self._workers_seen_at = now
        late = now - self._workers_seen_at >= WORKERS_S
        if not late or self.draining or "http" in self.unserved:
            return []
        reason = f"none has connected for {WORKERS_S:g} s"
        return [
            LogForOperators("not ready: no HTTP worker serves", LogFields(reason=reason)),
            *self.serving("http", reason),
        ]

    def tick(self, now: float) -> list[Effect]:
        """Apply time limits. Call at least once a second."""
        effects = self.ledger.expire(now) + self._look_for_workers(now)
        for record in list(self.instances.values()):
            if record.awaited_until and now >= record.awaited_until:
                about = LogFields(instance=record.name)
                effects += [LogForOperators("executor did not come back", about), Publish()]
                effects.append(DropEndpoint(record.process, record.pid))
                record.step(Event.LOST, now)
                record.forget_process()
            if record.left or record.state in (State.FAILED, State.STOPPING):
                continue
            reason = f"the model did not load within {self._load_timeout_s:g} s"
            late = record.state in (State.STARTING, State.LOADING)
            if not record.loaded and now > record.deadline:
                effects += self._give_up(record, reason, now)
            elif late and now - record.since > self._load_timeout_s:
                effects += self._stop(record, reason, now)
        return effects + self.models.tick(now)

    def drain(self, announce: bool = False) -> list[Effect]:
        """Publish that the service will stop, and let executors finish. `announce`: only publish,
        since frontends still need the executors."""
        effects: list[Effect] = [] if self.draining else [Publish()]
        self.draining = True
        if announce or self._dismissed:
            return effects
        self._dismissed = True
        executors = (p for p in self.processes.values() if p.role == "executor")
        return [*effects, *(Dismiss(p.name, "drain") for p in executors)]

    # -------------------------------------------------------- from the supervisor

    def started(self, instance: str, pid: int, now: float) -> list[Effect]:
        """Handle the supervisor's report of the process that runs an instance."""
        record = self._instance(instance)
        effects: list[Effect] = []
        if record.pid != pid:
            effects = self._displace(record, now)
            record.run_as(pid)
        record.step(Event.STARTED, now)
        return effects

    def exited(self, instance: str, pid: int, reason: str, now: float) -> list[Effect]:
        """Handle the end of an instance's process. The supervisor restarts the process when due."""
        record = self._instance(instance)
        if record.pid not in (0, pid):
            return []  # an earlier process of the instance
        was_live, was_stopping = record.live, record.state is State.STOPPING
        record.step(Event.EXITED, now)
        record.exits += 1
        effects: list[Effect] = [Desire()] if was_stopping else []
        if not was_stopping and record.state is not State.FAILED:
            record.reason = f"its executor ended: {reason}"
            record.tries += self.models.unproven(record)
            if record.tries >= self._load_attempts:
                what = f"its executor ended {record.tries} times while it loaded the model"
                effects = self._give_up(record, f"{what}: {reason}", now)
        record.forget_process()
        if was_live or was_stopping:
            effects.append(Publish())
        return effects + self._settle(record, now)

    # --------------------------------------------------------- from the executor

    def loaded(
        self, process: str, spec: ModelSpec, endpoint: str, now: float, device: str = ""
    ) -> list[Effect]:
        """Handle an executor's report that it takes requests; `spec` is complete now. `device`:
        reported device, or empty."""
        record = self._of_executor(process)
        if record is None:
            return []
        _, version = self.models.home(record.name)
        expected = (version.spec.name, version.spec.version)
        if (spec.name, spec.version) != expected or not endpoint or "/" in endpoint:
            raise ProtocolViolation(f"{process} loaded something else than {record.name}")
        record.step(Event.LOADED, now)
        record.accept_load(endpoint, device)
        version.spec, version.loaded = spec, True
        return [Publish(), *self._settle(record, now)]

    def load_failed(self, process: str, reason: str, now: float) -> list[Effect]:
        """Handle an executor's report that the model cannot be loaded. The failure is final."""
        executor = self._executor(process)
        record = self.instances.get(executor.instance)
        if record is None or record.process not in (process, ""):
            # Dismissed, or replaced. An empty link is valid: the executor may end right after its
            # report.
            return []
        return self._failed(record, reason, now)

    def busy(self, process: str, busy_ms: int, now: float) -> list[Effect]:
        """Handle an executor's report of the time spent on one request; 0: idle."""
        record = self._of_executor(process)
        if record is None:
            return []
        was_busy, record.busy = record.busy, busy_ms > 0
        if record.leave_at and was_busy != record.busy:
            return [Publish()]
        limit_s = self._execute_timeout_s
        late = busy_ms > limit_s * 1000
        if not late or record.left or record.state not in (State.LOADING, State.READY):
            return []
        reason = f"a request ran longer than execute_timeout_s ({limit_s:g} s)"
        return self._stop(record, reason, now)

    def silent(self, process: str, now: float) -> list[Effect]:
        """Handle an executor without work that answers nothing."""
        record = self._of_executor(process)
        if record is None or record.left or record.state is not State.READY:
            return []
        return self._stop(record, "its executor gave no sign of life", now)

    def outgrown(self, process: str, reason: str, now: float) -> list[Effect]:
        """Handle an executor with more memory than its model may use. A first load fails."""
        record = self._of_executor(process)
        if record is None or record.left or record.state not in (State.LOADING, State.READY):
            return []
        if not record.loaded:
            return self._give_up(record, reason, now)
        return self._stop(record, reason, now)

    def _executor_joined(self, process: str, pid: int, name: str, now: float) -> list[Effect]:
        # The executor named no instance, but the supervisor may have reported its pid.
        if not name:
            name = next((r.name for r in self.instances.values() if r.pid == pid), "")
        record = self.instances.get(name)
        if record is None or record.left or record.state is State.FAILED or self.draining:
            return [Dismiss(process, "not wanted")]
        if any(r.process == process for r in self.instances.values() if r is not record):
            raise ProtocolViolation(f"{process} ran another instance than {name} before")
        rival = record.process if record.process in self.processes else ""
        if rival and record.pid != pid:
            return [Dismiss(process, "another executor runs this instance")]
        if record.process != process or record.pid != pid:
            record.forget_process()
            if record.state is State.READY:
                record.step(Event.LOST, now)
        self.processes[process].instance = name
        record.run_as(pid, process)
        record.step(Event.CONNECTED, now)
        return []

    def _supervisor_joined(self, now: float) -> list[Effect]:
        """Let a new supervisor adopt linked processes, and write off the old supervisor's unlinked
        ones."""
        effects: list[Effect] = [Desire()]
        for record in self.instances.values():
            linked = record.process in self.processes or record.awaited_until
            if not linked and record.state in (State.STARTING, State.STOPPING, State.FAILED):
                record.step(Event.EXITED, now)
                record.forget_process()
        return effects + self.models.tick(now)

    def _displace(self, record: InstanceRecord, now: float) -> list[Effect]:
        """Dismiss the instance's process, since another process takes over."""
        rival, was_live = record.process, record.live
        record.forget_process()
        if record.state in (State.LOADING, State.READY):
            record.step(Event.LOST, now)
        effects: list[Effect] = [Publish()] if was_live else []
        if rival in self.processes:
            self.processes[rival].instance = ""
            effects.append(Dismiss(rival, "another executor runs this instance"))
        return effects

    def _stop(self, record: InstanceRecord, reason: str, now: float) -> list[Effect]:
        record.step(Event.STOP, now, reason)
        about = LogFields(instance=record.name, pid=record.pid, reason=reason)
        return [LogForOperators("stopping", about), Publish(), Desire()]

    def _give_up(self, record: InstanceRecord, reason: str, now: float) -> list[Effect]:
        """Fail an instance whose model never loaded, and dismiss its process. No further attempt
        follows."""
        rival = record.process
        record.lose_link()
        effects: list[Effect] = []
        if rival in self.processes:
            self.processes[rival].instance = ""
            effects = [Dismiss(rival, "its model is given up")]
        return effects + self._failed(record, reason, now)

    def _failed(self, record: InstanceRecord, reason: str, now: float) -> list[Effect]:
        record.step(Event.LOAD_FAILED, now, reason)
        return [given_up(record.name, reason), Publish(), Desire(), *self._settle(record, now)]

    def _settle(self, record: InstanceRecord, now: float) -> list[Effect]:
        return self.models.settle(self.models.home(record.name)[0], now)

    def _instance(self, name: str) -> InstanceRecord:
        record = self.instances.get(name)
        if record is None:
            raise ProtocolViolation(f"unknown instance {name!r}")
        return record

    def _executor(self, process: str) -> ProcessRecord:
        executor = self.processes.get(process)
        if executor is None or executor.role != "executor":
            raise ProtocolViolation(f"{process} is not an executor")
        return executor

    def _of_executor(self, process: str) -> InstanceRecord | None:
        """Return the instance of an executor, or None if the executor is dismissed or known to be
        dead."""
        executor = self._executor(process)
        record = self.instances.get(executor.instance)
        return record if record is not None and record.process == process else None
