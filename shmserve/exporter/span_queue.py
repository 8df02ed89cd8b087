"""Spans that wait for being exported: at most so many, in batches by number and by time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from shmserve.protocol.control.span_messages import Span


class SpanQueue:
    """Thread-safe.

    Args:
        most: that wait; what comes beyond is dropped.
        batch: how many are taken together.
        delay_s: how long the first of a batch that is not full waits for others.

    Attributes:
        dropped: how many were, here.
    """

    def __init__(self, most: int, batch: int, delay_s: float) -> None:
        self._most = most
        self._batch = batch
        self._delay_s = delay_s
        self._changed = threading.Condition()  # guards all below
        self._waiting: deque[Span] = deque()
        self._due = 0.0
        self._closed = False
        self.dropped = 0

    def put(self, spans: Sequence[Span]) -> None:
        """Add those that there is room for."""
        with self._changed:
            room = self._most - len(self._waiting)
            self.dropped += max(0, len(spans) - room)
            if spans and room > 0:
                if not self._waiting:
                    self._due = time.monotonic() + self._delay_s
                self._waiting.extend(spans[:room])
                self._changed.notify_all()

    def take(self) -> list[Span]:
        """The next batch, once it is due; empty: the queue is closed, and there are no more."""
        with self._changed:
            while not self._closed and len(self._waiting) < self._batch:
                left = self._due - time.monotonic() if self._waiting else None
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            self._due = time.monotonic() + self._delay_s  # of those that are left
            return taken

    def close(self) -> None:
        """All that waits is due now."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
