"""Which executor a request of a sequence goes to.

The executor decides what lives there; its status page tells. A frontend only looks, so any number
of them agree without talking to each other, and a new executor takes nothing away from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from shmserve.dispatch.executor_pool import ExecutorPool
from shmserve.protocol.control.data_messages import Parameter
from shmserve.shm.status_page import StatusView, digest


def by_sequence(
    views: Sequence[tuple[ExecutorPool, StatusView | None]], sequence: Parameter
) -> list[ExecutorPool]:
    """The executor where a sequence lives, alone; else all of them in the order in which it
    should begin there: those with most free slots first, then the least loaded, and of equal
    ones first what a hash of the id says, so that sequences that begin at once spread."""
    number = digest(sequence) if isinstance(sequence, int | str) else 0
    for pool, view in views:
        if number and view is not None and view.has_sequence(number):
            return [pool]

    def rank(item: tuple[ExecutorPool, StatusView | None]) -> tuple[int, int, bytes]:
        pool, view = item
        name = f"{number} {pool.instance.name}".encode()
        free = view.free_slots if view is not None else 0
        return -free, pool.load, blake2b(name, digest_size=8).digest()

    return [pool for pool, _ in sorted(views, key=rank)]
