"""What this frontend's requests came to, counted for everybody to see.

Every request for a model that is ready ends here exactly once: answered, or failed for one
reason. It is counted before its client can have the answer, so that a client that asks for
statistics afterwards finds its own requests in them.
"""

from __future__ import annotations

import threading

from shmserve.core.registry import ModelEntry
from shmserve.core.stats.counter_pages import Gauges, write_gauges
from shmserve.core.stats.request_counters import Reason, RequestCounters, nwords
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    ExecutorLost,
    InvalidArgument,
    ModelFailure,
    NotFound,
    QueueFull,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from shmserve.shm.counter_page import CounterPage

_BY_KIND: tuple[tuple[type[BaseException], Reason], ...] = (
    (QueueFull, Reason.QUEUE_FULL),
    (ResourceExhausted, Reason.NO_MEMORY),
    (ExecutorLost, Reason.EXECUTOR_DIED),
    (Unavailable, Reason.NO_EXECUTOR),
    (DeadlineExceeded, Reason.DEADLINE),
    (Cancelled, Reason.CANCELLED),
    (ModelFailure, Reason.MODEL),
    (InvalidArgument, Reason.BAD_REQUEST),
    (NotFound, Reason.BAD_REQUEST),
    (Unimplemented, Reason.BAD_REQUEST),
)
# What an executor's own answer says; every other error in one is the model's.
_BY_CODE = {
    Code.DEADLINE_EXCEEDED: Reason.DEADLINE,
    Code.CANCELLED: Reason.CANCELLED,
    Code.RESOURCE_EXHAUSTED: Reason.NO_MEMORY,
}


def reason_of(error: BaseException) -> Reason:
    """Why a request failed that got no answer. What is no error of ours ended a client's
    connection or is a defect."""
    if isinstance(error, OSError | EOFError):
        return Reason.CANCELLED
    return next((r for kind, r in _BY_KIND if isinstance(error, kind)), Reason.INTERNAL)


def reason_of_answer(code: str) -> Reason:
    """Why a request failed that an executor answered with an error."""
    return _BY_CODE.get(Code(code), Reason.MODEL)


class Counting:
    """Thread-safe; one per process. `epoch` goes into the name of its segment."""

    def __init__(self, epoch: str, rows: int) -> None:
        self.page = CounterPage(epoch, nwords(rows))
        self._counters = RequestCounters(self.page.words)
        self._lock = threading.Lock()

    def answered(self, entry: ModelEntry, receipt: Receipt, ns: int) -> None:
        """A request was answered `ns` after its arrival."""
        spec = entry.spec
        counters = self._counters
        with self._lock:
            row = counters.row(spec.name, spec.version)
            counters.succeeded(row, ns)
            counters.copied(
                row,
                receipt.copied_in,
                receipt.copied_batch,
                receipt.copied_out,
                receipt.copied_device,
            )

    def failed(
        self, entry: ModelEntry, reason: Reason, ns: int = 0, receipt: Receipt | None = None
    ) -> None:
        """A request failed `ns` after its arrival."""
        spec = entry.spec
        with self._lock:
            counters = self._counters
            row = counters.row(spec.name, spec.version)
            counters.failed(row, reason, ns)
            if receipt is not None:
                counters.copied(
                    row,
                    receipt.copied_in,
                    receipt.copied_batch,
                    receipt.copied_out,
                    receipt.copied_device,
                )

    def copied_out(self, entry: ModelEntry, nbytes: int) -> None:
        """Bytes of an answer that were copied after it had been counted."""
        spec = entry.spec
        with self._lock:
            row = self._counters.row(spec.name, spec.version)
            self._counters.copied(row, 0, 0, nbytes, 0)

    def measure(self, gauges: Gauges) -> None:
        """Publish what is held right now."""
        write_gauges(self.page.words, gauges)

    def close(self) -> None:
        """Let go of the page; what is counted from now on is for nobody."""
        with self._lock:
            self.page.close()
            self._counters = RequestCounters(self.page.words)
