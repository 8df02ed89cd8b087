"""Orphaned requests: requests without a waiting caller, kept until the late answer.

The executor may still read the inputs of such a request. So the slots stay leased and the
connection stays busy until the answer or the executor's death (EOF).
"""

import os
import selectors
import threading
from typing import NamedTuple

from shmserve.dispatch.pool.executor_connection import ExecutorConnection
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.errors import PeerDied, ProtocolViolation, StaleDescriptor
from shmserve.protocol.control.data_messages import leases
from shmserve.shm.arena import ArenaMemory


class _Orphan(NamedTuple):
    pool: ExecutorPool
    connection: ExecutorConnection
    number: int
    leases: list[tuple[int, int]]


class OrphanedRequests:
    """Keeper of orphaned requests. The dispatcher's maintenance thread calls `poll`."""

    def __init__(self, memory: ArenaMemory) -> None:
        self._memory = memory
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Orphan] = {}

    def keep(
        self,
        pool: ExecutorPool,
        connection: ExecutorConnection,
        number: int,
        leases: list[tuple[int, int]],
    ) -> None:
        """Take over a connection with a request, and the leases of the request's inputs."""
        with self._lock:
            fd = connection.channel.fileno()
            self._waiting[fd] = _Orphan(pool, connection, number, leases)
            self._selector.register(fd, selectors.EVENT_READ)

    def wake(self) -> None:
        """Make a waiting `poll` return now. Does nothing after `close`."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for late answers, and take in received answers."""
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._wake_fd:
                os.eventfd_read(key.fd)
                continue
            with self._lock:
                orphan = self._waiting.get(key.fd)
            if orphan is not None:
                self._settle(key.fd, orphan)

    def _settle(self, fd: int, orphan: _Orphan) -> None:
        try:
            received = orphan.connection.channel.receive_within()
            if received is None:
                return
            answer = orphan.pool.take(orphan.connection, *received)
            if answer is None:
                return
            if answer.request != orphan.number:
                raise ProtocolViolation("an answer to something that was not asked")
            orphan.pool.release(leases(answer.outputs), sum(t.at.nbytes for t in answer.outputs))
            if not answer.final:
                return  # answers of a stream sent before the cancellation
            self._forget(fd)
            self._return_inputs(orphan, answer.retained)
            orphan.pool.give(orphan.connection)
        except (PeerDied, ProtocolViolation):
            self._forget(fd)
            self._return_inputs(orphan, ())
            orphan.pool.discard(orphan.connection)

    def _forget(self, fd: int) -> None:
        with self._lock:
            self._selector.unregister(fd)
            del self._waiting[fd]

    def _return_inputs(self, orphan: _Orphan, retained: tuple[int, ...]) -> None:
        kept = [orphan.leases[i] for i in retained if i < len(orphan.leases)]
        if kept:
            orphan.pool.retain(kept)
        for lease in orphan.leases:
            if lease not in kept:
                try:
                    self._memory.release(*lease)
                except StaleDescriptor:
                    continue

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        with self._lock:
            orphans, self._waiting = list(self._waiting.values()), {}
        for orphan in orphans:
            orphan.pool.discard(orphan.connection)
        self._selector.close()
        wake_fd, self._wake_fd = self._wake_fd, -1
        os.close(wake_fd)
