"""Sequences over real sockets and shared memory: placement, waiting, and the effect of a stop."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.errors import DeadlineExceeded, InvalidArgument, ModelFailure, QueueFull
from shmserve.executor.backend import BatchForm, Output, Request, Response
from shmserve.protocol.control.data_messages import Parameter
from shmserve.shm.status_page import StatusView
from shmserve.tensor.config_document import ConfigDocument, OldestEntry, SequenceEntry, StateEntry
from shmserve.tensor.spec import ModelSpec, TensorSpec
from tests.unit.dispatch.test_dispatch import until
from tests.unit.rig import SPEC, FunctionBackend, Rig, feed


def spec_of(slots: int = 1, idle_us: int = 60_000_000) -> ModelSpec:
    oldest = OldestEntry(max_candidate_sequences=slots)
    sequences = SequenceEntry(oldest=oldest, max_sequence_idle_microseconds=idle_us)
    return msgspec.structs.replace(
        SPEC,
        inputs=(TensorSpec("IN", "FP32", (1,)),),
        outputs=(TensorSpec("OUT", "FP32", (1,)),),
        config=ConfigDocument(sequence_batching=sequences),
    )


class Named:
    """A model that answers with a fixed number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, request: Request) -> Response:
        return Response((Output("OUT", "FP32", np.full(1, self.number, np.float32)),))


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as executor:
        yield executor


def ask(
    rig: Rig,
    entry: ModelEntry,
    sequence: int,
    flags: str = "",
    timeout_s: float = 30,
    outputs: tuple[str, ...] = (),
    **parameters: Parameter,
) -> int:
    """Return the number of the model that received a request of a sequence."""
    told = {f"sequence_{flag}": True for flag in flags.split()} | parameters
    parameters = {"sequence_id": sequence, **told}
    options = RunOptions(parameters=parameters, timeout_s=timeout_s, outputs=outputs)
    with rig.dispatcher.call(entry, options) as call:
        feed(call, np.zeros((1,) * len(entry.spec.inputs[0].shape), np.float32))
        (out,) = call.execute().outputs
        return int(np.frombuffer(bytes(out.view), np.float32)[0])


def free_slots(rig: Rig) -> list[int]:
    """Return the free slots that each executor publishes."""
    found = []
    for executor in rig.executors:
        fd = executor.status.segment.reader_fd()
        found.append(StatusView(fd).free_slots)
        os.close(fd)
    return found


def test_sequences_begin_where_there_is_room_and_stay(rig: Rig) -> None:
    entry = rig.serve(Named(0), Named(1), spec=spec_of(slots=2))
    homes = [ask(rig, entry, number, "start") for number in (1, 2, 3, 4)]
    assert sorted(homes) == [0, 0, 1, 1]
    assert free_slots(rig) == [0, 0]
    assert [ask(rig, entry, number) for number in (4, 1, 3, 2)] == [homes[i] for i in (3, 0, 2, 1)]
    assert ask(rig, entry, 2, "end") == homes[1]
    with pytest.raises(InvalidArgument, match=r"sequence 2 .* must specify the START flag"):
        ask(rig, entry, 2)
    assert ask(rig, entry, 5, "start") == homes[1]


def test_a_sequence_that_lives_somewhere_waits_for_no_stranger(rig: Rig, monkeypatch) -> None:
    entry = rig.serve(Named(0), spec=spec_of())
    assert ask(rig, entry, 1, "start") == 0
    entry = rig.serve(Named(1), spec=spec_of())  # the frontend has not heard of this executor yet
    both = (*entry.instances, *(e.instance for e in rig.executors[:1]))
    entry = msgspec.structs.replace(entry, instances=both)
    rig.writer.publish(Snapshot("cafe0123", 0, models={"m": {"1": entry}}, complete=True))
    asked: list[str] = []
    status = ExecutorPool.status

    def waits(pool: ExecutorPool) -> StatusView | None:
        asked.append(pool.instance.process)
        return status(pool)

    monkeypatch.setattr(ExecutorPool, "status", waits)
    assert ask(rig, rig.dispatcher.ready_model("m"), 1) == 0
    assert asked == []
    assert ask(rig, rig.dispatcher.ready_model("m"), 2, "start") == 1  # where a slot is free
    assert sorted(asked) == ["x0", "x1"]


