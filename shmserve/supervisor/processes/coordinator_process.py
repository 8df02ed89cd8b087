"""Coordinator process: kept running, by a start or by adoption from an earlier supervisor."""

import logging
import os
import time
from math import inf

from shmserve import ids
from shmserve.core.control.lifecycle import Restarts
from shmserve.log_fields import log_fields
from shmserve.supervisor.processes.children import Child
from shmserve.transport import rundir
from shmserve.transport.processes import describe_status, has_ended, spawn

_log = logging.getLogger(__name__)

_STOP_S = 2.0


class CoordinatorProcess:
    """The coordinator of a service, at most one at a time. `command`: command line to exec;
    arguments are appended. `child`: the running process, or None."""

    def __init__(self, run_dir: str, command: list[str], master_fd: int) -> None:
        self._run_dir = run_dir
        self._command = command
        self._master_fd = master_fd
        self._epoch = rundir.read_epoch(run_dir)
        self._restarts = Restarts(base_s=0.2, cap_s=5.0)
        self._due = 0.0
        self._halted = False
        self.child: Child | None = None

    def next_due(self) -> float:
        """Return when (monotonic) to start a coordinator; inf during a run, or after `halt`."""
        return self._due if self.child is None and not self._halted else inf

    def turn(self, now: float, grpc_unserved: str) -> Child | None:
        """Start or adopt a coordinator if due. Return the new child, or None.

        `grpc_unserved`: why no gRPC process serves; empty if gRPC is served.
        """
        if now < self.next_due():
            return None
        holder = rundir.lock(self._run_dir, "coordinator").holder_pidfd()
        if holder is not None:
            pid, pidfd = holder
            self.child = Child("coordinator", pid, pidfd, None, now)
            _log.info("adopted the coordinator", extra=log_fields(pid=pid))
        else:
            self.child = self._start(now, grpc_unserved)
        if self.child is not None:
            self._restarts.started(now)
        return self.child

    def _start(self, now: float, grpc_unserved: str) -> Child | None:
        process = ids.new_process_id("coordinator", os.getpid())
        arguments = ["--process-id", process, "--epoch", self._epoch]
        arguments += ["--master-fd", str(self._master_fd)]
        if grpc_unserved:
            arguments += ["--grpc-unserved", grpc_unserved]
        try:
            popen = spawn([*self._command, *arguments], keep=(self._master_fd,))
        except OSError as ex:
            _log.error("coordinator not started", extra=log_fields(error=ex))
            self._due = self._restarts.ended(now, at_once=False)
            return None
        _log.info("started coordinator", extra=log_fields(process=process, pid=popen.pid))
        return Child.of("coordinator", popen, now)

    def ended(self, child: Child, now: float) -> bool:
        """Note the end of a child. Return False if the child is no coordinator."""
        if child is not self.child:
            return False
        self.child = None
        reason = describe_status(child.reap())
        self._due = self._restarts.ended(now)
        level = logging.INFO if self._halted else logging.WARNING
        _log.log(level, "coordinator ended", extra=log_fields(pid=child.pid, reason=reason))
        return True

    def halt(self) -> None:
        """Start no coordinator any more."""
        self._halted = True

    def stop(self) -> Child | None:
        """Stop the coordinator, with SIGKILL in the end. Return the ended child, or None."""
        child = self.child
        if child is not None:
            child.stop(time.monotonic(), _STOP_S)
            if not has_ended(child.pidfd, _STOP_S):
                child.kill()
                has_ended(child.pidfd, _STOP_S)
        return child
