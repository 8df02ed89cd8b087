"""What an instance holds while it executes, where `rate_limit` is on and its group has resources.

The coordinator gives each execution its turn. Whoever wants one asks and goes on with other work:
nothing here waits. An executor that finds its coordinator restarted asks again, and what it holds
it has told with its hello.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from msgspec import UNSET

from shmserve import ids
from shmserve.config import Settings
from shmserve.core.scheduling.rate_limit_policy import (
    RateLimit,
    amounts,
    check_amounts,
    rate_limit,
)
from shmserve.protocol.control.link_messages import AcquireResources, ReleaseResources
from shmserve.protocol.control.messages import ToCoordinator
from shmserve.protocol.triton_config import instance_groups
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)


def limit_of(settings: Settings, instance: str, spec: ModelSpec, device: str) -> RateLimit | None:
    """What the instance must hold; None: nothing.

    Raises:
        ConfigError: there is less than that.
    """
    entries, groups = spec.config.groups, instance_groups.read(spec.config)
    if all(entry.rate_limiter is UNSET for entry in entries):
        return None
    index = ids.instance_index(instance)
    if settings.rate_limit == "off":
        if index == 0:
            _log.info("configuration: instance_group.rate_limiter: no effect (rate_limit is off)")
        return None
    of_each = [e for e, group in zip(entries, groups, strict=True) for _ in range(group.size)]
    limit = rate_limit(of_each[index], device)
    if limit is not None:
        check_amounts(amounts(settings.rate_limit_resources), limit, spec.name)
    return limit


class SharedResources:
    """The resources of one instance, for one execution after another.

    `send` tells the coordinator; `wake` is called when there is a turn. The loop calls `may_run`
    and `spent`; the link's thread the others.
    """

    def __init__(self, send: Callable[[ToCoordinator], None], wake: Callable[[], None]) -> None:
        self._send = send
        self._wake = wake
        self._lock = threading.Lock()
        self._tickets = 0
        self._waiting = False  # for the answer to the latest ticket
        self._holding = False
        self._is_spent = False  # they are held, but for an execution that is over

    @property
    def held(self) -> bool:
        """Whether an execution may begin."""
        return self._holding and not self._is_spent

    def may_run(self, is_due: bool) -> bool:
        """Whether an execution may begin; if not it is asked for. `is_due`: there is something to
        execute; else everything goes back."""
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
        """The execution is over. `may_run`, to be called soon, gives back or asks anew."""
        self._is_spent = True

    def acquired(self, ticket: int) -> None:
        """The coordinator's answer."""
        with self._lock:
            if not self._waiting or ticket != self._tickets:
                return  # nobody wants it any more, and the coordinator has been told so
            self._waiting, self._holding = False, True
        self._wake()

    def welcomed(self) -> None:
        """By a coordinator that may be another one."""
        with self._lock:
            if self._waiting:
                self._send(AcquireResources(self._tickets))

    @property
    def ticket(self) -> int:
        """Of what is held; 0: nothing is."""
        with self._lock:
            return self._tickets if self._holding else 0
