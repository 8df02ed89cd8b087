"""Selection of requests for the next batch: the cases of config.pbtxt's documentation."""

import pytest
from msgspec import UNSET

from shmserve.core.scheduling.batch_policy import BatchPolicy, QueuePolicy, batch_policy
from shmserve.core.scheduling.batch_queue import BatchQueue, Waiting
from shmserve.tensor.config_document import BatchingEntry, ConfigDocument, QueuePolicyEntry

US = 1000


def queue_of(policy: BatchPolicy, *rows: int, kind: str = "") -> BatchQueue[int, int]:
    queue: BatchQueue[int, int] = BatchQueue(policy)
    for key, count in enumerate(rows):
        assert queue.push(Waiting(key, key, count, kind, key))
    return queue


def keys(queue: BatchQueue[int, int], now_ns: int) -> list[int]:
    return list(queue.next(now_ns).batch)


def test_without_a_delay_whatever_is_there_goes() -> None:
    queue = queue_of(BatchPolicy(8, frozenset((8,))), 1, 2, 3)
    assert keys(queue, 10) == [0, 1, 2]
    assert keys(queue, 10) == []
    assert queue.next(10).wait_ns is None


def test_the_largest_preferred_size_goes_first() -> None:
    queue = queue_of(BatchPolicy(8, frozenset((2, 4))), *[1] * 7)
    assert keys(queue, 10) == [0, 1, 2, 3]
    assert keys(queue, 10) == [4, 5]
    assert keys(queue, 10) == [6]


def test_a_batch_never_exceeds_its_maximum() -> None:
    queue = queue_of(BatchPolicy(4, frozenset((4,))), 3, 2, 2, 4)
    assert [keys(queue, 10) for _ in range(4)] == [[0], [1, 2], [3], []]


def test_a_small_batch_waits_for_others_as_long_as_it_may() -> None:
    queue = queue_of(BatchPolicy(4, frozenset((4,)), max_delay_ns=100), 1, 1)
    turn = queue.next(60)
    assert (turn.batch, turn.wait_ns) == ([], 40)  # since the oldest came, at 0
    assert keys(queue, 100) == [0, 1]
    queue = queue_of(BatchPolicy(4, frozenset((4,)), max_delay_ns=100), 1, 1, 1, 1)
    assert keys(queue, 3) == [0, 1, 2, 3]


def test_what_does_not_agree_does_not_meet() -> None:
    queue = queue_of(BatchPolicy(4, frozenset((4,)), max_delay_ns=100), 1, 1, kind="a")
    queue.push(Waiting(7, 7, 1, "b", 50))
    assert keys(queue, 60) == [0, 1]  # at once: it cannot grow
    assert queue.next(60).wait_ns == 90


def test_urgent_ones_go_first_and_the_default_is_the_policys() -> None:
    policy = BatchPolicy(2, frozenset((2,)), levels=(QueuePolicy(),) * 3, default_level=1)
    queue: BatchQueue[int, int] = BatchQueue(policy)
    for key, priority in enumerate([3, 0, 1, 99, True, 2]):
        queue.push(Waiting(key, key, 1, "", key), priority)
    assert [keys(queue, 10) for _ in range(3)] == [[2, 1], [3, 4], [5, 0]]


@pytest.mark.parametrize("delays", [False, True])
def test_who_waits_too_long_is_rejected_or_steps_back(delays: bool) -> None:
    policy = BatchPolicy(1, frozenset((1,)), levels=(QueuePolicy(delays, 100, True),))
    queue: BatchQueue[int, int] = BatchQueue(policy)
    queue.push(Waiting(0, 0, 1, "", 0))
    queue.push(Waiting(1, 1, 1, "", 0), timeout_ns=50)
    queue.push(Waiting(2, 2, 1, "", 0), timeout_ns=500)  # not longer than the policy's
    turn = queue.next(60)
    assert turn.batch == [0]
    assert turn.rejected == ([] if delays else [1])
    assert queue.next(99, hurry=True).batch[0] == 2
    queue.push(Waiting(3, 3, 1, "", 100))
    assert [keys(queue, 110) for _ in range(2)] == ([[3], [1]] if delays else [[3], []])


def test_a_full_level_takes_no_more() -> None:
    policy = BatchPolicy(4, levels=(QueuePolicy(max_size=1), QueuePolicy()))
    queue: BatchQueue[int, int] = BatchQueue(policy)
    assert queue.push(Waiting(0, 0, 1, "", 0), 1)
    assert not queue.push(Waiting(1, 1, 1, "", 0), 1)
    assert queue.push(Waiting(2, 2, 1, "", 0), 2)
    assert list(queue.waiting) == [0, 2]


def test_the_policy_of_a_configuration() -> None:
    assert batch_policy(ConfigDocument(max_batch_size=8)) is None
    plain = batch_policy(ConfigDocument(max_batch_size=8, dynamic_batching=BatchingEntry()))
    assert plain == BatchPolicy(8, frozenset((8,)))
    assert not plain.is_bounded
    policies = QueuePolicyEntry("DELAY", 30, True, 9), {"1": QueuePolicyEntry(max_queue_size=5)}
    entry = BatchingEntry((2, 4), 250, UNSET, 2, 2, *policies)
    policy = batch_policy(ConfigDocument(max_batch_size=4, dynamic_batching=entry))
    levels = (QueuePolicy(max_size=5), QueuePolicy(True, 30 * US, True, 9))
    assert policy == BatchPolicy(4, frozenset((2, 4)), 250 * US, levels, 1)
    assert policy.is_bounded


def test_callers_take_turns_and_a_batch_is_filled_past_what_does_not_fit() -> None:
    queue: BatchQueue[str, str] = BatchQueue(BatchPolicy(4, frozenset((4,))))
    for name in ("a1", "a2", "a3", "a4", "a5", "b1", "c1", "c2"):
        kind = "other" if name[0] == "c" else "same"
        queue.push(Waiting(name, name, 1, kind, 0, caller=ord(name[0])))
    batches = [queue.next(0).batch for _ in range(3)]
    assert batches == [["a1", "b1", "a2", "a3"], ["c1", "c2"], ["a4", "a5"]]
    queue.push(Waiting("urgent", "urgent", 1, "same", 0, caller=1))
    assert queue.next(0).batch == ["urgent"]
