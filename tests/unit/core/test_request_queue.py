"""The queue of requests that run one by one."""

from __future__ import annotations

from shmserve.core.scheduling.request_queue import RequestQueue


def test_where_nothing_may_run_only_what_is_late_is_taken_out() -> None:
    queue = RequestQueue[str, str]()
    for name, deadline_ns in (("patient", 0), ("later", 200), ("late", 100)):
        queue.push(name, name, deadline_ns)
    assert queue.pop_late(99) is None
    assert queue.pop_late(150) == ("late", False)
    assert queue.pop_late(150) is None
    assert queue.pop(150) == ("patient", True)
    assert queue.pop_late(200) == ("later", False)
    assert len(queue) == 0


def test_one_request_waits_for_one_of_each_other_caller() -> None:
    queue = RequestQueue[int, str]()
    for number in range(100):
        queue.push(number, "flood", caller=1)
    queue.push(100, "quiet", caller=2)
    queue.push(101, "third", caller=3)
    ran = [queue.pop(0) for _ in range(4)]
    assert [item for item, _ in filter(None, ran)] == ["flood", "quiet", "third", "flood"]
    queue.push(102, "quiet", caller=2)  # who comes again has saved nothing
    assert [queue.pop(0), queue.pop(0)] == [("flood", True), ("quiet", True)]
