"""Request counting: counts the outcomes of this frontend's requests on its counter page.

Every request for a ready model ends here exactly once: answered, or failed for one reason. A
request is counted before the client can have the answer. So a client that asks for statistics
afterwards finds its own requests counted.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from time import monotonic_ns, time_ns
from typing import Self

from msgspec import Struct

from shmserve.core.registry import ModelEntry
from shmserve.core.stats import request_counters
from shmserve.core.stats.counter_pages import OLDEST_RUN_WORD, Gauges, write_gauges
from shmserve.core.stats.request_counters import (
    HITS,
    MISSES,
    Reason,
    RequestCounters,
    nwords,
    reason_of,
    reason_of_answer,
)
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.receipt import UNTIMED, Receipt
from shmserve.dispatch.traced_request import QUEUE_INPUT, Trace
from shmserve.dispatch.traces.tracing import Tracer, timestamps
from shmserve.errors import ShmserveError
from shmserve.observe import flight_recorder
from shmserve.shm.counter_page import OwnCounterPage
from shmserve.tensor.spec import NamedTensor

_MAX_TEXTS = 64  # most error texts kept until taken
_MAX_TEXT = 300
_NO_RECEIPT = Receipt()


def message_of(error: BaseException) -> str:
    """Return the error's text for the client, or "" for an error hidden from clients."""
    return error.message if isinstance(error, ShmserveError) else ""


class RequestCounting:
    """Counters of one process. Thread-safe. `epoch` goes into the name of the page's segment."""

    def __init__(self, epoch: str, rows: int) -> None:
        self.page = OwnCounterPage(epoch, nwords(rows))
        self._counters = RequestCounters(self.page.words)
        self._lock = threading.Lock()
        self._error_texts: dict[tuple[str, str, Reason], str] = {}
        self._runs: dict[int, int] = {}  # starts of ensembles' runs by number, the oldest first
        self._next_run = 0

    def ended(
        self,
        entry: ModelEntry,
        reason: Reason | None,
        ns: int = 0,
        receipt: Receipt = _NO_RECEIPT,
        told: str = "",
    ) -> None:
        """Count a request as answered, or as failed for a reason, `ns` nanoseconds after arrival.
        `told`: error text sent to the client."""
        copied = (
            receipt.copied_in,
            receipt.copied_batch,
            receipt.copied_out,
            receipt.copied_device,
        )
        name, version = entry.spec.name, entry.spec.version
        with self._lock:
            self._counters.ended(name, version, reason, ns, copied)
            if told and reason is not None and len(self._error_texts) < _MAX_TEXTS:
                self._error_texts[name, version, reason] = told[:_MAX_TEXT]
        if reason is not None:
            flight_recorder.record("request failed", f"{name}/{version}", reason.name.lower())

    def told(self) -> dict[tuple[str, str, Reason], str]:
        """Return the error texts sent to clients since the last call: the latest text by model,
        version and reason."""
        if not self._error_texts:
            return {}
        with self._lock:
            texts, self._error_texts = self._error_texts, {}
        return texts

    def looked_up(self, entry: ModelEntry, hit: bool, ns: int) -> None:
        """Count a lookup in the response cache, which took `ns` nanoseconds."""
        with self._lock:
            self._counters.looked_up(entry.spec.name, entry.spec.version, hit, ns)

    def lookups(self) -> defaultdict[tuple[str, str], tuple[int, int]]:
        """Return (hits, misses) of the response cache by model version."""
        found: defaultdict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
        with self._lock:
            rows = request_counters.read(self.page.words) or {}
        for key, counts in rows.items():
            hits, misses = counts.cache[HITS], counts.cache[MISSES]
            if hits or misses:
                found[key] = hits, misses
        return found

    def copied_out(self, entry: ModelEntry, nbytes: int) -> None:
        """Count bytes of an answer copied after the answer was counted."""
        with self._lock:
            self._counters.copied_out(entry.spec.name, entry.spec.version, nbytes)

    def keyed(self, name: str) -> None:
        """Count a request with the key of this name."""
        with self._lock:
            self._counters.keyed(name)

    def ran(self, entry: ModelEntry, batch: int, receipt: Receipt) -> None:
        """Count an answered run of an ensemble on `batch` elements, with the times of its steps."""
        infer_ns = receipt.compute_ns - receipt.input_ns - receipt.output_ns
        now_ms = time_ns() // 1_000_000
        values = (now_ms, 1, batch, receipt.input_ns, infer_ns, receipt.output_ns)
        with self._lock:
            self._counters.ran(entry.spec.name, entry.spec.version, batch, values)

    def run_begun(self) -> int:
        """Note that a run of an ensemble begins. Return the number for `run_over`."""
        with self._lock:
            self._next_run += 1
            self._runs[self._next_run] = monotonic_ns()
            self._tell_oldest()
            return self._next_run

    def run_over(self, number: int) -> None:
        """Note the end of a run. Idempotent."""
        with self._lock:
            self._runs.pop(number, None)
            self._tell_oldest()

    def _tell_oldest(self) -> None:
        self.page.words[OLDEST_RUN_WORD] = next(iter(self._runs.values()), 0)

    def measure(self, gauges: Gauges, in_flight: Mapping[tuple[str, str], int]) -> None:
        """Publish current gauges, and the number of requests at executors by model version."""
        write_gauges(self.page.words, gauges)
        with self._lock:
            self._counters.show_in_flight(in_flight)

    def close(self) -> None:
        """Release the page. Later counts are discarded."""
        with self._lock:
            self.page.close()
            self._counters = RequestCounters(self.page.words)


