"""Rate limiting in the executor: the resources that an instance holds while executing.

Needed where `rate_limit` is on and the instance's group has resources. The coordinator gives each
execution a turn. The executor asks for a turn and goes on with other work: nothing here waits.
After a restart of the coordinator, the executor asks again. The resources that the executor holds
are named in its hello.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from msgspec import UNSET

from shmserve import ids
from shmserve.config import Settings
from shmserve.core.scheduling.rate_limit_policy import RateLimit, amounts, check_amounts, rate_limit
from shmserve.protocol.control.link_messages import AcquireResources, ReleaseResources
from shmserve.protocol.control.messages import ToCoordinator
from shmserve.protocol.triton_config import instance_groups
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)


def limit_of(settings: Settings, instance: str, spec: ModelSpec, device: str) -> RateLimit | None:
    """Return the resources that the instance must hold to execute, or None if no resources are
    needed.

    Raises:
        ConfigError: the settings provide fewer resources.
    """
    entries, groups = spec.config.groups, instance_groups.read(spec.config)
    if all(entry.rate_limiter is UNSET for entry in entries):
        return None
    index = ids.instance_index(instance)
    if settings.rate_limit == "off":
        if index == 0:
            _log.info("configuration: instance_group.rate_limiter: no effect (rate_limit is off)")
        return None
    by_index = [e for e, group in zip(entries, groups, strict=True) for _ in range(group.size)]
    limit = rate_limit(by_index[index], device)
    if limit is not None:
        check_amounts(amounts(settings.rate_limit_resources), limit, spec.name)
    return limit


class SharedResources:
    """The resources of one instance, acquired for one execution after another.

    The loop calls `may_run` and `spent`; the link's thread calls the other methods.

    Args:
        send: sends a message to the coordinator.
        wake: called when the instance has its turn.
    """

    def __init__(self, send: Callable[[ToCoordinator], None], wake: Callable[[], None]) -> None:
        self._send = send
        self._wake = wake
        self._lock = threading.Lock()
        self._tickets = 0
        self._waiting = False  # for the coordinator's answer to the latest ticket
        self._holding = False
        self._is_spent = False  # still held, but for an execution that has ended

    @property
    def held(self) -> bool:
        """Return whether an execution may begin."""
        return self._holding and not self._is_spent

    def may_run(self, is_due: bool) -> bool:
        """Return whether an execution may begin. If not, ask the coordinator for a turn.

        Args:
            is_due: an execution is waiting. Without a waiting execution, all resources go back.
        """
        with self._lock:
            if is_due:
                if not (self._waiting or self.held):
                    self._tickets += 1
                    self._waiting, self._holding, self._is_spent = True, False, False
                    self._send(AcquireResources(self._tickets))
            elif self._waiting or self._holding:
                self._waiting = self._holding = self._is_spent = False
                self._send(ReleaseResources())
            return self.held

    def spent(self) -> None:
        """Note that the execution is over. The next call of `may_run` gives the resources back or
        asks for another turn."""
        self._is_spent = True

    def acquired(self, ticket: int) -> None:
        """Take the coordinator's answer."""
        with self._lock:
            if not self._waiting or ticket != self._tickets:
                return  # given back meanwhile, as the coordinator has been told
            self._waiting, self._holding = False, True
        self._wake()

    def welcomed(self) -> None:
        """Ask again, as the coordinator that sent the welcome may be a new process."""
        with self._lock:
            if self._waiting:
                self._send(AcquireResources(self._tickets))

    @property
    def ticket(self) -> int:
        """Return the ticket of the resources that are held, or 0 if no resources are held."""
        with self._lock:
            return self._tickets if self._holding else 0
