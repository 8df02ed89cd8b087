"""Sequences: slots, waiting, and batches, in examples with the test's own clock."""

from __future__ import annotations

from msgspec.structs import replace

from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_queue import SequenceQueue, Step

POLICY = SequencePolicy(2, 2, idle_ns=100, max_sequences=3)
OLDEST = SequencePolicy(4, 3, False, frozenset((2, 3)), max_delay_ns=10, idle_ns=100)


class Sequences:
    """A queue and the queue's reports. Requests are named ``sequence/number``."""

    def __init__(self, policy: SequencePolicy = POLICY) -> None:
        self.alive: list[int | str] = []
        self.queue: SequenceQueue[str, str] = SequenceQueue(policy, self)
        self.now = 1000
        self.gone: list[str] = []

    def gave_up(self, items: list[str]) -> None:
        self.gone += items

    def began(self, sequence: int | str) -> None:
        self.alive.append(sequence)

    def ended(self, sequence: int | str) -> None:
        self.alive.remove(sequence)

    def push(
        self, name: str, flags: str = "", kind: str = "", deadline_ns: int = 0, expires_ns: int = 0
    ) -> None:
        sequence = name.partition("/")[0]
        start, end = "start" in flags, "end" in flags
        assert start or self.queue.knows(sequence)
        self.queue.push(
            sequence,
            Step(name, name, 1, kind, self.now, deadline_ns, expires_ns, start=start, end=end),
        )

    def run(self, after_ns: int = 0, hurry: bool = False) -> list[str]:
        """Return the batch that runs after `after_ns`."""
        self.now += after_ns
        batch = list(self.queue.next(self.now, hurry).batch)
        self.queue.done(self.now)
        return batch


def test_requests_of_one_sequence_run_in_turn_and_those_of_several_together() -> None:
    them = Sequences()
    for name in ("a/1", "b/1"):
        them.push(name, "start")
    for name in ("a/2", "a/3", "b/2"):
        them.push(name)
    assert [them.run() for _ in range(4)] == [["a/1", "b/1"], ["a/2", "b/2"], ["a/3"], []]
    assert them.alive == ["a", "b"]


def test_a_sequence_without_a_slot_waits_for_an_end() -> None:
    them = Sequences()
    for name in "abc":
        them.push(f"{name}/1", "start")
    assert not them.queue.has_room_for("d")
    assert them.queue.has_room_for("a")
    assert [them.run(), them.run()] == [["a/1", "b/1"], []]
    them.push("a/2", "end")
    assert not them.queue.knows("a")
    assert them.queue.free_slots == 0
    assert [them.run(), them.run()] == [["a/2"], ["c/1"]]
    assert them.alive == ["b", "c"]


def test_who_waits_for_a_slot_for_too_long_gives_up_with_its_whole_sequence() -> None:
    them = Sequences(replace(POLICY, slots=1, idle_ns=10_000))
    them.push("a/1", "start", expires_ns=1010)
    them.push("b/1", "start")
    them.push("b/2", expires_ns=1010)
    them.push("c/1", "start end")
    assert them.run() == ["a/1"]
    assert them.queue.next(them.now).wait_ns == 10
    them.push("a/2", expires_ns=1010)
    assert them.run(10) == ["a/2"]  # a sequence with a slot does not wait
    assert (them.gone, them.alive) == (["b/1", "b/2"], ["a", "c"])
    assert not them.queue.knows("b")
    them.push("a/3", "end")
    assert [them.run(), them.run()] == [["a/3"], ["c/1"]]


def test_who_begins_anew_while_others_wait_goes_behind_them() -> None:
    them = Sequences(replace(POLICY, slots=1))
    them.push("a/1", "start end")
    them.push("a/2", "start")
    them.push("b/1", "start end")
    assert [them.run() for _ in range(3)] == [["a/1"], ["b/1"], ["a/2"]]


