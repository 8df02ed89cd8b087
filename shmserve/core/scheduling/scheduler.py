"""Scheduler: interface between an executor's loop and the queue of waiting requests. Pure.

Three queues implement the interface: `RequestQueue` (one request at a time), `BatchQueue` (batches
of compatible requests), `SequenceQueue` (batches of requests of different sequences).
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct

NEVER_NS = 1 << 63

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Turn(Struct, Generic[Item], frozen=True, gc=False):
    """Decision of a scheduler.

    Attributes:
        batch: requests to run now, together.
        late: requests past their deadline.
        rejected: requests which the policy lets wait no longer.
        wait_ns: time after which to ask the scheduler again even if no request comes; None: no
            such time.
        is_due: True if there is a batch to run, even if it may not run yet.
    """

    batch: Sequence[Item] = ()
    late: Sequence[Item] = ()
    rejected: Sequence[Item] = ()
    wait_ns: int | None = None
    is_due: bool = False


class Scheduler(Protocol[Key, Item]):
    """Waiting requests of one model instance. `waiting`: mapping by the requests' keys; read-only.
    `next_end_ns`: no deadline or policy limit of a waiting request passes before this time."""

    next_end_ns: int

    @property
    def waiting(self) -> Mapping[Key, object]: ...

    def cancel(self, key: Key) -> Item | None:
        """Remove and return a waiting request; return None if the key is not waiting."""
        ...

    def next(self, now_ns: int, hurry: bool = False, may_run: bool = True) -> Turn[Item]:
        """Decide what runs now. `hurry`: no further request will come. Without `may_run` every
        request stays, and a batch may grow."""
        ...

    def expire(self, now_ns: int) -> tuple[list[Item], list[Item]]:
        """Remove and return the late and the rejected requests."""
        ...
