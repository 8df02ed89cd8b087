"""Sequence policy: `sequence_batching` of a model's configuration, in the queue's units."""

from __future__ import annotations

from math import ceil

from msgspec import UNSET, Struct
from msgspec.structs import replace

from shmserve.core.caller import UNKNOWN_CALLER
from shmserve.tensor.config_document import ConfigDocument, DirectEntry, OldestEntry

_US = 1000  # nanoseconds
DEFAULT_IDLE_US = 1_000_000
MAX_SEQUENCES = 1024  # with a slot, and as many without


class SequencePolicy(Struct, frozen=True):
    """Rules for grouping requests of sequences into batches.

    Attributes:
        slots: number of sequences in the model at a time; further sequences wait.
        max_size: requests of one batch, each of another sequence.
        by_slot: True: a batch is ordered by slots (`direct`); False: by arrival (`oldest`).
        preferred: batch sizes which go at once (`oldest`).
        enough: number of ready requests which go at once (`direct`).
        max_delay_ns: longest wait of a smaller batch for further requests.
        idle_ns: time without a request after which a sequence has ended.
        max_waiting: largest number of sequences without a slot.
        caller_share: largest part of `max_waiting`, and of the slots while others wait, for one
            caller. 1: callers are not told apart.
        patience_ns: silence, or wait of another caller, after which an idle sequence may have to
            give way.
    """

    slots: int
    max_size: int
    by_slot: bool = True
    preferred: frozenset[int] = frozenset()
    enough: int = 1
    max_delay_ns: int = 0
    idle_ns: int = DEFAULT_IDLE_US * _US
    max_waiting: int = MAX_SEQUENCES
    caller_share: float = 1.0
    patience_ns: int = 1_000_000_000

    def one_by_one(self) -> SequencePolicy:
        """Return this policy for a model without batches, where no batch waits for more."""
        return replace(
            self, max_size=1, by_slot=False, preferred=frozenset((1,)), enough=1, max_delay_ns=0
        )

    def turn_of(self, caller: int) -> int:
        """Return the number by which a caller takes turns."""
        return caller if self.caller_share < 1 else UNKNOWN_CALLER

    def size_now(self, ready: int) -> int:
        """Return how many of `ready` requests to run at once, or 0 if all may wait for more."""
        if self.by_slot:
            return ready if ready >= self.enough else 0
        return max((size for size in self.preferred if size <= ready), default=0)


def sequence_policy(
    config: ConfigDocument, max_waiting: int = MAX_SEQUENCES, caller_share: float = 1.0
) -> SequencePolicy | None:
    """Return the policy of a configuration, or None if its requests form no sequences.
    `max_waiting` and `caller_share` are as in `SequencePolicy`."""
    entry = config.sequence_batching
    if entry is UNSET:
        return None
    batch = max(1, config.max_batch_size)
    slots = min(batch, MAX_SEQUENCES)
    idle_ns = (entry.max_sequence_idle_microseconds or DEFAULT_IDLE_US) * _US
    if entry.oldest is not UNSET:
        oldest: OldestEntry = entry.oldest
        return SequencePolicy(
            slots=max(1, min(oldest.max_candidate_sequences, MAX_SEQUENCES)),
            max_size=batch,
            by_slot=False,
            preferred=frozenset(oldest.preferred_batch_size) or frozenset((batch,)),
            max_delay_ns=oldest.max_queue_delay_microseconds * _US,
            idle_ns=idle_ns,
            max_waiting=max_waiting,
            caller_share=caller_share,
        )
    direct = DirectEntry() if entry.direct is UNSET else entry.direct
    return SequencePolicy(
        slots=slots,
        max_size=slots,
        enough=max(1, ceil(direct.minimum_slot_utilization * slots)),
        max_delay_ns=direct.max_queue_delay_microseconds * _US,
        idle_ns=idle_ns,
        max_waiting=max_waiting,
        caller_share=caller_share,
    )