def test_silence_ends_a_sequence_when_it_has_lasted_long_enough() -> None:
    them = Sequences()
    them.push("a/1", "start")
    them.run()
    assert them.queue.next(them.now).wait_ns == 100
    assert them.run(99) == []
    assert them.alive == ["a"]
    them.push("a/2")
    assert them.run(1) == ["a/2"]
    assert them.run(99) == []
    assert them.queue.knows("a")
    assert them.run(1) == []
    assert them.alive == []


def test_a_request_that_is_cancelled_was_a_sign_of_life() -> None:
    them = Sequences()
    them.push("a/1", "start")
    them.run()
    them.now += 90
    them.push("a/2")
    assert them.queue.cancel("a/2") == "a/2"
    assert them.run(50) == []
    assert them.alive == ["a"]
    assert them.run(50) == []
    assert them.alive == []


def test_without_its_beginning_there_is_no_sequence() -> None:
    them = Sequences()
    them.push("a/1", "start")
    them.push("a/2")
    them.push("a/3", "end")
    them.push("a/4", "start")
    assert them.queue.cancel("a/1") == "a/1"
    turn = them.queue.next(them.now)
    assert (turn.rejected, turn.batch) == (["a/2", "a/3"], ["a/4"])
    assert them.queue.cancel("a/9") is None


def test_who_is_late_is_told_and_a_sequence_whose_end_is_late_has_ended() -> None:
    them = Sequences()
    them.push("a/1", "start")
    them.run()
    them.push("a/2", deadline_ns=1010)
    them.push("a/3", "end", deadline_ns=1020)
    assert them.queue.next_end_ns == 1010
    assert them.queue.expire(1020) == (["a/2", "a/3"], [])
    assert (len(them.queue.waiting), them.alive) == (0, [])


def test_who_hurries_keeps_no_slot_for_what_will_not_come() -> None:
    them = Sequences(replace(POLICY, slots=1))
    them.push("a/1", "start")
    them.push("b/1", "start")
    assert [them.run(), them.run(), them.run(hurry=True)] == [["a/1"], [], ["b/1"]]


def test_only_what_agrees_runs_together() -> None:
    them = Sequences()
    them.push("a/1", "start", kind="x")
    them.push("b/1", "start", kind="y")
    assert [them.run(), them.run()] == [["a/1"], ["b/1"]]


def test_direct_waits_for_enough_slots_or_until_it_is_due() -> None:
    them = Sequences(replace(POLICY, enough=2, max_delay_ns=10))
    them.push("a/1", "start")
    assert them.queue.next(them.now).wait_ns == 10
    them.push("b/1", "start")
    assert them.run() == ["a/1", "b/1"]
    them.push("b/2")
    assert [them.run(9), them.run(1)] == [[], ["b/2"]]


def test_oldest_takes_preferred_sizes_at_once_in_the_order_of_arrival() -> None:
    them = Sequences(OLDEST)
    for name in "abcd":
        them.push(f"{name}/1", "start")
    assert them.run() == ["a/1", "b/1", "c/1"]
    assert them.run(5) == []
    them.push("a/2")
    assert them.run() == ["d/1", "a/2"]
    them.push("b/2")
    assert [them.run(9), them.run(1)] == [[], ["b/2"]]


def test_a_model_without_batches_gets_the_oldest_alone() -> None:
    them = Sequences(replace(POLICY, max_delay_ns=50, enough=2).one_by_one())
    them.push("a/1", "start")
    them.now += 1
    them.push("b/1", "start")
    them.now += 1
    them.push("a/2")
    assert [them.run() for _ in range(3)] == [["a/1"], ["b/1"], ["a/2"]]


def test_what_lost_its_beginning_is_to_be_told_at_once() -> None:
    them = Sequences()
    them.push("a/1", "start")
    them.push("a/2", "end")
    them.queue.cancel("a/1")
    assert them.queue.next_end_ns <= them.now
    assert them.queue.expire(them.now) == ([], ["a/2"])
    assert them.queue.next_end_ns > them.now
