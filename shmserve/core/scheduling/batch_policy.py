"""What `dynamic_batching` of a model's configuration asks for, in the batcher's units."""

from __future__ import annotations

from msgspec import UNSET, Struct

from shmserve.tensor.config_document import ConfigDocument, QueuePolicyEntry

_US = 1000  # nanoseconds


class QueuePolicy(Struct, frozen=True):
    """How the requests of one priority level wait.

    `delays`: what has waited too long runs after all others of its level; else it is rejected.
    `timeout_ns` 0: no limit; `overridable`: a request may ask for a shorter one.
    `max_size` 0: the server's own bounds hold.
    """

    delays: bool = False
    timeout_ns: int = 0
    overridable: bool = False
    max_size: int = 0

    def timeout_of(self, asked_ns: int) -> int:
        """How long a request may wait that asks for `asked_ns` (0: it does not); 0: for ever."""
        if not (self.overridable and asked_ns > 0):
            return self.timeout_ns
        return min(asked_ns, self.timeout_ns or asked_ns)


class BatchPolicy(Struct, frozen=True):
    """How requests become batches. `levels`: a policy for each priority, the most urgent first;
    `default_level` is an index of them. `preferred`: sizes worth waiting for."""

    max_size: int
    preferred: frozenset[int] = frozenset()
    max_delay_ns: int = 0
    levels: tuple[QueuePolicy, ...] = (QueuePolicy(),)
    default_level: int = 0

    def level_of(self, priority: object) -> int:
        """The level of a request's parameter `priority`: 1 is the most urgent, anything that
        is no level means the default."""
        if type(priority) is int and 1 <= priority <= len(self.levels):
            return priority - 1
        return self.default_level

    @property
    def is_bounded(self) -> bool:
        """Whether a request may be rejected before it runs."""
        return any(p.max_size or p.overridable or p.timeout_ns for p in self.levels)


def batch_policy(config: ConfigDocument) -> BatchPolicy | None:
    """The policy of a configuration; None: requests run one by one."""
    entry = config.dynamic_batching
    if entry is UNSET:
        return None
    default = QueuePolicyEntry()
    if entry.default_queue_policy is not UNSET:
        default = entry.default_queue_policy
    own = {} if entry.priority_queue_policy is UNSET else entry.priority_queue_policy
    count = max(1, entry.priority_levels or 0)
    levels = [_policy(own.get(str(level), default)) for level in range(1, count + 1)]
    max_size = max(1, config.max_batch_size)
    return BatchPolicy(
        max_size,
        frozenset(entry.preferred_batch_size or ()) or frozenset((max_size,)),
        (entry.max_queue_delay_microseconds or 0) * _US,
        tuple(levels),
        max(0, (entry.default_priority_level or 1) - 1),
    )


def _policy(entry: QueuePolicyEntry) -> QueuePolicy:
    return QueuePolicy(
        entry.timeout_action == "DELAY",
        entry.default_timeout_microseconds * _US,
        entry.allow_timeout_override,
        entry.max_queue_size,
    )
