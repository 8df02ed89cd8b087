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
