"""What this executor's model has done, counted for everybody to see.

Called on the loop's thread only. `clock`: nanoseconds since the Unix epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shmserve.core.stats.counter_pages import Gauges, Words, write_gauges
from shmserve.core.stats.executor_counters import ExecutorCounters
from shmserve.errors import Code
from shmserve.protocol.control.data_messages import Answer, Execute, Timing
from shmserve.shm.arena import ArenaMemory
from shmserve.tensor.spec import ModelSpec


class Spent:
    """What the answers of one stream took in all, and how many there were."""

    __slots__ = ("answers", "infer_ns", "output_ns", "queue_ns")

    def __init__(self) -> None:
        self.answers = self.queue_ns = self.infer_ns = self.output_ns = 0


class Statistics:
    """See the module. `words`: the counters of the status page."""

    def __init__(
        self, words: Words, spec: ModelSpec, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._words = words
        self._counters = ExecutorCounters(words)
        self._batching = spec.max_batch_size > 0
        self._clock = clock

    def ran(self, message: Execute, timing: Timing) -> None:
        """The model ran once and answered this request."""
        self._counters.executed(
            self.elements(message) if self._batching else 1,
            self._clock() // 1_000_000,
            timing.input,
            timing.infer,
            timing.output,
            timing.queue,
        )

    def answered(self, spent: Spent, answer: Answer) -> None:
        """An answer of a stream; `spent` takes it in."""
        timing = answer.timing
        if answer.error_code:
            outcome = "cancel" if answer.error_code == Code.CANCELLED else "fail"
        else:
            outcome = "empty_response" if answer.final and not answer.outputs else "success"
        self._counters.response(spent.answers, outcome, timing.infer, timing.output)
        spent.answers += 1
        spent.queue_ns += timing.queue
        spent.infer_ns += timing.infer
        spent.output_ns += timing.output

    def streamed(self, spent: Spent, message: Execute) -> None:
        """A stream came to its regular end: one execution, of one request."""
        self.ran(message, Timing(spent.queue_ns, 0, spent.infer_ns, spent.output_ns))

    def elements(self, message: Execute) -> int:
        """How many elements of a batch a request is."""
        shape = message.inputs[0].shape if self._batching and message.inputs else ()
        return shape[0] if shape else 1

    def measure(self, memory: ArenaMemory) -> None:
        """Publish what is held right now."""
        write_gauges(self._words, gauges(memory))


def gauges(memory: ArenaMemory) -> Gauges:
    """What an arena holds."""
    stats = memory.stats()
    return Gauges(stats.slots - stats.free, stats.used_bytes, stats.segment_bytes)
