"""What this frontend's requests came to, counted for everybody to see.

Every request for a model that is ready ends here exactly once: answered, or failed for one
reason. It is counted before its client can have the answer, so that a client that asks for
statistics afterwards finds its own requests in them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from time import monotonic_ns
from typing import Self

from msgspec import Struct

from shmserve.core.registry import ModelEntry
from shmserve.core.stats import request_counters
from shmserve.core.stats.counter_pages import Gauges, write_gauges
from shmserve.core.stats.failure_reasons import reason_of, reason_of_answer
from shmserve.core.stats.request_counters import HITS, MISSES, Reason, RequestCounters, nwords
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.receipt import UNTIMED, Receipt
from shmserve.dispatch.traced_request import QUEUE_INPUT, Trace
from shmserve.dispatch.traces.tracing import Tracer, timestamps
from shmserve.errors import ShmserveError
from shmserve.observe import flight_recorder
from shmserve.shm.counter_page import OwnCounterPage
from shmserve.tensor.named_tensor import NamedTensor

_MOST_TOLD = 64  # texts that wait to be taken
_LONGEST_TOLD = 300
_NO_RECEIPT = Receipt()


def message_of(error: BaseException) -> str:
    """What the client is told of it; "": nothing of this error."""
    return error.message if isinstance(error, ShmserveError) else ""


class RequestCounting:
    """Thread-safe; one per process. `epoch` goes into the name of its segment."""

    def __init__(self, epoch: str, rows: int) -> None:
        self.page = OwnCounterPage(epoch, nwords(rows))
        self._counters = RequestCounters(self.page.words)
        self._lock = threading.Lock()
        self._told: dict[tuple[str, str, Reason], str] = {}

    def ended(
        self,
        entry: ModelEntry,
        reason: Reason | None,
        ns: int = 0,
        receipt: Receipt = _NO_RECEIPT,
        told: str = "",
    ) -> None:
        """A request was answered, or failed for a reason, `ns` after its arrival.

        `told`: what its client was told then.
        """
        copied = (
            receipt.copied_in,
            receipt.copied_batch,
            receipt.copied_out,
            receipt.copied_device,
        )
        name, version = entry.spec.name, entry.spec.version
        with self._lock:
            self._counters.ended(name, version, reason, ns, copied)
            if told and reason is not None and len(self._told) < _MOST_TOLD:
                self._told[name, version, reason] = told[:_LONGEST_TOLD]
        if reason is not None:
            flight_recorder.record("request failed", f"{name}/{version}", reason.name.lower())

    def told(self) -> dict[tuple[str, str, Reason], str]:
        """What clients of failed requests were told since the last call: the latest text by model,
        version and reason."""
        if not self._told:
            return {}
        with self._lock:
            told, self._told = self._told, {}
        return told

    def looked_up(self, entry: ModelEntry, hit: bool, ns: int) -> None:
        """A request's answer was looked for among those that are kept."""
        with self._lock:
            self._counters.looked_up(entry.spec.name, entry.spec.version, hit, ns)

    def lookups(self) -> defaultdict[tuple[str, str], tuple[int, int]]:
        """How often an answer was found among those kept, and how often not, by model version."""
        found: defaultdict[tuple[str, str], tuple[int, int]] = defaultdict(lambda: (0, 0))
        with self._lock:
            rows = request_counters.read(self.page.words) or {}
        for key, counts in rows.items():
            hits, misses = counts.cache[HITS], counts.cache[MISSES]
            if hits or misses:
                found[key] = hits, misses
        return found

    def copied_out(self, entry: ModelEntry, nbytes: int) -> None:
        """Bytes of an answer that were copied after it had been counted."""
        with self._lock:
            self._counters.copied_out(entry.spec.name, entry.spec.version, nbytes)

    def keyed(self, name: str) -> None:
        """A request came with the key of this name."""
        with self._lock:
            self._counters.keyed(name)

    def measure(self, gauges: Gauges, in_flight: Mapping[tuple[str, str], int]) -> None:
        """Publish what is held right now, and by model version how many requests executors have."""
        write_gauges(self.page.words, gauges)
        with self._lock:
            self._counters.show_in_flight(in_flight)

    def close(self) -> None:
        """Let go of the page; what is counted from now on is for nobody."""
        with self._lock:
            self.page.close()
            self._counters = RequestCounters(self.page.words)


class Account(Struct):
    """The account of one call: it is counted once, as answered or as failed for one reason.

    Attributes:
        sent_ns: when an executor was asked; 0: none has been.
        counted_ns: when it was counted; 0: not yet.
        counted_copies: of the answer, then.
        trace: of the request, if it is traced.
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
        """Begin the request, now or at `began_ns`, and its trace: if it is one of those traced, or
        its ensemble is."""
        self.sent_ns = began_ns or monotonic_ns()
        if options.trace is not None or (self.entry.trace is not None and not options.step):
            self.trace = self.tracer.begin(self.entry, options)
            if self.trace is not None:
                self.trace.add_tensors(QUEUE_INPUT, inputs)

    @property
    def traceparent(self) -> str:
        """What is part of this request has it; empty: it is not traced in spans."""
        own = self.trace.own if self.trace is not None else None
        return "" if own is None else str(own)

    def answered(self, copied_out: int = 0, send_ns: int = 0) -> None:
        """As `RequestAccount.answered`."""
        receipt = self.receipt
        receipt.copied_out += copied_out
        receipt.send_ns += send_ns
        if not self.counted_ns:
            self.counted_ns = now = monotonic_ns()
            self.counted_copies = receipt.copied_out
            took = now - self.sent_ns + receipt.receive_ns
            self.counting.ended(self.entry, None, took, receipt)

    def looked_up(self, hit: bool, ns: int) -> None:
        """Its answer was looked for among those that are kept."""
        self.counting.looked_up(self.entry, hit, ns)

    def failed(self, error: BaseException) -> None:
        """It ends without an answer."""
        if self.sent_ns and isinstance(error, ShmserveError):
            error.was_sent = True
        self._failed(reason_of(error), message_of(error))

    def refused(self, code: str, text: str) -> None:
        """An executor has answered with an error."""
        self._failed(reason_of_answer(code), text)

    def close(self) -> None:
        """It is over: count it if nobody has, trace it if that is wanted."""
        trace = self.trace
        spans = trace is not None and trace.own is not None and bool(trace.failure)
        if self.closed or not (self.receipt.complete or spans):
            return
        self.closed = True
        if self.receipt.complete:
            if not self.counted_ns:
                self.answered()
            more = self.receipt.copied_out - self.counted_copies
            if more:  # by the last message of a stream
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
    """Closes a call on every path out of a `with` block, and counts it as failed on an error."""

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
