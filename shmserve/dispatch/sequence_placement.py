"""Which executor a request of a sequence goes to.

The executor decides what lives there; its status page tells. A frontend only looks, so any number
of them agree without talking to each other, and a new executor takes nothing away from others.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from shmserve.dispatch.executor_pool import ExecutorPool
from shmserve.protocol.control.data_messages import Parameter
from shmserve.shm.status_page import StatusView, digest

Views = Iterable[tuple[ExecutorPool, StatusView | None]]


def home_of(views: Views, sequence: Parameter) -> ExecutorPool | None:
    """The executor where a sequence lives, as far as these tell."""
    number = _number(sequence)
    for pool, view in views:
        if number and view is not None and view.has_sequence(number):
            return pool
    return None


def where_to_begin(views: Views, sequence: Parameter) -> list[ExecutorPool]:
    """The order in which a sequence that lives nowhere should begin with them: those with most
    free slots first, then the least loaded, and of equal ones first what a hash of the id says,
    so that sequences that begin at once spread."""
    number = _number(sequence)

    def rank(item: tuple[ExecutorPool, StatusView | None]) -> tuple[int, int, bytes]:
        pool, view = item
        name = f"{number} {pool.instance.name}".encode()
        free = view.free_slots if view is not None else 0
        return -free, pool.load, blake2b(name, digest_size=8).digest()

    return [pool for pool, _ in sorted(views, key=rank)]


def _number(sequence: Parameter) -> int:
    return digest(sequence) if isinstance(sequence, int | str) else 0
