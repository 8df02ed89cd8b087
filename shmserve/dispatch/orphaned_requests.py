"""Requests that nobody waits for any more, until their late answers come.

The executor may still read the inputs of such a request, so their slots stay leased
and the lane stays busy until the answer or the executor's death (EOF) arrives here.
"""

from __future__ import annotations

import os
import selectors
import threading

from shmserve.dispatch.executor_pool import Lane, Peer
from shmserve.errors import PeerDied, ProtocolViolation, StaleDescriptor
from shmserve.protocol.control.data_messages import leases
from shmserve.shm.arena import ArenaMemory


class _Waiting:
    __slots__ = ("lane", "leases", "number", "peer")

    def __init__(self, peer: Peer, lane: Lane, number: int, leases: list[tuple[int, int]]) -> None:
        self.peer = peer
        self.lane = lane
        self.number = number
        self.leases = leases


class Abandoned:
    """The keeper. `poll` is called by the dispatcher's maintenance thread."""

    def __init__(self, memory: ArenaMemory) -> None:
        self._memory = memory
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}

    def keep(self, peer: Peer, lane: Lane, number: int, leases: list[tuple[int, int]]) -> None:
        """Take over a lane and the leases of the inputs of the request on it."""
        with self._lock:
            fd = lane.channel.fileno()
            self._waiting[fd] = _Waiting(peer, lane, number, leases)
            self._selector.register(fd, selectors.EVENT_READ)

    def wake(self) -> None:
        """Make a waiting `poll` return now."""
        os.eventfd_write(self._wake_fd, 1)

    def poll(self, timeout_s: float) -> None:
        """Take in late answers for at most `timeout_s` seconds."""
        for key, _ in self._selector.select(timeout_s):
            with self._lock:
                waiting = self._waiting.get(key.fd)
            if waiting is not None:
                self._settle(key.fd, waiting)

    def _settle(self, fd: int, waiting: _Waiting) -> None:
        try:
            received = waiting.lane.channel.receive_now()
            if received is None:
                return
            answer = waiting.peer.take(*received)
            if answer is None:
                return
            if answer.request != waiting.number:
                raise ProtocolViolation("an answer to something that was not asked")
            waiting.peer.release(leases(answer.outputs), sum(t.at.nbytes for t in answer.outputs))
            if not answer.final:
                return  # of a stream: what was on its way when it was cancelled
            self._forget(fd)
            self._return_inputs(waiting, answer.retained)
            waiting.peer.give(waiting.lane)
        except (PeerDied, ProtocolViolation):
            self._forget(fd)
            self._return_inputs(waiting, ())
            waiting.peer.discard(waiting.lane)

    def _forget(self, fd: int) -> None:
        with self._lock:
            self._selector.unregister(fd)
            del self._waiting[fd]

    def _return_inputs(self, waiting: _Waiting, retained: tuple[int, ...]) -> None:
        kept = [waiting.leases[i] for i in retained if i < len(waiting.leases)]
        if kept:
            waiting.peer.retain(kept)
        for lease in waiting.leases:
            if lease not in kept:
                try:
                    self._memory.release(*lease)
                except StaleDescriptor:
                    continue

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for item in waiting:
            item.peer.discard(item.lane)
        self._selector.close()
        os.close(self._wake_fd)
