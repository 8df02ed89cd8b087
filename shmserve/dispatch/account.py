"""One request's account: it is counted once, as answered or as failed for one reason."""

from __future__ import annotations

from time import monotonic_ns

from shmserve.core.registry import ModelEntry
from shmserve.core.request_counters import Reason
from shmserve.dispatch.counting import Counting, reason_of, reason_of_answer
from shmserve.dispatch.receipt import Receipt
from shmserve.dispatch.tracing import Tracer, timestamps
from shmserve.protocol.data_messages import Timing


class Account:
    """Belongs to one call. `sent_ns`: when an executor was asked; 0: none has been."""

    __slots__ = (
        "_closed",
        "_counted_ns",
        "_counting",
        "_entry",
        "_receipt",
        "_tracer",
        "request_id",
        "sent_ns",
        "succeeded",
        "timing",
    )

    def __init__(
        self, counting: Counting, tracer: Tracer, entry: ModelEntry, receipt: Receipt
    ) -> None:
        self._counting = counting
        self._tracer = tracer
        self._entry = entry
        self._receipt = receipt
        self._counted_ns = 0  # 0: not yet
        self._closed = False
        self.request_id = ""
        self.sent_ns = 0
        self.timing = Timing()
        self.succeeded = False  # all of the answer is here

    def sent(self, request_id: str) -> int:
        """The request goes to an executor now; returns the time."""
        self.request_id, self.sent_ns = request_id, monotonic_ns()
        return self.sent_ns

    @property
    def arrived_ns(self) -> int:
        """When the request came, as far as its frontend has told."""
        return self.sent_ns - self._receipt.receive_ns

    def answered(self) -> None:
        """The answer is about to be sent."""
        if not self._counted_ns:
            self._counted_ns = monotonic_ns()
            self._counting.answered(self._entry, self._counted_ns - self.arrived_ns)

    def failed(self, error: BaseException) -> None:
        """It ends without an answer."""
        self._failed(reason_of(error))

    def refused(self, code: str) -> None:
        """An executor has answered with an error."""
        self._failed(reason_of_answer(code))

    def close(self) -> None:
        """It is over: add up what was copied, trace it if that is wanted."""
        if self._closed:
            return
        self._closed = True
        if self.succeeded:
            self.answered()
        self._counting.copied(self._entry, self._receipt)
        if self._entry.trace is not None and self.succeeded:
            self._trace()

    def _failed(self, reason: Reason) -> None:
        if not self._counted_ns:
            self._counted_ns = monotonic_ns()
            took = self._counted_ns - self.arrived_ns if self.sent_ns else 0
            self._counting.failed(self._entry, reason, took)

    def _trace(self) -> None:
        settings = self._entry.trace
        if settings is not None and self._tracer.sampled(self._entry, settings):
            times = timestamps(
                self.arrived_ns, self.sent_ns, self.timing, self._counted_ns, monotonic_ns()
            )
            executor = self._receipt.executor
            self._tracer.add(self._entry, settings, self.request_id, executor, times)
