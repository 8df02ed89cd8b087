"""Child processes of the supervisor: started here or adopted, both known by pidfd."""

from __future__ import annotations

import os
import signal
from typing import Protocol

from msgspec import Struct

from shmserve.observe import flight_recorder
from shmserve.transport.processes import describe_status, pidfd_open, send_signal


class Waitable(Protocol):
    """Child of this process: started by `subprocess`, or forked by another process for this
    one."""

    pid: int

    def wait(self, timeout: float) -> int | None: ...


class Child(Struct, eq=False):
    """Process that the supervisor started or adopted.

    The supervisor reaps its own children, each by pid. An adopted process is reaped by its parent.

    Attributes:
        name: model instance, or role and number.
        popen: None if the process was adopted.
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
        """Return the child for a process just started. It is not reaped yet, so the pid is
        certainly right."""
        pidfd = pidfd_open(popen.pid)
        assert pidfd is not None
        return cls(name, popen.pid, pidfd, popen, now, process)

    @property
    def stopping(self) -> bool:
        return self.kill_at is not None

    def stop(self, now: float, grace_s: float) -> None:
        """Send SIGTERM now (once) and SIGKILL after the grace. A later call can only shorten the
        grace."""
        if self.kill_at is None:
            self.kill_at = now + grace_s
            send_signal(self.pidfd, signal.SIGTERM)
        self.kill_at = min(self.kill_at, now + grace_s)

    def enforce(self, now: float) -> None:
        """Kill the process if it was told to stop and the grace is over."""
        if self.kill_at is not None and now >= self.kill_at:
            self.kill()
            self.kill_at = now + 1.0  # the kernel may take a while

    def kill(self) -> None:
        send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """Reap a process that has ended. Return its exit status, None if it was no child of this
        process. Closes the pidfd.

        Processes that the child has forked are killed: they hold its sockets, so no peer would
        notice the end, and its memory. The process group has the child's pid. The kernel does not
        reuse the pid while the group has members or, for own children, before they are reaped.
        """
        status = self._reap()
        reason = describe_status(status)
        flight_recorder.record("process ended", self.name, f"pid {self.pid}: {reason}")
        return status

    def _reap(self) -> int | None:
        number_is_its_own = self.popen is not None or not self._is_reaped()
        os.close(self.pidfd)
        if not number_is_its_own and os.path.exists(f"/proc/{self.pid}"):
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
