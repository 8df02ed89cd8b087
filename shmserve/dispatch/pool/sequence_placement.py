"""Sequence placement: chooses the executor for a request of a sequence.

The executor alone decides which sequences live with it. Its status page has their digests and the
number of free slots, published before the executor answers. A frontend looks there, so frontends
agree without talking to each other, and a new executor takes nothing away from others. A request
goes where its sequence lives; a sequence that lives nowhere goes where most slots are free. For a
moment a frontend knows more than the pages: where it has just had a sequence begin
(`BegunSequences`).

A frontend that has read too early is found out: an executor refuses a request of a sequence that it
does not know. A page goes with its executor, so the sequences of a dead executor live nowhere until
they begin again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.protocol.control.data_messages import Parameter
from shmserve.shm.status_page import StatusView, digest
from shmserve.tensor.spec import ModelSpec

_MOST_BEGUN = 4096

Views = Iterable[tuple[ExecutorPool, StatusView | None]]


class BegunSequences:
    """Where this process has had sequences begin, for requests that it sends before the executor
    has told that they live there. Not thread-safe."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, str, int], str] = {}  # the latest last

    def sent(self, spec: ModelSpec, parameters: dict[str, Parameter], pool: ExecutorPool) -> None:
        """A request of a sequence is about to be sent there."""
        key = (spec.name, spec.version, _number(parameters.get("sequence_id", 0)))
        if parameters.get("sequence_start"):
            self._processes.pop(key, None)
            self._processes[key] = pool.instance.process
            if len(self._processes) > _MOST_BEGUN:
                del self._processes[next(iter(self._processes))]
        if parameters.get("sequence_end"):
            self._processes.pop(key, None)

    def home(
        self, spec: ModelSpec, parameters: dict[str, Parameter], pools: Iterable[ExecutorPool]
    ) -> ExecutorPool | None:
        """Where a sequence that goes on should live."""
        if parameters.get("sequence_start"):
            return None
        key = (spec.name, spec.version, _number(parameters.get("sequence_id", 0)))
        process = self._processes.get(key)
        return next((pool for pool in pools if pool.instance.process == process), None)


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
