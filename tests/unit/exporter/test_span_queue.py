"""Batches by number and by time, and spans without room."""

import threading
import time

from shmserve.exporter.span_export import SpanQueue
from shmserve.protocol.control.span_messages import Span


def spans(*names: str) -> list[Span]:
    return [Span(name, "1" * 32, "2" * 16, "", 1, 2) for name in names]


def names(batch: list[Span]) -> str:
    return "".join(span.name for span in batch)


def test_a_full_batch_is_due_at_once_and_the_rest_after_a_while() -> None:
    queue = SpanQueue(10, 3, 0.05)
    queue.put(spans(*"abcde"))
    assert names(queue.take()) == "abc"
    began = time.monotonic()
    assert names(queue.take()) == "de"
    assert time.monotonic() - began >= 0.04


def test_what_there_is_no_room_for_is_dropped_and_counted() -> None:
    queue = SpanQueue(3, 3, 60)
    queue.put(spans(*"ab"))
    queue.put(spans(*"cde"))
    queue.put(spans("f"))
    assert queue.dropped == 3
    assert names(queue.take()) == "abc"


def test_who_waits_gets_what_comes_and_learns_of_the_end() -> None:
    queue, got = SpanQueue(10, 2, 60), []

    def run() -> None:
        while batch := queue.take():
            got.append(names(batch))

    thread = threading.Thread(target=run)
    thread.start()
    queue.put(spans(*"ab"))
    queue.put(spans("c"))
    queue.close()
    thread.join(30)
    assert not thread.is_alive()
    assert got == ["ab", "c"]
    assert queue.take() == []