class Account(Struct):
    """Account of one call, which is counted once: as answered, or as failed for one reason.

    Attributes:
        sent_ns: time of sending to an executor (CLOCK_MONOTONIC, nanoseconds); 0 if not sent.
        counted_ns: time of counting; 0 if not counted yet.
        counted_copies: bytes of the answer copied before counting.
        trace: trace of the request, or None.
    """

    counting: RequestCounting
    tracer: Tracer
    entry: ModelEntry
    receipt: Receipt
    sent_ns: int = 0
    counted_ns: int = 0
    counted_copies: int = 0
    closed: bool = False
    trace: Trace | None = None

    def begin(
        self, options: RunOptions, inputs: Iterable[NamedTensor] = (), began_ns: int = 0
    ) -> None:
        """Begin the request, now or at `began_ns`. Begin its trace if the request is sampled, or
        if its ensemble is traced."""
        self.sent_ns = began_ns or monotonic_ns()
        if options.trace is not None or (self.entry.trace is not None and not options.step):
            self.trace = self.tracer.begin(self.entry, options)
            if self.trace is not None:
                self.trace.add_tensors(QUEUE_INPUT, inputs)

    @property
    def traceparent(self) -> str:
        """Trace context for parts of this request; empty if the request is not traced in spans."""
        own = self.trace.own if self.trace is not None else None
        return "" if own is None else str(own)

    def answered(self, copied_out: int = 0, send_ns: int = 0) -> None:
        """Count the request as answered, as `RequestAccount.answered`."""
        receipt = self.receipt
        receipt.copied_out += copied_out
        receipt.send_ns += send_ns
        if not self.counted_ns:
            self.counted_ns = now = monotonic_ns()
            self.counted_copies = receipt.copied_out
            took = now - self.sent_ns + receipt.receive_ns
            self.counting.ended(self.entry, None, took, receipt)

    def looked_up(self, hit: bool, ns: int) -> None:
        """Count a lookup in the response cache, which took `ns` nanoseconds."""
        self.counting.looked_up(self.entry, hit, ns)

    def failed(self, error: BaseException) -> None:
        """Count the request as failed without an answer."""
        if self.sent_ns and isinstance(error, ShmserveError):
            error.was_sent = True
        self._failed(reason_of(error), message_of(error))

    def refused(self, code: str, text: str) -> None:
        """Count the request as failed, because an executor answered with an error."""
        self._failed(reason_of_answer(code), text)

    def close(self) -> None:
        """End the account: count the request unless counted already, and finish the trace."""
        trace = self.trace
        spans = trace is not None and trace.own is not None and bool(trace.failure)
        if self.closed or not (self.receipt.complete or spans):
            return
        self.closed = True
        if self.receipt.complete:
            if not self.counted_ns:
                self.answered()
            more = self.receipt.copied_out - self.counted_copies
            if more:  # copied by the last message of a stream
                self.counting.copied_out(self.entry, more)
        if trace is not None:
            self._traced(trace)

    def _failed(self, reason: Reason, told: str) -> None:
        trace = self.trace
        if trace is not None and not self.closed:
            trace.fail("" if self.counted_ns else reason.name.lower(), told)
        if not self.counted_ns:
            receipt = self.receipt
            self.counted_ns = now = monotonic_ns()
            took = now - self.sent_ns + receipt.receive_ns if self.sent_ns else 0
            self.counting.ended(self.entry, reason, took, receipt, told)

    def _traced(self, trace: Trace) -> None:
        receipt = self.receipt
        times = timestamps(
            self.sent_ns - receipt.receive_ns,
            self.sent_ns,
            None if receipt.timing == UNTIMED else receipt.timing,
            self.counted_ns - receipt.send_ns,
            self.counted_ns,
            monotonic_ns(),
        )
        trace.end(times, receipt)
        if not trace.inner:
            self.tracer.end(trace)


class CallScope:
    """Closes a call on every path out of a `with` block. An exception counts the call as failed."""

    __slots__ = ()

    account: Account

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.account.failed(error)
        self.close()

    def close(self) -> None:
        raise NotImplementedError
