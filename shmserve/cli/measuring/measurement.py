"""Measurement: the times of the requests to a model over one transport at one level of
concurrency, and the row of figures made of the times."""

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct, field

from shmserve.cli.measuring.door import Receipt
from shmserve.errors import ShmserveError

_PERCENTS = (50, 90, 95, 99)
_MOST_TEXTS = 20  # kinds of failures counted separately
_MOST_PAUSES = 1_000_000
_LATE_MS = 1.0
_PARTS = 3  # of the time, for `_is_stable`
_SPREAD = 0.1


class RequestTimes(Struct, frozen=True, gc=False):
    """Successful request. Times are in ms. `end_s`: end, in seconds from the start of the measured
    time. `latency_ms`: time from the planned start to the last answer. `late_ms`: time from the
    planned to the real start. `first_ms`: time from the planned start to the first answer; None: no
    answer came. `nbytes`: size of all answers."""

    end_s: float
    latency_ms: float
    late_ms: float = 0.0
    first_ms: float | None = None
    answers: int = 1
    nbytes: int = 0


class Measurement(Struct):
    """Measurement of a transport at a level of concurrency.

    Attributes:
        open_loop: requests have planned starts.
        streamed: a request may have any number of answers.
        input_bytes: size of a request's inputs.
        failures: number of failed requests by status and text.
        failed_late_ms: time from the planned to the real start of each failed request.
        error: reason why the transport cannot be used.
        client_cpu: processors that the client used.
        unsent: number of planned requests that did not start before the end.
        pauses: times between two answers to a request, in ms, of the first million answers.
    """

    over: str
    concurrency: int = 1
    open_loop: bool = False
    streamed: bool = False
    input_bytes: int = 0
    elapsed_s: float = 0.0
    client_cpu: float = 0.0
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)
    failed_late_ms: list[float] = []
    unsent: int = 0
    error: str = ""
    receipt: Receipt = {}
    samples: list[RequestTimes] = []
    pauses: list[float] = []
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def warm_up(self, receipt: Receipt) -> None:
        """Take in the receipt of a request that is not measured."""
        self.receipt = receipt

    def add(self, due: float, begun: float, answers: Sequence[tuple[float, int]]) -> None:
        """Take in a successful request. Moments are in seconds from the start of the measured time.

        Args:
            due: planned start.
            begun: real start.
            answers: moment and size in bytes of each answer, and a last moment with size 0, at
                which the request was complete.
        """
        moments = [moment for moment, _ in answers]
        end = moments.pop()
        first_ms = (moments[0] - due) * 1e3 if moments else None
        nbytes = sum(size for _, size in answers)
        late_ms = (begun - due) * 1e3
        self.samples.append(
            RequestTimes(end, (end - due) * 1e3, late_ms, first_ms, len(moments), nbytes)
        )
        if len(self.pauses) < _MOST_PAUSES:
            pairs = itertools.pairwise(moments)
            self.pauses += [(after - before) * 1e3 for before, after in pairs]

    def fail(self, error: ShmserveError, late_ms: float = 0.0) -> None:
        """Count a failed request, which started `late_ms` after the plan. Texts beyond a bound are
        counted together."""
        key = (getattr(error, "status", ""), error.message)
        with self._lock:
            if key not in self.failures and len(self.failures) >= _MOST_TEXTS:
                key = ("", "other errors")
            self.failures[key] += 1
            self.failed_late_ms.append(late_ms)

    def finish(self, elapsed_s: float, client_cpu: float = 0.0) -> None:
        self.elapsed_s, self.client_cpu = elapsed_s, client_cpu
        self.samples.sort(key=lambda sample: sample.end_s)

    def give_up(self, error: str) -> None:
        self.error = error

    @property
    def per_s(self) -> float:
        return len(self.samples) / self.elapsed_s if self.samples else 0.0

    def row(self) -> dict[str, Any]:
        """Return the figures. Times and rates cover successful requests, lateness all."""
        row: dict[str, Any] = {"over": self.over, "concurrency": self.concurrency}
        row |= {"requests": len(self.samples), "failed": self.failures.total()}
        if self.samples:
            nbytes = sum(sample.nbytes + self.input_bytes for sample in self.samples)
            row["per_s"] = round(self.per_s, 1)
            row["mb_per_s"] = round(nbytes / self.elapsed_s / 1e6, 3)
            latencies = [sample.latency_ms for sample in self.samples]
            row |= _percentiles("", latencies, _PERCENTS)
            row["max_ms"] = round(max(latencies), 3)
            row |= self._stream_figures() if self.streamed else {}
            row["stable"] = self._is_stable()
        row |= self._late_figures() if self.open_loop else {}
        copied: Mapping[str, int] = self.receipt.get("copied_bytes", {})
        row["copied_bytes"] = " ".join(f"{stage}={n}" for stage, n in copied.items() if n) or (
            "0" if copied else ""
        )
        row["client_cpu"] = round(self.client_cpu, 2)
        row["error"] = self.error
        row["errors"] = [
            {"status": status, "text": text, "count": count}
            for (status, text), count in self.failures.most_common()
        ]
        return row

    def _stream_figures(self) -> dict[str, float]:
        answers = sum(sample.answers for sample in self.samples)
        firsts = [sample.first_ms for sample in self.samples if sample.first_ms is not None]
        return {
            "answers_per_s": round(answers / self.elapsed_s, 1),
            **_percentiles("first_", firsts, (50, 99)),
            **_percentiles("between_", self.pauses, (50, 99)),
        }

    def _late_figures(self) -> dict[str, float]:
        late = [*self.failed_late_ms, *(sample.late_ms for sample in self.samples)]
        return {
            "late": sum(ms > _LATE_MS for ms in late),
            "max_late_ms": round(max(late, default=0.0), 3),
            "unsent": self.unsent,
        }

    def _is_stable(self) -> bool:
        """Return True if the rates of the thirds of the time differ from the mean by at most
        10 %, or by what chance explains where requests are few: three standard deviations."""
        edges = np.linspace(0.0, self.elapsed_s, _PARTS + 1)
        counts, _ = np.histogram([sample.end_s for sample in self.samples], edges)
        mean = len(self.samples) / _PARTS
        return bool(np.abs(counts - mean).max() <= max(_SPREAD * mean, 3 * mean**0.5))


def _percentiles(name: str, ms: Sequence[float], percents: Iterable[int]) -> dict[str, float]:
    if not ms:
        return {}
    return {f"{name}p{p}_ms": round(float(np.percentile(ms, p)), 3) for p in percents}