def test_who_has_no_slot_waits_and_too_many_are_refused(rig, threads) -> None:
    entry = rig.serve(Named(7), spec=spec_of())
    loop = rig.executors[0].loop
    ask(rig, entry, 1, "start")
    waiting: list[Future[int]] = []
    for number in (2, 3, 4):
        waiting.append(threads.submit(ask, rig, entry, number, "start end"))
        until(lambda: loop.queued == len(waiting), "it does not wait")
    with pytest.raises(QueueFull, match="Exceeds maximum number of sequences"):
        ask(rig, entry, 5, "start")
    with pytest.raises(InvalidArgument, match="START flag"):
        ask(rig, entry, 2)  # the request ends before the sequence has begun
    assert ask(rig, entry, 1, "start") == 7
    assert ask(rig, entry, 1, "end") == 7
    assert [each.result(30) for each in waiting] == [7, 7, 7]
    assert (loop.queued, loop.executed, free_slots(rig)) == (0, 6, [1])


def test_what_never_began_is_refused_with_what_would_have_begun_it(rig, threads) -> None:
    entry = rig.serve(Named(7), spec=spec_of())
    loop = rig.executors[0].loop
    ask(rig, entry, 1, "start")
    first = threads.submit(ask, rig, entry, 2, "start", 2.0)
    until(lambda: loop.queued == 1, "it does not wait")
    second = threads.submit(ask, rig, entry, 2, "end")
    with pytest.raises(DeadlineExceeded):
        first.result(30)
    with pytest.raises(InvalidArgument, match="START flag"):
        second.result(30)
    assert ask(rig, entry, 1, "end") == 7


def test_a_timeout_ends_a_sequence_that_waits_for_a_slot(rig, threads) -> None:
    entry = rig.serve(Named(7), spec=spec_of())
    loop = rig.executors[0].loop
    ask(rig, entry, 1, "start")
    waiting = [threads.submit(ask, rig, entry, 2, "start")]
    until(lambda: loop.queued == 1, "it does not wait")
    waiting.append(threads.submit(ask, rig, entry, 2, timeout=1000))
    for each in waiting:
        with pytest.raises(QueueFull) as caught:
            each.result(30)
        assert caught.value.message == "timeout of the corresponding sequence has been expired"
    with pytest.raises(InvalidArgument, match="START flag"):
        ask(rig, entry, 2)
    assert ask(rig, entry, 1, timeout=1) == 7  # the sequence has its slot


def test_silence_gives_a_slot_back(rig: Rig) -> None:
    entry = rig.serve(Named(7), spec=spec_of(idle_us=1000))
    ask(rig, entry, 1, "start")
    until(lambda: free_slots(rig) == [1], "it is not silent yet")
    with pytest.raises(InvalidArgument, match="START flag"):
        ask(rig, entry, 1)


def test_a_stop_answers_those_that_wait_for_a_slot(rig: Rig, threads: ThreadPoolExecutor) -> None:
    entry = rig.serve(Named(7), spec=spec_of())
    executor = rig.executors[0]
    ask(rig, entry, 1, "start")
    waiting = threads.submit(ask, rig, entry, 2, "start")
    until(lambda: executor.loop.queued == 1, "it does not wait")
    executor.loop.stop()
    assert waiting.result(30) == 7
    executor.thread.join(30)
    assert not executor.thread.is_alive()


