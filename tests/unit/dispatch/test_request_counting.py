"""Counts of a frontend for requests through real sockets and shared memory."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from shmserve.config import Settings
from shmserve.core.live_settings import GrantedTraces, TraceSettings
from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.core.stats import executor_counters
from shmserve.core.stats.counter_pages import read_gauges
from shmserve.core.stats.request_counters import Reason, RequestCounts, reason_of, reason_of_answer
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.traces.tracing import Tracer
from shmserve.errors import (
    ArenaExhausted,
    Cancelled,
    DeadlineExceeded,
    ExecutorLost,
    InvalidArgument,
    ModelFailure,
    QueueFull,
    ShmserveError,
    Unavailable,
)
from shmserve.executor.backend import Request, Response
from shmserve.observe.logs import TRACES
from shmserve.tensor.spec import ModelSpec
from tests.unit.dispatch.test_dispatch import Gate, until
from tests.unit.dispatch.test_dispatch import own_array as answer
from tests.unit.rig import SPEC, Rig, feed

ONES = np.ones(3, np.float32)


def fail(request: Request) -> Response:
    raise ModelFailure("no")


def refuse(request: Request) -> Response:
    return Response((), error=InvalidArgument("the model's own idea of wrong"))


def send(rig: Rig, entry: ModelEntry, timeout_s: float | None = None) -> None:
    with rig.dispatcher.call(entry, RunOptions(timeout_s=timeout_s)) as call:
        call.receipt.copied_in += ONES.nbytes
        feed(call, ONES)
        call.execute()


def counted(rig: Rig) -> RequestCounts:
    return rig.counts().get(("m", "1"), RequestCounts())


def ran(rig: Rig, index: int = 0) -> executor_counters.ExecutorCounts:
    return executor_counters.read(rig.executors[index].status.counters)


def failures(rig: Rig) -> dict[str, int]:
    return {r.name: n for r in Reason if (n := counted(rig).failures[r])}


def test_answered_requests_with_their_copies_on_both_sides(rig: Rig) -> None:
    entry = rig.serve(answer)
    before = time.time_ns() // 1_000_000
    for _ in range(5):
        send(rig, entry)
    counts, runs = counted(rig), ran(rig)
    assert (counts.succeeded, failures(rig)) == (5, {})
    assert counts.copied == [60, 0, 60, 0]
    assert sum(counts.buckets) == 5
    assert (runs.requests, runs.executions, runs.inferences) == (5, 5, 5)
    assert runs.batches.keys() == {1}
    assert before <= runs.last_inference_ms <= time.time_ns() // 1_000_000
    assert 0 < sum(runs.stage_ns) < counts.success_ns


def test_elements_of_a_batch_are_inferences(rig: Rig) -> None:
    spec = ModelSpec("m", "1", "python", "python", 8, SPEC.inputs, SPEC.outputs)
    entry = rig.serve(answer, spec=spec)
    send(rig, entry)
    runs = ran(rig)
    assert (runs.requests, runs.executions, runs.inferences) == (1, 1, 3)
    assert list(runs.batches) == [3]


@pytest.mark.parametrize(("model", "error"), [(fail, ModelFailure), (refuse, InvalidArgument)])
def test_a_models_error_is_its_failure_whatever_it_says(rig: Rig, model: Any, error: Any) -> None:
    entry = rig.serve(model)
    with pytest.raises(error):
        send(rig, entry)
    counts = counted(rig)
    assert failures(rig) == {"MODEL": 1}
    assert counts.failed == 1
    assert counts.fail_ns > 0
    assert counts.copied[0] == 12
    assert ran(rig).executions == 0


def test_a_deadline_counts_once_although_the_answer_comes_late(rig: Rig) -> None:
    gate = Gate()
    entry = rig.serve(gate)
    with pytest.raises(DeadlineExceeded):
        send(rig, entry, 2.0)
    gate.open()
    send(rig, entry)
    assert failures(rig) == {"DEADLINE": 1}
    assert counted(rig).succeeded == 1
    assert ran(rig).requests == 2  # the executor ran both; nobody waited for the first


def test_a_full_queue_and_no_executor(rig_with) -> None:
    rig = rig_with(max_queue=1)
    gate = Gate()
    entry = rig.serve(gate)
    first = threading.Thread(target=send, args=(rig, entry))
    first.start()
    assert gate.begun.wait(30)
    with pytest.raises(QueueFull):
        send(rig, entry)
    gate.open()
    first.join()
    none = ModelEntry(entry.spec, entry.state)
    rig.writer.publish(Snapshot("cafe0123", 0, models={"m": {"1": none}}, complete=True))
    with pytest.raises(Unavailable):
        send(rig, none)
    assert failures(rig) == {"QUEUE_FULL": 1, "NO_EXECUTOR": 1}
    assert counted(rig).requests == 3


def test_what_fails_outside_of_execute_counts_once(rig: Rig) -> None:
    entry = rig.serve(answer)
    rig.dispatcher.refused(entry, InvalidArgument("shape"))
    with pytest.raises(InvalidArgument), rig.dispatcher.call(entry) as call:
        raise InvalidArgument("body")
    call = rig.dispatcher.call(entry)
    call.account.failed(Cancelled("gone"))
    call.account.failed(InvalidArgument("again"))
    call.close()
    counts = counted(rig)
    assert failures(rig) == {"BAD_REQUEST": 2, "CANCELLED": 1}
    assert (counts.requests, counts.failed) == (3, 1)


def test_what_clients_were_told_is_kept_once_by_model_and_reason(rig: Rig) -> None:
    entry = rig.serve(answer)
    for text in ("shape", "another shape" + "!" * 1000):
        rig.dispatcher.refused(entry, InvalidArgument(text))
    rig.dispatcher.refused(entry, OSError("/secret"))
    told = rig.dispatcher.counting.told()
    (text,) = told.values()
    assert {(key[0], key[2].name) for key in told} == {(SPEC.name, "BAD_REQUEST")}
    assert text.startswith("another shape!")
    assert len(text) == 300
    assert rig.dispatcher.counting.told() == {}


def test_an_answer_that_cannot_be_written_is_no_success(rig: Rig) -> None:
    entry = rig.serve(answer)
    call = rig.dispatcher.call(entry)
    feed(call, ONES)
    call.execute()
    call.account.failed(InvalidArgument("FP16 has no JSON form"))
    call.close()
    assert failures(rig) == {"BAD_REQUEST": 1}
    assert counted(rig).succeeded == 0


def test_gauges_say_what_is_held(rig: Rig) -> None:
    entry = rig.serve(answer)
    send(rig, entry)
    call = rig.dispatcher.call(entry)
    call.reserve(1000)
    rig.dispatcher._measure()
    words = rig.dispatcher.counting.page.words
    until(lambda: read_gauges(words).slots, "the maintenance thread has looked before")
    gauges = read_gauges(words)
    assert (gauges.slots, gauges.slot_bytes) == (1, 1024)
    assert gauges.arena_bytes == rig.dispatcher.memory.held_bytes
    call.close()


def test_the_page_goes_with_its_process_and_counting_never_fails(rig: Rig) -> None:
    counting = rig.dispatcher.counting
    fd = counting.page.reader_fd()
    assert fd is not None
    with pytest.raises(OSError):
        os.pwrite(fd, b"x", 0)
    os.close(fd)
    entry = rig.serve(answer)
    counting.close()
    send(rig, entry)
    assert counting.page.reader_fd() is None


def test_what_is_copied_of_a_last_message_is_counted_as_well(rig: Rig) -> None:
    entry = rig.serve(answer)
    call = rig.dispatcher.call(entry)
    call.add_input("IN", "FP32", ONES.shape, call.reserve(ONES.nbytes))
    call.execute()
    call.account.answered(2, 3)
    call.receipt.copied_out += 5
    call.close()
    assert counted(rig).copied == [0, 0, 12 + 2 + 5, 0]
    assert call.receipt.send_ns == 3
    assert counted(rig).succeeded == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull("x"), Reason.QUEUE_FULL),
        (ArenaExhausted("x"), Reason.NO_MEMORY),
        (ExecutorLost("x"), Reason.EXECUTOR_DIED),
        (Unavailable("x"), Reason.NO_EXECUTOR),
        (ConnectionResetError(), Reason.CANCELLED),
        (ModelFailure("x"), Reason.MODEL),
        (ShmserveError("x"), Reason.INTERNAL),
        (ZeroDivisionError(), Reason.INTERNAL),
    ],
)
def test_reasons(error: BaseException, reason: Reason) -> None:
    assert reason_of(error) is reason


def test_reasons_of_answers() -> None:
    assert reason_of_answer("INVALID_ARGUMENT") is Reason.MODEL
    assert reason_of_answer("CANCELLED") is Reason.CANCELLED
    assert reason_of_answer("RESOURCE_EXHAUSTED") is Reason.NO_MEMORY


# ------------------------------------------------------------------------ traces


def traced(entry: ModelEntry, **settings: Any) -> ModelEntry:
    made = TraceSettings(on=True, **settings)
    return ModelEntry(entry.spec, entry.state, entry.instances, trace=made)


def everything(model: str, wanted: int, ids: int) -> GrantedTraces:
    return GrantedTraces(wanted)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == TRACES]


def test_one_of_so_many_requests_is_traced(rig: Rig, caplog) -> None:
    caplog.set_level("INFO", TRACES)
    entry = traced(rig.serve(answer), rate=3)
    for _ in range(7):
        send(rig, entry)
    rig.dispatcher.tracer.flush(everything)
    until(lambda: len(lines(caplog)) >= 2, "the maintenance thread does not write them either")
    assert len(lines(caplog)) == 2
    assert '"executor":"m/1/0"' in lines(caplog)[0]


def test_a_limit_is_the_coordinators_word(caplog) -> None:
    caplog.set_level("INFO", TRACES)
    tracer = Tracer("http-1", "http", Settings())
    entry = ModelEntry(SPEC, ModelState.READY, trace=TraceSettings(True, 1, 5))
    for _ in range(4):
        trace = tracer.begin(entry, RunOptions())
        assert trace is not None
        tracer.end(trace)
    asked: list[tuple[str, int, int]] = []

    def take(model: str, wanted: int, ids: int) -> GrantedTraces:
        asked.append((model, wanted, ids))
        return GrantedTraces(3)

    tracer.flush(take)
    assert asked == [("m", 4, 4)]
    assert len(lines(caplog)) == 3
    tracer.flush(take)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("traceparent", "ids"),
    [
        (f"00-{'a' * 32}-{'b' * 16}-01", {"trace_id": "a" * 32, "parent_id": "b" * 16}),
        (f"00-{'0' * 32}-{'b' * 16}-01", {}),
        (f"ff-{'a' * 32}-{'b' * 16}-01", {}),
        (f"00-{'A' * 32}-{'b' * 16}-01", {}),
        ("nonsense", {}),
        ("", {}),
    ],
)
def test_a_trace_tells_of_which_one_it_is_part(rig: Rig, caplog, traceparent, ids) -> None:
    caplog.set_level("INFO", TRACES)
    entry = traced(rig.serve(answer), rate=1)
    with rig.dispatcher.call(entry, RunOptions("7", traceparent=traceparent)) as call:
        feed(call, ONES)
        call.execute()
    rig.dispatcher.tracer.flush(everything)
    until(lambda: lines(caplog), "nor does the maintenance thread write it")
    told = json.loads(lines(caplog)[0].removeprefix("trace "))
    assert {key: told[key] for key in ("trace_id", "parent_id") if key in told} == ids
    assert told["request"] == "7"


def test_times_of_a_trace_are_in_order(rig: Rig, caplog) -> None:
    caplog.set_level("INFO", TRACES)
    send(rig, traced(rig.serve(answer), rate=1))
    rig.dispatcher.tracer.flush(everything)
    until(lambda: lines(caplog), "nor does the maintenance thread write it")
    times = list(json.loads(lines(caplog)[0].removeprefix("trace "))["timestamps"].values())
    assert times == sorted(times)
    assert len(times) == 12
