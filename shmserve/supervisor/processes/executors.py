"""Executors: starts, adopts, restarts and stops processes so that exactly the desired ones run.

The coordinator decides which executors are desired. `core.control.lifecycle.Restarts`, one per
instance, decides when an ended process is started again.
"""

import logging
import os
from collections.abc import Callable, Iterable
from math import inf

from msgspec import Struct

from shmserve import ids
from shmserve.core import device_names
from shmserve.core.control.lifecycle import Restarts
from shmserve.log_fields import log_fields
from shmserve.observe import last_words
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Exited, Instance, Started
from shmserve.protocol.control.messages import ToCoordinator
from shmserve.supervisor.processes.children import Child, Waitable
from shmserve.supervisor.processes.executor_template import ExecutorTemplate
from shmserve.transport import rundir
from shmserve.transport.processes import describe_status, pidfd_open, spawn

_log = logging.getLogger(__name__)

_HURRY_S = 2.0  # grace for an executor that is stuck
_LOOK_S = 0.02  # between checks whether the template is ready


class Executors(Struct):
    """Executors of the service, at most one for each model instance."""

    _run_dir: str  # folder of the executors' endpoints
    _command: list[str]  # to exec; the process id and the master's pidfd are appended
    _master_fd: int  # pidfd that every process watches
    _tell: Callable[[ToCoordinator], None]  # sends to the coordinator
    _watch: Callable[[Child], None]  # called with each new child, to notice its end
    _template: ExecutorTemplate  # parent of forked executors, on the CPU
    _finish_s: float = _HURRY_S  # grace for an executor no longer desired
    _desired: dict[str, Instance] = {}
    _hurry: frozenset[str] = frozenset()
    _informed: bool = False  # `desire` was called; until then adopted executors are left alone
    _restarts: dict[str, Restarts] = {}
    _due: dict[str, float] = {}  # start time (monotonic) of waiting instances
    # earliest start time of stopped instances that the coordinator will desire again
    _pauses: dict[str, float] = {}
    _count: int = 0
    children: dict[str, Child] = {}  # by instance
    halted: bool = False  # draining: nothing is started any more

    def desire(self, instances: Iterable[Instance], now: float, hurry: Iterable[str] = ()) -> None:
        """Run exactly these instances from now on. Other executors get time to finish their
        requests, except the instances in `hurry`."""
        self._hurry = frozenset(hurry)
        self._desired = {instance.name: instance for instance in instances}
        self._informed = True
        for name in list(self._due):
            if name not in self._desired:
                del self._due[name]
        for name in self._desired:
            if name not in self.children and name not in self._due:
                self._due[name] = max(now, self._pauses.get(name, now))
        self._pauses = {name: due for name, due in self._pauses.items() if name in self._hurry}
        known = self._desired.keys() | self._hurry | self.children.keys()
        self._restarts = {name: r for name, r in self._restarts.items() if name in known}
        self.turn(now)

    def adopt(self, name: str, pid: int, process: str, now: float) -> None:
        """Take over an executor that runs already."""
        if name in self.children:
            return
        pidfd = pidfd_open(pid)
        if pidfd is None:
            return
        child = Child(name, pid, pidfd, None, now, process)
        self.children[name] = child
        self._due.pop(name, None)
        self._restart(name).started(now)
        self._watch(child)
        _log.info("adopted", extra=log_fields(instance=name, pid=pid))

    def report(self) -> None:
        """Tell a new coordinator which executors run."""
        for child in self.children.values():
            self._tell(Started(child.name, child.pid))

    def ended(self, child: Child, now: float) -> None:
        """Note and report a process's end, and schedule the instance's next start."""
        status = child.reap()
        reason = describe_status(status)
        if self.children.get(child.name) is child:
            del self.children[child.name]
        rundir.clean_endpoint(self._run_dir, child.process)
        self._tell(Exited(child.name, child.pid, reason))
        expected = self.halted or child.name not in self._desired
        level = logging.INFO if expected else logging.WARNING
        about = log_fields(instance=child.name, pid=child.pid, reason=reason)
        _log.log(level, "executor ended", extra=about)
        if expected and child.name not in self._hurry:
            return
        # An executor that exited by itself may have reported that its model cannot be loaded.
        at_once = child.stopping or status is None or status < 0
        due = self._pauses if expected else self._due
        due[child.name] = self._restart(child.name).ended(now, at_once=at_once)

    def forgive(self, name: str, now: float) -> None:
        """Restart an instance without a pause, now and next time: the end had another cause."""
        self._restarts.pop(name, None)
        if name in self._due:
            self._due[name] = now

    def turn(self, now: float) -> None:
        for name, child in self.children.items():
            if self._informed and name not in self._desired and not self.halted:
                child.stop(now, _HURRY_S if name in self._hurry else self._finish_s)
            child.enforce(now)
        for name, due in list(self._due.items()):
            if now < due or self.halted:
                continue
            if self._is_forked(self._desired[name]) and self._template.is_coming(now):
                self._due[name] = now + _LOOK_S
                continue
            del self._due[name]
            self._start(self._desired[name], now)

    def next_due(self) -> float:
        kills = [c.kill_at for c in self.children.values() if c.kill_at is not None]
        return min([*self._due.values(), *kills], default=inf)

    def halt(self) -> None:
        self.halted = True
        self._due.clear()

    def _start(self, instance: Instance, now: float) -> None:
        process = self._new_id()
        restart = self._restart(instance.name)
        try:
            popen = self._launch(process, instance)
        except OSError as ex:
            about = log_fields(instance=instance.name, error=ex)
            _log.error("executor not started", extra=about)
            self._due[instance.name] = restart.ended(now, at_once=False)
            return
        child = Child.of(instance.name, popen, now, process)
        self.children[instance.name] = child
        restart.started(now)
        self._watch(child)
        self._tell(Started(instance.name, child.pid))
        about = log_fields(instance=instance.name, process=process, pid=child.pid)
        _log.info("started executor", extra=about)

    def _launch(self, process: str, instance: Instance) -> Waitable:
        data = messages.encode(instance)
        if self._is_forked(instance) and (forked := self._template.fork(process, data)):
            return forked
        command = [*self._command, "--process-id", process, "--master-fd", str(self._master_fd)]
        with last_words.as_stdin(data) as stdin:
            return spawn(command, keep=(self._master_fd,), stdin=stdin)

    def _is_forked(self, instance: Instance) -> bool:
        # CUDA does not survive a fork, and looks for its device at process start
        return device_names.ordinal_of(instance.device) is None

    def _restart(self, name: str) -> Restarts:
        return self._restarts.setdefault(name, Restarts())

    def _new_id(self) -> str:
        """Return a process id whose endpoint does not exist, not even for an adopted executor."""
        while True:
            self._count += 1
            process = ids.new_process_id("executor", self._count)
            if not os.path.exists(rundir.endpoint(self._run_dir, process)):
                return process