@pytest.mark.parametrize("form", [BatchForm.LISTED, BatchForm.STACKED])
def test_in_one_tensor_an_output_fails_only_steps_that_want_it(rig: Rig, threads, form) -> None:
    """A step never runs twice."""
    ran: list[tuple[str, ...]] = []
    held, go_on = threading.Event(), threading.Event()

    def model(request: Request) -> Response:
        ran.append(request.requested)
        if not held.is_set():
            held.set()
            go_on.wait(30)
        if "OTHER" in request.requested:
            return Response(error=ModelFailure("no OTHER"))
        return Response((Output("OUT", "FP32", request.inputs["IN"].numpy() + 1),))

    def send(number: int, output: str) -> int:
        return ask(rig, entry, number, "start", outputs=(output,))

    backend = FunctionBackend(model)
    backend.batching = form
    spec = spec_of(slots=4)
    spec = msgspec.structs.replace(
        spec,
        max_batch_size=4,
        config=msgspec.structs.replace(spec.config, max_batch_size=4),
        inputs=(TensorSpec("IN", "FP32", (-1, 1)),),
        outputs=(TensorSpec("OUT", "FP32", (-1, 1)), TensorSpec("OTHER", "FP32", (-1, 1))),
    )
    entry = rig.serve(backend, spec=spec)  # type: ignore[arg-type]
    first = threads.submit(send, 1, "OUT")
    assert held.wait(30)
    waiting: list[Future[int]] = []
    for number, output in enumerate(("OUT", "OUT", "OTHER"), 2):
        waiting.append(threads.submit(send, number, output))
        until(lambda: rig.executors[0].loop.queued == len(waiting), "it does not wait")
    go_on.set()
    assert [each.result(30) for each in (first, *waiting[:2])] == [1, 1, 1]
    with pytest.raises(ModelFailure, match="no OTHER"):
        waiting[2].result(30)
    runs = 4 if form is BatchForm.LISTED else 3
    assert len(ran) == runs


def test_a_request_without_rows_is_none_of_a_sequence(rig: Rig) -> None:
    spec = msgspec.structs.replace(
        spec_of(),
        max_batch_size=4,
        inputs=(TensorSpec("IN", "FP32", (-1, 1)),),
        outputs=(TensorSpec("OUT", "FP32", (-1, 1)),),
    )
    entry = rig.serve(Named(7), spec=spec)
    parameters = {"sequence_id": 1, "sequence_start": True}
    with rig.dispatcher.call(entry, RunOptions(parameters=parameters, timeout_s=30)) as call:  # type: ignore[arg-type]
        call.add_input("IN", "FP32", (0, 1), call.reserve(0))
        with pytest.raises(InvalidArgument, match="must specify batch-size 1"):
            call.execute()
    assert free_slots(rig) == [1]


def test_a_sequence_that_begins_anew_and_fails_has_nothing_of_the_one_before(rig: Rig) -> None:
    def model(request: Request) -> Response:
        (value,) = request.inputs["IN"].numpy()
        state = request.inputs["STATE"].numpy()
        if value < 0:
            raise ValueError("as it was told")
        return Response((Output("OUT", "FP32", state), Output("NEXT", "FP32", state + value)))

    def step(value: float, start: bool = False) -> float:
        told = {"sequence_id": 1, "sequence_start": start}
        with rig.dispatcher.call(entry, RunOptions(parameters=told, timeout_s=30)) as call:  # type: ignore[arg-type]
            feed(call, np.array([value], np.float32))
            (out,) = call.execute().outputs
            return float(np.frombuffer(bytes(out.view), np.float32)[0])

    spec = spec_of()
    entries = msgspec.structs.replace(  # type: ignore[type-var]
        spec.config.sequence_batching, state=(StateEntry("STATE", "NEXT", "TYPE_FP32", (1,)),)
    )
    config = msgspec.structs.replace(spec.config, sequence_batching=entries)
    entry = rig.serve(model, spec=msgspec.structs.replace(spec, config=config))
    assert [step(5, start=True), step(1), step(1)] == [0, 5, 6]
    with pytest.raises(ModelFailure):
        step(-1, start=True)
    assert step(1) == 0
