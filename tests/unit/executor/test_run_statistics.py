"""Statistics of an executor for requests with one answer and with many."""

from __future__ import annotations

import msgspec

from shmserve.core.stats.executor_counters import NWORDS, RESPONSE, ExecutorCounts, read
from shmserve.executor.loop.run_statistics import RunStatistics, Spent
from shmserve.protocol.control.data_messages import Answer, Descriptor, Execute, Timing, WireTensor
from shmserve.shm.arena import ArenaMemory
from shmserve.tensor.spec import ModelSpec
from tests.unit.rig import SPEC, Unlimited

TENSOR = WireTensor("IN", "FP32", (3, 2), Descriptor(0, 0, 0, 0, 24))
REQUEST = Execute(1, "", (TENSOR,), (), {}, 0, 0)


class Counted:
    """Statistics on a private page, with a clock that stands still."""

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        self.words = memoryview(bytearray(NWORDS * 8)).cast("Q")
        self.statistics = RunStatistics(self.words, spec, lambda: 5_000_000)

    @property
    def counts(self) -> ExecutorCounts:
        counts = read(self.words)
        assert counts is not None
        return counts


def outcomes(counts: ExecutorCounts, index: int) -> dict[str, tuple[int, int]]:
    values = counts.responses[index]
    pairs = zip(values[::2], values[1::2], strict=True)
    return {name: pair for name, pair in zip(RESPONSE, pairs, strict=True) if pair != (0, 0)}


def test_the_first_dimension_is_the_batch_only_where_the_model_has_one() -> None:
    plain, batching = Counted(), Counted(msgspec.structs.replace(SPEC, max_batch_size=8))
    for counted in (plain, batching):
        counted.statistics.streamed(Spent(), REQUEST)
        counted.statistics.streamed(Spent(), Execute(2, "", (), (), {}, 0, 0))
    assert (plain.counts.inferences, batching.counts.inferences) == (2, 4)
    assert plain.counts.last_inference_ms == 5


def test_answers_of_a_stream_are_counted_by_their_place() -> None:
    counted, spent = Counted(), Spent()
    answers = [
        Answer(1, (TENSOR,), timing=Timing(7, 0, 10, 1), final=False),
        Answer(1, (), "INTERNAL", "no", timing=Timing(0, 0, 20, 2), final=False),
        Answer(1, timing=Timing(0, 0, 30, 3)),
    ]
    for answer in answers:
        assert counted.counts.requests == 0
        counted.statistics.answered(spent, answer)
    counted.statistics.streamed(spent, REQUEST)
    counts = counted.counts
    assert outcomes(counts, 0) == {
        "compute_infer": (1, 10),
        "compute_output": (1, 1),
        "success": (1, 11),
    }
    assert outcomes(counts, 1)["fail"] == (1, 22)
    assert outcomes(counts, 2) == {"compute_infer": (1, 30), "empty_response": (1, 33)}
    assert (counts.requests, counts.executions) == (1, 1)
    assert counts.stage_ns == [7, 0, 60, 6]


def test_a_stream_that_is_cancelled_or_fails_is_no_execution() -> None:
    counted = Counted()
    for code, outcome in (("CANCELLED", "cancel"), ("INTERNAL", "fail")):
        counted.statistics.answered(Spent(), Answer(1, (), code, "x"))
        assert outcomes(counted.counts, 0)[outcome][0] == 1
    assert counted.counts.executions == 0


def test_a_single_segment_that_is_free_again_is_looked_after() -> None:
    counted = Counted()
    memory = ArenaMemory(Unlimited(), lambda: "cafe0123", lambda: 1 << 20)
    slot = memory.reserve(2 << 20)
    assert counted.statistics.measure(memory)
    memory.reclaim(slot)
    assert counted.statistics.measure(memory)
    memory.trim()
    assert not counted.statistics.measure(memory)
    memory.close()
