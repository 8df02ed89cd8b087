"""One request's account: it is counted once, as answered or as failed for one reason."""

from __future__ import annotations

from time import monotonic_ns

from shmserve.core.control.runtime_settings import TraceSettings
from shmserve.core.registry import ModelEntry
from shmserve.core.stats.request_counters import Reason
from shmserve.dispatch.receipt import Receipt
from shmserve.dispatch.request_counting import Counting, reason_of, reason_of_answer
from shmserve.dispatch.tracing import Tracer, timestamps
from shmserve.protocol.control.data_messages import Timing

_UNTIMED = Timing()


class Account:
    """Belongs to one call.

    Attributes:
        request_id: the client's.
        sent_ns: when an executor was asked; 0: none has been.
        timing: what the executor said of its times.
        succeeded: all of the answer is here.
    """

    __slots__ = (
        "_closed",
        "_copied_out",
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
        self._copied_out = 0  # as counted
        self.request_id = ""
        self.sent_ns = 0
        self.timing = _UNTIMED
        self.succeeded = False

    def sent(self, request_id: str) -> int:
        """The request goes to an executor now; returns the time."""
        self.request_id = request_id
        self.sent_ns = now = monotonic_ns()
        return now

    def answered(self) -> None:
        """The answer is about to be sent, and what it cost is known."""
        if not self._counted_ns:
            receipt = self._receipt
            self._counted_ns = now = monotonic_ns()
            self._copied_out = receipt.copied_out
            took = now - self.sent_ns + receipt.receive_ns
            self._counting.answered(self._entry, receipt, took)

    def failed(self, error: BaseException) -> None:
        """It ends without an answer."""
        self._failed(reason_of(error))

    def refused(self, code: str) -> None:
        """An executor has answered with an error."""
        self._failed(reason_of_answer(code))

    def close(self) -> None:
        """It is over: count it if nobody has, trace it if that is wanted."""
        if self.succeeded and not self._closed:
            self._closed = True
            self.answered()
            more = self._receipt.copied_out - self._copied_out
            if more:  # by the last message of a stream
                self._counting.copied_out(self._entry, more)
            trace = self._entry.trace
            if trace is not None:
                self._trace(trace)

    def _failed(self, reason: Reason) -> None:
        if not self._counted_ns:
            receipt = self._receipt
            self._counted_ns = now = monotonic_ns()
            took = now - self.sent_ns + receipt.receive_ns if self.sent_ns else 0
            self._counting.failed(self._entry, reason, took, receipt)

    def _trace(self, settings: TraceSettings) -> None:
        if self._tracer.sampled(self._entry, settings):
            arrived = self.sent_ns - self._receipt.receive_ns
            times = timestamps(arrived, self.sent_ns, self.timing, self._counted_ns, monotonic_ns())
            executor = self._receipt.executor
            self._tracer.add(self._entry, settings, self.request_id, executor, times)
