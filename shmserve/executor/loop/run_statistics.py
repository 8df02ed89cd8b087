"""What this executor's model has done, counted for everybody to see.

For the thread that has the channels. `clock`: nanoseconds since the Unix epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

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

    def add(self, timing: Timing) -> None:
        """Count an answer."""
        self.answers += 1
        self.queue_ns += timing.queue
        self.infer_ns += timing.infer
        self.output_ns += timing.output


class RunStatistics:
    """Of one model. `words`: the counters of the status page.

    Attributes:
        counters: the words of the status page that count executions.
        batching: True if a request can have several rows.
    """

    def __init__(
        self, words: Words, spec: ModelSpec, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._words = words
        self.counters = ExecutorCounters(words)
        self.batching = spec.max_batch_size > 0
        self._clock = clock

    def ran_batch(self, runs: Sequence[tuple[Execute, Timing]]) -> None:
        """The model ran once and answered all of these."""
        (_, first), *others = runs
        self.counters.executed(
            sum(self.elements(message) for message, _ in runs),
            self._clock() // 1_000_000,
            first.input,
            first.infer,
            first.output,
            first.queue,
        )
        for _, timing in others:
            self.counters.shared(timing.queue, timing.input, timing.infer, timing.output)

    def iterated(self, batch: int, timing: Timing, runs: int = 1) -> None:
        """The model ran on so many requests, any of which may run again. `runs` 0: the time of a
        run that is counted."""
        self.counters.last_ran(self._clock() // 1_000_000)
        self.counters.iterated(runs, batch, timing.input, timing.infer, timing.output)

    def finished(self, timing: Timing) -> None:
        """A request that may have run several times is answered."""
        self.counters.finished(timing.queue, timing.input, timing.infer, timing.output)

    def answered(self, spent: Spent, answer: Answer) -> None:
        """An answer of a stream; `spent` takes it in."""
        timing = answer.timing
        if answer.error_code:
            outcome = "cancel" if answer.error_code == Code.CANCELLED else "fail"
        else:
            outcome = "empty_response" if answer.final and not answer.outputs else "success"
        self.counters.response(spent.answers, outcome, timing.infer, timing.output)
        spent.add(timing)

    def streamed(self, spent: Spent, message: Execute) -> None:
        """A stream came to its regular end: one execution, of one request."""
        batch, now_ms = self.elements(message), self._clock() // 1_000_000
        self.counters.executed(batch, now_ms, 0, spent.infer_ns, spent.output_ns, spent.queue_ns)

    def elements(self, message: Execute) -> int:
        """How many elements of a batch a request is."""
        shape = message.inputs[0].shape if self.batching and message.inputs else ()
        return shape[0] if shape else 1

    def measure(self, memory: ArenaMemory) -> bool:
        """Publish what is held right now; whether it may become less by itself."""
        stats = memory.stats()
        held = stats.slots - stats.free
        write_gauges(self._words, Gauges(held, stats.used_bytes, stats.segment_bytes))
        return held > 0 or memory.may_shrink
