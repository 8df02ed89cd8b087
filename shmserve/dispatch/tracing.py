"""Traces: when a sampled request passed each stage, as one line of JSON in the server's log.

A request pays for sampling only while its model is traced (`ModelEntry.trace`). Lines are
written by the maintenance thread; where their number is limited the coordinator says how many
of them may be, so that a limit holds for all processes together.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import msgspec

from shmserve.core.control.runtime_settings import UNLIMITED, TraceSettings
from shmserve.core.registry import ModelEntry
from shmserve.errors import ShmserveError
from shmserve.observe.logs import TRACES
from shmserve.protocol.control.data_messages import Timing

_MOST_WAITING = 10_000
_TRACEPARENT = re.compile(  # ids of zeros only are none, and there is no version ff
    "(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}"
)
_log = logging.getLogger(__name__)
_traces = logging.getLogger(TRACES)
_encode = msgspec.json.Encoder().encode

Take = Callable[[str, int], int]  # of (model, wanted): how many traces there may be


def trace_context(traceparent: str) -> dict[str, str]:
    """What a trace says of the one that it is part of: W3C Trace Context; nothing, if that is
    malformed or missing."""
    found = _TRACEPARENT.fullmatch(traceparent)
    return {"trace_id": found[1], "parent_id": found[2]} if found else {}


class Tracer:
    """Thread-safe; one per process."""

    def __init__(self, process: str, protocol: str) -> None:
        self._process = process
        self._protocol = protocol
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()
        self._waiting: deque[tuple[str, bool, dict[str, Any]]] = deque()
        self._dropped = 0

    def sampled(self, entry: ModelEntry, settings: TraceSettings) -> bool:
        """Whether this request is one of those to be traced."""
        with self._lock:
            self._seen[entry.spec.name] += 1
            return self._seen[entry.spec.name] % settings.rate == 0

    def add(
        self,
        entry: ModelEntry,
        settings: TraceSettings,
        ids: dict[str, str],
        executor: str,
        times: dict[str, int],
    ) -> None:
        """A sampled request is over. `ids`: what it is known by."""
        trace = {
            "model": entry.spec.name,
            "version": entry.spec.version,
            **ids,
            "protocol": self._protocol,
            "process": self._process,
            "executor": executor,
            "timestamps": times,
        }
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING:
                self._dropped += 1
            else:
                limited = settings.count != UNLIMITED
                self._waiting.append((entry.spec.name, limited, trace))

    def flush(self, take: Take) -> None:
        """Write what waits; `take` is asked for permission where there is a limit."""
        with self._lock:
            if not self._waiting and not self._dropped:
                return
            waiting, self._waiting = self._waiting, deque()
            dropped, self._dropped = self._dropped, 0
        allowed: dict[str, int] = {}
        for model, wanted in Counter(model for model, limited, _ in waiting if limited).items():
            try:
                allowed[model] = take(model, wanted)
            except ShmserveError as ex:
                _log.warning("traces of model %s are lost: %s", model, ex)
                allowed[model] = 0
        for model, limited, trace in waiting:
            if limited:
                allowed[model] -= 1
                if allowed[model] < 0:
                    continue
            _traces.info("trace %s", _encode(trace).decode())
        if dropped:
            _log.warning("%d traces are lost: more than could be written", dropped)


def timestamps(arrived: int, sent: int, timing: Timing, answered: int, end: int) -> dict[str, int]:
    """CLOCK_MONOTONIC nanoseconds by stage, in Triton's names where it has one."""
    start = sent + timing.queue
    input_end = start + timing.input
    output_start = input_end + timing.infer
    return {
        "REQUEST_START": arrived,
        "QUEUE_START": sent,
        "COMPUTE_START": start,
        "COMPUTE_INPUT_END": input_end,
        "COMPUTE_OUTPUT_START": output_start,
        "COMPUTE_END": output_start + timing.output,
        "ANSWERED": answered,
        "REQUEST_END": end,
    }
