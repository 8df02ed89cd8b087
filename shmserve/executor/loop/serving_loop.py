"""What the executor's loops have in common, whatever they serve and in which order."""

from __future__ import annotations

import time

from shmserve.executor.backend import Backend
from shmserve.executor.loop.channels import Channels
from shmserve.executor.loop.connections import FrontendConnection
from shmserve.executor.rate_limited import SharedResources
from shmserve.executor.run_statistics import RunStatistics
from shmserve.executor.tensors.workspace import Workspace
from shmserve.protocol.control.data_messages import Execute

WAKE_S = 1.0  # idle work: trimming segments, publishing what is held
REST_S = 3600.0  # where there is none: until something comes

Requested = tuple[FrontendConnection, Execute]
Key = tuple[FrontendConnection, int]  # of a request


class ServingLoop:
    """Serves one loaded backend on the channels of one listener until `stop` is called.

    `resources`: what each execution must hold.

    Attributes:
        executed: how many requests, or streams, the model has worked on to their end.
    """

    def __init__(
        self,
        backend: Backend,
        workspace: Workspace,
        channels: Channels,
        segment_idle_s: float,
        resources: SharedResources | None = None,
    ) -> None:
        self.executed = 0
        self._backend = backend
        self._workspace = workspace
        self._channels = channels
        self._status = status = channels.status
        self._idle_s = segment_idle_s
        self._resources = resources
        self._statistics = RunStatistics(status.counters, workspace.spec)
        self._stopping = False
        self._tick_at = time.monotonic() + WAKE_S

    def run(self) -> None:
        """Serve until stopped and everything accepted is answered."""
        raise NotImplementedError

    def stop(self) -> None:
        """Finish what was accepted, then return from `run`. Safe from any thread or signal."""
        self._stopping = True
        self._channels.wake()

    @property
    def queued(self) -> int:
        """How many requests wait."""
        raise NotImplementedError

    def wake(self) -> None:
        """What is held has changed. Safe from any thread."""
        self._channels.wake()

    def _tick(self) -> bool:
        """What is done once in `WAKE_S`, when `_tick_at` has come; whether it need not be done
        again before something comes."""
        self._tick_at = time.monotonic() + WAKE_S
        self._workspace.trim(self._idle_s)
        is_held = self._statistics.measure(self._workspace.memory)
        if is_held or self._resources is not None or self._workspace.devices.ordinal is not None:
            return False
        return self._channels.quiet and self._channels.settled
