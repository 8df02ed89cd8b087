"""What this executor's model has done, counted for everybody to see.

Called on the loop's thread only. `clock`: nanoseconds since the Unix epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from shmserve.core.counters import Gauges, Words, write_gauges
from shmserve.core.executor_counters import ExecutorCounters
from shmserve.errors import Code
from shmserve.protocol.data_messages import Answer, Execute, Timing
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
        """The model answered one request, alone in its execution."""
        self.batch(self.elements(message), timing.input, timing.infer, timing.output)
        self.request(timing)

    def batch(self, elements: int, input_ns: int, infer_ns: int, output_ns: int) -> None:
        """The model ran once, on a batch of so many elements."""
        now_ms = self._clock() // 1_000_000
        self._counters.executed(elements, now_ms, input_ns, infer_ns, output_ns)

    def request(self, timing: Timing) -> None:
        """One request of an execution was answered; for each of a batch."""
        self._counters.request(timing.queue, timing.input, timing.infer, timing.output)

    def answered(self, spent: Spent, answer: Answer) -> None:
        """An answer of a stream; `spent` takes it in."""
        timing = answer.timing
        if answer.error_code:
            outcome = "cancel" if answer.error_code == Code.CANCELLED else "fail"
        else:
            outcome = "empty_response" if answer.final and not answer.outputs else "success"
        self.response(spent.answers, outcome, timing.infer, timing.output)
        spent.answers += 1
        spent.queue_ns += timing.queue
        spent.infer_ns += timing.infer
        spent.output_ns += timing.output

    def streamed(self, spent: Spent, message: Execute) -> None:
        """A stream came to its regular end: one execution, of one request."""
        self.batch(self.elements(message), 0, spent.infer_ns, spent.output_ns)
        self.request(Timing(spent.queue_ns, 0, spent.infer_ns, spent.output_ns))

    def response(self, index: int, outcome: str, infer_ns: int, output_ns: int) -> None:
        """Response `index` of a decoupled request; see `ExecutorCounters.response`."""
        self._counters.response(index, outcome, infer_ns, output_ns)

    def elements(self, message: Execute) -> int:
        """How many elements of a batch a request is."""
        if not self._batching or not message.inputs or not message.inputs[0].shape:
            return 1
        return message.inputs[0].shape[0]

    def measure(self, memory: ArenaMemory) -> None:
        """Publish what is held right now."""
        write_gauges(self._words, gauges(memory))


def gauges(memory: ArenaMemory) -> Gauges:
    """What an arena holds."""
    stats = memory.stats()
    return Gauges(stats.slots - stats.free, stats.used_bytes, stats.segment_bytes)
