"""Queue of spans to export: bounded, and emptied in batches by number and by time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from shmserve.protocol.control.span_messages import Span


class SpanQueue:
    """Bounded queue of spans. Thread-safe.

    Args:
        most: limit of queued spans; further spans are dropped.
        batch: largest number of spans in a batch.
        delay_s: longest wait, in seconds, for a batch to fill.

    Attributes:
        dropped: number of spans dropped because the queue was full.
    """

    def __init__(self, most: int, batch: int, delay_s: float) -> None:
        self._most = most
        self._batch = batch
        self._delay_s = delay_s
        self._changed = threading.Condition()  # guards the fields below
        self._waiting: deque[Span] = deque()
        self._due = 0.0
        self._closed = False
        self.dropped = 0

    def put(self, spans: Sequence[Span]) -> None:
        """Queue spans while there is room, and drop the rest."""
        with self._changed:
            room = self._most - len(self._waiting)
            self.dropped += max(0, len(spans) - room)
            if spans and room > 0:
                if not self._waiting:
                    self._due = time.monotonic() + self._delay_s
                self._waiting.extend(spans[:room])
                self._changed.notify_all()

    def take(self) -> list[Span]:
        """Wait for the next batch and return it. Return an empty list once the queue is closed and
        empty."""
        with self._changed:
            while not self._closed and len(self._waiting) < self._batch:
                remaining_s = self._due - time.monotonic() if self._waiting else None
                if remaining_s is not None and remaining_s <= 0:
                    break
                self._changed.wait(remaining_s)
            taken = [self._waiting.popleft() for _ in range(min(self._batch, len(self._waiting)))]
            self._due = time.monotonic() + self._delay_s  # for the remaining spans
            return taken

    def close(self) -> None:
        """Close the queue: `take` returns the remaining spans without delay."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
