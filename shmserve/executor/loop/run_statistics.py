"""Run statistics: counts the work of the executor's model, on the status page.

Only for the thread that has the channels.
"""

import time
from collections.abc import Callable, Sequence

from shmserve.core.stats.counter_pages import UNCOUNTED_WORD, Gauges, Words, write_gauges
from shmserve.core.stats.executor_counters import ExecutorCounters
from shmserve.errors import Code
from shmserve.protocol.control.data_messages import Answer, Execute, Timing
from shmserve.shm.arena import ArenaMemory
from shmserve.tensor.spec import ModelSpec


class Spent:
    """Sums over the answers of one stream: number of answers, and nanoseconds by phase."""

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
    """Statistics of one model.

    Args:
        words: counters of the status page.
        spec: the model.
        clock: returns nanoseconds since the Unix epoch.

    Attributes:
        counters: words of the status page that count executions.
        batching: True if a request can have several rows.
    """

    def __init__(
        self, words: Words, spec: ModelSpec, clock: Callable[[], int] = time.time_ns
    ) -> None:
        self._words = words
        self.counters = ExecutorCounters(words)
        self.batching = spec.max_batch_size > 0
        self._clock = clock

    def ran(self, message: Execute, timing: Timing) -> None:
        """Count a run of the model for a single request."""
        self.counters.executed(
            self.elements(message) if self.batching else 1,
            self._clock() // 1_000_000,
            timing.input,
            timing.infer,
            timing.output,
            timing.queue,
        )

    def postpone(self, number: int) -> None:
        """Show that an answer is sent before the run is counted by `ran_late`. `number` differs
        from run to run. If the process is killed in between, the run stays uncounted."""
        self._words[UNCOUNTED_WORD] = number

    def ran_late(self, message: Execute, timing: Timing) -> None:
        """Count a run as `ran` does, after the answer was sent."""
        self.ran(message, timing)
        self._words[UNCOUNTED_WORD] = 0

    def ran_batch(self, runs: Sequence[tuple[Execute, Timing]]) -> None:
        """Count one run of the model, which has answered several requests. `runs`: message and
        timing of each request."""
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
        """Count a run on `batch` requests, each of which may run again. With `runs` 0, only add
        the time of an earlier counted run."""
        now_ms = self._clock() // 1_000_000
        self.counters.iterated(runs, batch, now_ms, timing.input, timing.infer, timing.output)

    def finished(self, timing: Timing) -> None:
        """Count the answer to a request that may have run several times."""
        self.counters.finished(timing.queue, timing.input, timing.infer, timing.output)

    def answered(self, spent: Spent, answer: Answer) -> None:
        """Count an answer of a stream, and add its times to `spent`."""
        timing = answer.timing
        if answer.error_code:
            outcome = "cancel" if answer.error_code == Code.CANCELLED else "fail"
        else:
            outcome = "empty_response" if answer.final and not answer.outputs else "success"
        self.counters.response(spent.answers, outcome, timing.infer, timing.output)
        spent.add(timing)

    def streamed(self, spent: Spent, message: Execute) -> None:
        """Count a stream that has ended without error: one execution, of one request."""
        batch, now_ms = self.elements(message), self._clock() // 1_000_000
        self.counters.executed(batch, now_ms, 0, spent.infer_ns, spent.output_ns, spent.queue_ns)

    def elements(self, message: Execute) -> int:
        """Return the number of rows of a request; 1 without a batch dimension."""
        shape = message.inputs[0].shape if self.batching and message.inputs else ()
        return shape[0] if shape else 1

    def measure(self, memory: ArenaMemory) -> bool:
        """Publish the gauges of memory. Return True if memory in use may shrink by itself."""
        stats = memory.stats()
        used_slots = stats.slots - stats.free
        write_gauges(self._words, Gauges(used_slots, stats.used_bytes, stats.segment_bytes))
        return used_slots > 0 or memory.may_shrink
