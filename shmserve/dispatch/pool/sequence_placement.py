"""Sequence placement: chooses the executor for a request of a sequence.

The executor alone decides which sequences it hosts. The executor's status page has the digests of
its sequences and the number of free slots, published before the executor answers. Frontends read
the pages, so frontends agree without talking to each other, and a new executor takes no sequence
from other executors. A request goes to the executor of its sequence; a new sequence goes to the
executor with most free slots. For a moment a frontend knows more than the pages: the sequences
that the frontend has just begun (`BegunSequences`).

A frontend that reads a page too early causes no harm, because an executor refuses requests of
unknown sequences. A page ends with its executor, so sequences of a dead executor must begin again.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.protocol.control.data_messages import Execute
from shmserve.shm.status_page import StatusView, digest
from shmserve.tensor.spec import ModelSpec

_MOST_BEGUN = 4096

Views = Iterable[tuple[ExecutorPool, StatusView | None]]


class BegunSequences:
    """Executors to which this process has sent the start of a sequence, for requests sent before
    the executor has published the sequence. Not thread-safe."""

    def __init__(self) -> None:
        self._processes: dict[tuple[str, str, int], str] = {}  # latest last

    def sent(self, spec: ModelSpec, message: Execute, pool: ExecutorPool) -> None:
        """Note a request of a sequence, just before sending."""
        key = (spec.name, spec.version, _number(message.sequence))
        parameters = message.parameters
        if parameters.get("sequence_start"):
            self._processes.pop(key, None)
            self._processes[key] = pool.instance.process
            if len(self._processes) > _MOST_BEGUN:
                del self._processes[next(iter(self._processes))]
        if parameters.get("sequence_end"):
            self._processes.pop(key, None)

    def home(
        self, spec: ModelSpec, message: Execute, pools: Iterable[ExecutorPool]
    ) -> ExecutorPool | None:
        """Return the executor where a continued sequence should live, or None."""
        if message.parameters.get("sequence_start"):
            return None
        key = (spec.name, spec.version, _number(message.sequence))
        process = self._processes.get(key)
        return next((pool for pool in pools if pool.instance.process == process), None)


def home_of(views: Views, sequence: SequenceName | None) -> ExecutorPool | None:
    """Return the executor where a sequence lives according to these status pages, or None."""
    number = _number(sequence)
    for pool, view in views:
        if number and view is not None and view.has_sequence(number):
            return pool
    return None


def where_to_begin(views: Views, sequence: SequenceName | None) -> list[ExecutorPool]:
    """Return the executors in the order in which a new sequence should try them: most free slots
    first, then least loaded. Ties are broken by a hash of the sequence's name, so sequences that
    begin together spread."""
    number = _number(sequence)

    def rank(item: tuple[ExecutorPool, StatusView | None]) -> tuple[int, int, bytes]:
        pool, view = item
        name = f"{number} {pool.instance.name}".encode()
        free = view.free_slots if view is not None else 0
        return -free, pool.load, blake2b(name, digest_size=8).digest()

    return [pool for pool, _ in sorted(views, key=rank)]


def _number(sequence: SequenceName | None) -> int:
    return 0 if sequence is None else digest(sequence)
