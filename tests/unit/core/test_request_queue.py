"""The queue of requests that run separately."""

from shmserve.core.scheduling.request_queue import RequestQueue


def test_where_nothing_may_run_only_what_is_late_is_taken_out() -> None:
    queue = RequestQueue[str, str]()
    for name, deadline_ns in (("patient", 0), ("later", 200), ("late", 100)):
        queue.push(name, name, deadline_ns)
    assert queue.next_end_ns == 100
    turn = queue.next(99, may_run=False)
    assert (turn.batch, turn.late, turn.wait_ns, turn.is_due) == ((), (), 1, True)
    turn = queue.next(150, may_run=False)
    assert (turn.batch, turn.late, turn.wait_ns) == ((), ["late"], 50)
    assert queue.next(150).batch == ("patient",)
    assert queue.expire(199) == ([], [])
    turn = queue.next(200)
    assert (turn.batch, turn.late, turn.wait_ns, turn.is_due) == ((), ["later"], None, False)
    assert len(queue.waiting) == 0


def test_one_request_waits_for_one_of_each_other_caller() -> None:
    queue = RequestQueue[int, str]()
    for number in range(100):
        queue.push(number, "flood", caller=1)
    queue.push(100, "quiet", caller=2)
    queue.push(101, "third", caller=3)
    ran = [item for _ in range(4) for item in queue.next(0).batch]
    assert ran == ["flood", "quiet", "third", "flood"]
    queue.push(102, "quiet", caller=2)  # a returning caller has saved no turns
    assert [queue.next(0).batch, queue.next(0).batch] == [("flood",), ("quiet",)]
