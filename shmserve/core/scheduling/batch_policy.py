"""Batch policy: `dynamic_batching` of a model's configuration, in the batcher's units."""

from msgspec import UNSET, Struct

from shmserve.tensor.config_document import ConfigDocument, QueuePolicyEntry

_US = 1000  # nanoseconds


class QueuePolicy(Struct, frozen=True):
    """Waiting rules for requests of one priority level.

    Attributes:
        delays: True: a request over the time limit runs after all others of its level; False: it
            is rejected.
        timeout_ns: time limit for waiting; 0: no limit.
        overridable: True if a request may ask for a shorter time limit.
        max_size: number of waiting requests; 0: only the server's general limits apply.
    """

    delays: bool = False
    timeout_ns: int = 0
    overridable: bool = False
    max_size: int = 0

    def timeout_of(self, asked_ns: int) -> int:
        """Return the waiting limit (0: unlimited) of a request which asks for `asked_ns` (0: no
        wish)."""
        if not (self.overridable and asked_ns > 0):
            return self.timeout_ns
        return min(asked_ns, self.timeout_ns or asked_ns)


class BatchPolicy(Struct, frozen=True):
    """Rules for grouping requests into batches. `preferred`: batch sizes worth waiting for.
    `levels`: policy for each priority, most urgent first. `default_level`: index in `levels`."""

    max_size: int
    preferred: frozenset[int] = frozenset()
    max_delay_ns: int = 0
    levels: tuple[QueuePolicy, ...] = (QueuePolicy(),)
    default_level: int = 0

    def level_of(self, priority: object) -> int:
        """Return the index of the level for a request's parameter `priority`. 1 is the most
        urgent; a value outside the levels means the default level."""
        if type(priority) is int and 1 <= priority <= len(self.levels):
            return priority - 1
        return self.default_level

    @property
    def is_bounded(self) -> bool:
        """True if a request may be rejected before it runs."""
        return any(p.max_size or p.overridable or p.timeout_ns for p in self.levels)


def batch_policy(config: ConfigDocument) -> BatchPolicy | None:
    """Return the policy of a configuration, or None if requests run one by one."""
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
