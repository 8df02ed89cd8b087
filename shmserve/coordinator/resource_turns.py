"""Resource turns: passes requests of executors to the rate limiter, and grants to executors.

A restarted coordinator does not know which executors hold resources until they say hello. It
grants nothing until every published executor has said hello, and at least for longer than a link
waits between two attempts to connect.
"""

from collections.abc import Sequence

from shmserve.coordinator.models.supervisor_sync import Send
from shmserve.core.scheduling.rate_limiter import Acquisition, RateLimiter
from shmserve.errors import ProtocolViolation
from shmserve.protocol.control import link_messages as link

RECONNECT_S = 1.0


class ResourceTurns:
    """Passes messages to the limiter and grants to executors. `opens_at`: earliest monotonic time,
    in seconds, at which a closed limiter may open."""

    def __init__(self, limiter: RateLimiter, send: Send, opens_at: float = 0.0) -> None:
        self._limiter = limiter
        self._send = send
        self._opens_at = opens_at

    @property
    def urgent(self) -> bool:
        """True if `tick` should be called soon."""
        return not self._limiter.is_open

    def hello(self, message: link.Hello) -> None:
        """Set the resources held by a process from its hello, which overrides earlier links."""
        if message.loaded is None or message.loaded.rate_limit is None:
            self.gone(message.process)
        else:
            limit = message.loaded.rate_limit
            self._tell(self._limiter.join(message.process, limit, message.acquired))

    def loaded(self, process: str, message: link.Loaded) -> None:
        if message.rate_limit is not None and not self._limiter.knows(process):
            self._tell(self._limiter.join(process, message.rate_limit))

    def gone(self, process: str) -> None:
        self._tell(self._limiter.leave(process))

    def handle(self, process: str, message: link.AcquireResources | link.ReleaseResources) -> None:
        """Acquire or release resources. Raise ProtocolViolation if the process needs no resources,
        or the message has no ticket."""
        if not self._limiter.knows(process):
            raise ProtocolViolation(f"{process} needs no resources")
        if isinstance(message, link.ReleaseResources):
            self._tell(self._limiter.release(process))
        elif message.ticket <= 0:
            raise ProtocolViolation(f"{process} asks with ticket {message.ticket}")
        else:
            self._tell(self._limiter.acquire(process, message.ticket))

    def tick(self, now: float, awaiting: bool) -> None:
        """Open the limiter when due. `awaiting`: true while executors from before a restart may
        still say hello."""
        if not self._limiter.is_open and now >= self._opens_at and not awaiting:
            self._tell(self._limiter.open())

    def _tell(self, acquisitions: Sequence[Acquisition]) -> None:
        for acquisition in acquisitions:
            self._send(acquisition.process, link.ResourcesAcquired(acquisition.ticket))
