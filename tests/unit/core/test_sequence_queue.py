"""Sequences: slots, waiting, and batches, in examples with the test's own clock."""

from msgspec.structs import replace

from shmserve.core.scheduling.sequence_policy import SequencePolicy
from shmserve.core.scheduling.sequence_queue import SequenceQueue
from shmserve.core.scheduling.sequence_slots import Step

POLICY = SequencePolicy(2, 2, idle_ns=100, max_waiting=1)
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

    def gave_way(self, sequence: int | str) -> None:
        self.gone.append(f"{sequence}")

    def began(self, sequence: int | str) -> None:
        self.alive.append(sequence)

    def ended(self, sequence: int | str) -> None:
        self.alive.remove(sequence)

    def push(
        self,
        name: str,
        flags: str = "",
        kind: str = "",
        deadline_ns: int = 0,
        expires_ns: int = 0,
        caller: int = 0,
    ) -> None:
        sequence = name.partition("/")[0]
        start, end = "start" in flags, "end" in flags
        assert start or self.queue.knows(sequence)
        self.queue.push(
            sequence,
            Step(
                *(name, name, 1, kind, self.now, deadline_ns, expires_ns, caller),
                start=start,
                end=end,
            ),
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
    assert not them.queue.has_room_for(0)
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


SHARED = SequencePolicy(4, 4, idle_ns=10_000, caller_share=0.75, patience_ns=100)


def test_the_longest_idle_sequence_of_who_has_two_slots_more_gives_way() -> None:
    them = Sequences(SHARED)
    for name in "abcd":
        them.push(f"{name}/1", "start", caller=1)
        them.now += 1
    assert len(them.run()) == 4
    them.now += 1
    them.push("a/2", caller=1)
    assert them.run() == ["a/2"]
    them.push("x/1", "start", caller=2)
    assert them.queue.next(them.now).wait_ns == 99
    assert them.run(98) == []
    assert them.run(1) == ["x/1"]
    assert (them.gone, them.alive) == (["b"], ["a", "c", "d", "x"])
    them.push("y/1", "start", caller=2)  # takes the second of four
    them.push("z/1", "start", caller=2)  # the other caller has no two slots more
    assert them.run(200) == ["y/1"]
    assert (them.gone, them.alive) == (["b", "c"], ["a", "d", "x", "y", "z"])
    assert not them.queue.knows("c")


def test_short_pauses_keep_the_share_of_the_slots_and_no_more() -> None:
    them = Sequences(SHARED)
    for name in "abcd":
        them.push(f"{name}/1", "start", caller=1)
    them.run()
    them.push("x/1", "start", caller=2)
    them.push("y/1", "start", caller=3)
    for number in range(2, 6):  # a request every 30 ns, and x waits for 100
        for name in "abcd":
            if them.queue.knows(name):
                them.push(f"{name}/{number}", caller=1)
        them.run(30)
        them.run()  # the executor asks again after each run
    assert (them.gone, them.alive) == (["a"], ["b", "c", "d", "x", "y"])
    them.push("b/9", "end", caller=1)
    them.run()
    assert them.run() == ["y/1"]


def test_a_request_in_the_model_or_waiting_keeps_its_sequence() -> None:
    them = Sequences(SHARED)
    for name in "abcd":
        them.push(f"{name}/1", "start", caller=1)
    them.push("x/1", "start", caller=2)
    assert len(them.queue.next(them.now).batch) == 4
    them.queue.expire(them.now + 1000)
    them.queue.done(them.now)
    for name in "abcd":
        them.push(f"{name}/2", caller=1)
    assert len(them.run(1000)) == 4
    assert not them.gone
    assert them.run(100) == ["x/1"]


def test_callers_who_are_not_told_apart_keep_their_slots() -> None:
    them = Sequences(replace(SHARED, caller_share=1.0))
    for name in "abcd":
        them.push(f"{name}/1", "start", caller=1)
    them.run()
    them.push("x/1", "start", caller=2)
    assert (them.run(9_000), them.gone) == ([], [])


def test_a_free_slot_goes_to_who_has_fewest() -> None:
    them = Sequences(replace(SHARED, slots=2, max_size=2))
    for name in "abcde":
        them.push(f"{name}/1", "start end", caller=1)
    for name in "xyz":
        them.push(f"{name}/1", "start end", caller=2)
    batches = [them.run() for _ in range(4)]
    assert batches == [["a/1", "b/1"], ["x/1", "c/1"], ["y/1", "d/1"], ["z/1", "e/1"]]
