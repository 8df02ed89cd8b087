"""Children of the supervisor: processes started here or adopted, all known by pidfd."""

from __future__ import annotations

import os
import signal
from typing import Protocol

from msgspec import Struct

from shmserve.observe import flight_recorder
from shmserve.transport.processes import describe_status, pidfd_open, send_signal


class Waitable(Protocol):
    """Child of this process: started by `subprocess`, or forked for it by the template."""

    pid: int

    def wait(self, timeout: float) -> int | None: ...


class Child(Struct, eq=False):
    """Process that the supervisor started or adopted.

    The supervisor reaps the processes it started, each by pid. The parent of an adopted process
    reaps it.

    `name`: model instance, or role and number. `popen`: None for an adopted process.
    """

    name: str
    pid: int
    pidfd: int
    popen: Waitable | None
    started_at: float
    process: str = ""  # process id of an executor
    kill_at: float | None = None  # when to send SIGKILL; None: not told to stop

    @classmethod
    def of(cls, name: str, popen: Waitable, now: float, process: str = "") -> Child:
        """Return the child for a process just started: not reaped, so the pid is right."""
        pidfd = pidfd_open(popen.pid)
        assert pidfd is not None
        return cls(name, popen.pid, pidfd, popen, now, process)

    @property
    def stopping(self) -> bool:
        return self.kill_at is not None

    def stop(self, now: float, grace_s: float) -> None:
        """Send SIGTERM once, and SIGKILL after the grace, which later calls can only shorten."""
        if self.kill_at is None:
            self.kill_at = now + grace_s
            send_signal(self.pidfd, signal.SIGTERM)
        self.kill_at = min(self.kill_at, now + grace_s)

    def enforce(self, now: float) -> None:
        """Kill the process if the grace after `stop` is over."""
        if self.kill_at is not None and now >= self.kill_at:
            self.kill()
            self.kill_at = now + 1.0  # the kernel may take a while

    def kill(self) -> None:
        send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """Reap an ended process. Return the exit status, None for a process with another parent.
        Closes the pidfd.

        All forks of the child are killed, by process group: they hold its memory and its sockets,
        so peers would not notice its end. The group id is the child's pid. The kernel reuses the
        pid only when the group is empty and, for own children, the child is reaped.
        """
        status = self._reap()
        reason = describe_status(status)
        flight_recorder.record("process ended", self.name, f"pid {self.pid}: {reason}")
        return status

    def _reap(self) -> int | None:
        pid_is_certain = self.popen is not None or not self._is_reaped()
        os.close(self.pidfd)
        if not pid_is_certain and os.path.exists(f"/proc/{self.pid}"):
            return None  # another process has the pid by now, so the group was empty
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the group is empty
            pass
        return self.popen.wait(5.0) if self.popen is not None else None

    def _is_reaped(self) -> bool:
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError:
            return True
        return False
