"""Serving watch: tells the coordinator whether gRPC processes serve, as readiness depends on it.

A restart alone changes nothing. Readiness ends if restarted processes do not come to serve either:
two in a row ended before they held their locks, or no process has held a lock for 15 s. At a
start, readiness waits for the first gRPC process. After three failed processes the service ends
with status 1; during a reload the new generation ends instead. A hanging process counts as serving
until its silence is found, up to `watchdog_s` later.

The coordinator judges HTTP workers by itself: none has been linked for 10 s, or since the
coordinator's own start (`core.control.reconciler`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shmserve.protocol.control.link_messages import Exited, Started
from shmserve.supervisor.processes.frontends import Frontends

_log = logging.getLogger(__name__)

_ROLE = "grpc"
_ATTEMPTS = 3  # processes tried at a start of the service
_STARTING = "no process has begun to listen yet"


class ServingWatch:
    """Watch over `frontends`, reported by `send`.

    Args:
        begins: whether the service begins with this supervisor.
        waits: whether gRPC processes may listen only once the service is ready otherwise.

    Attributes:
        reason: why no gRPC process serves; empty if one serves or none should.
    """

    def __init__(
        self,
        frontends: Frontends,
        send: Callable[[Started | Exited], object],
        begins: bool,
        waits: bool,
    ) -> None:
        self._frontends = frontends
        self._send = send
        self._begins = begins
        self._failing = False
        self._again = False
        self.reason = _STARTING if begins and not waits and frontends.wanted else ""

    def tell_again(self) -> None:
        """Report the state again: the coordinator is new, or has a new link."""
        self._again = True

    def turn(self, now: float, may_listen: bool) -> str:
        """Report a change. Return why the service's start has failed; empty if it has not."""
        if not may_listen:
            self._frontends.excuse(now)
        reason = self._frontends.hindrance(now)
        if reason is not None and (self._again or reason != self.reason):
            self._tell(reason)
        self._begins = self._begins and reason != ""
        if not self._begins or self._frontends.failures < _ATTEMPTS:
            return ""
        self._begins = False
        return f"gRPC cannot be served: {reason}, as {_ATTEMPTS - 1} before it"

    def _tell(self, reason: str) -> None:
        self.reason, self._again = reason, False
        self._send(Exited(_ROLE, 0, reason) if reason else Started(_ROLE, 0))
        if bool(reason) == self._failing:
            return
        self._failing = bool(reason)
        if reason:
            _log.error("not ready: no gRPC process serves: %s", reason)
        else:
            _log.info("gRPC is served again")
