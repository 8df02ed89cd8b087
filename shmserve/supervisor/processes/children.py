"""Processes the supervisor runs: its own children and those it adopted, both by pidfd."""

from __future__ import annotations

import os
import signal
from typing import Protocol

from msgspec import Struct

from shmserve.observe import flight_recorder
from shmserve.transport.processes import describe_status, pidfd_open, send_signal


class Waitable(Protocol):
    """A child of this process: of `subprocess`, or one that another has forked for it."""

    pid: int

    def wait(self, timeout: float) -> int | None: ...


class Child(Struct, eq=False):
    """One process. `name` is its instance, or what else it is.

    A child of ours is reaped by its own pid alone; an adopted one by whoever inherited it.
    """

    name: str
    pid: int
    pidfd: int
    popen: Waitable | None
    started_at: float
    process: str = ""  # its process id, for executors
    kill_at: float | None = None  # it was told to stop; from then on it is killed

    @classmethod
    def of(cls, name: str, popen: Waitable, now: float, process: str = "") -> Child:
        """A process just started. Not reaped yet, so its pid is certainly its own."""
        pidfd = pidfd_open(popen.pid)
        assert pidfd is not None
        return cls(name, popen.pid, pidfd, popen, now, process)

    @property
    def stopping(self) -> bool:
        return self.kill_at is not None

    def stop(self, now: float, grace_s: float) -> None:
        """SIGTERM now (once), SIGKILL after the grace; a later call can only shorten it."""
        if self.kill_at is None:
            self.kill_at = now + grace_s
            send_signal(self.pidfd, signal.SIGTERM)
        self.kill_at = min(self.kill_at, now + grace_s)

    def enforce(self, now: float) -> None:
        """Kill it if it was told to stop and its grace is over."""
        if self.kill_at is not None and now >= self.kill_at:
            self.kill()
            self.kill_at = now + 1.0  # it may take the kernel a while

    def kill(self) -> None:
        send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """After it has ended: its status (None if it was not our child). Closes the pidfd.

        What it has forked ends with it: that has its sockets, so nobody else would notice, and its
        memory. Its group has its pid, which the kernel gives to nobody while the group has members
        or, in our own children, before they are reaped.
        """
        status = self._reap()
        reason = describe_status(status)
        flight_recorder.record("process ended", self.name, f"pid {self.pid}: {reason}")
        return status

    def _reap(self) -> int | None:
        number_is_its_own = self.popen is not None or not self._is_reaped()
        os.close(self.pidfd)
        if not number_is_its_own and os.path.exists(f"/proc/{self.pid}"):
            return None  # the number is another's by now, so its group had nobody left
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # nothing is left of it
            pass
        return self.popen.wait(5.0) if self.popen is not None else None

    def _is_reaped(self) -> bool:
        try:
            signal.pidfd_send_signal(self.pidfd, 0)
        except ProcessLookupError:
            return True
        return False
