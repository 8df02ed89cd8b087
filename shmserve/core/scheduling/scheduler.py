"""Scheduler: what an executor's loop asks of the queue of requests that wait. Pure.

Three queues answer: `RequestQueue` (one request at a time), `BatchQueue` (batches of requests that
agree), `SequenceQueue` (batches of requests of different sequences). The loop does not know which
of them it has.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

NEVER_NS = 1 << 63

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Turn(Struct, Generic[Item], frozen=True, gc=False):
    """A scheduler's decision.

    Attributes:
        batch: requests to run now, together.
        late: requests whose deadline has passed.
        rejected: requests that the policy lets wait no longer.
        wait_ns: time after which the scheduler must be asked again even if no request comes;
            None: no such time.
        is_due: True if there is a batch to run, even one that may not run yet.
    """

    batch: Sequence[Item] = ()
    late: Sequence[Item] = ()
    rejected: Sequence[Item] = ()
    wait_ns: int | None = None
    is_due: bool = False


class Scheduler(Protocol[Key, Item]):
    """The waiting requests of one model instance.

    Attributes:
        waiting: the requests' keys; only to be read.
        next_end_ns: no deadline or policy limit of a waiting request passes before this time.
    """

    next_end_ns: int

    @property
    def waiting(self) -> Mapping[Key, object]: ...

    def cancel(self, key: Key) -> Item | None:
        """Take a waiting request out; return None if it does not wait here."""
        ...

    def next(self, now_ns: int, hurry: bool = False, may_run: bool = True) -> Turn[Item]:
        """Decide what runs now. `hurry`: no further request will come. Without `may_run` every
        request stays, and a batch may grow."""
        ...

    def expire(self, now_ns: int) -> tuple[list[Item], list[Item]]:
        """Take out, and return, the late and the rejected requests."""
        ...
