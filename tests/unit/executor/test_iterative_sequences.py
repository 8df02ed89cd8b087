"""Requests that run again, over real sockets and shared memory: parameters of each run, ends,
leftovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.core.registry import ModelEntry
from shmserve.core.stats.executor_counters import ExecutorCounts, read
from shmserve.dispatch.calls.call import Call
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import Cancelled, DeadlineExceeded, InvalidArgument, ModelFailure, QueueFull
from shmserve.executor.backend import Output, Request, Response
from shmserve.tensor.config_document import ConfigDocument, OldestEntry, SequenceEntry, StateEntry
from shmserve.tensor.spec import ModelSpec, TensorSpec
from tests.unit.dispatch.test_dispatch import slots_in_use, until
from tests.unit.rig import SPEC, Rig, feed

FOREVER = 1e9


def spec_of(slots: int = 2, decoupled: bool = False) -> ModelSpec:
    sequences = SequenceEntry(
        oldest=OldestEntry(max_candidate_sequences=slots),
        max_sequence_idle_microseconds=1000,
        state=(StateEntry("STATE", "NEXT", "TYPE_FP32", (1,)),),
        iterative_sequence=True,
    )
    return msgspec.structs.replace(
        SPEC,
        inputs=(TensorSpec("IN", "FP32", (1,)),),
        outputs=(TensorSpec("OUT", "FP32", (1,)),),
        config=ConfigDocument(sequence_batching=sequences),
        decoupled=decoupled,
    )


class Countdown:
    """Runs as often as the input says; the state is the number of runs. A decoupled model answers
    in each run."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, bool, int]] = []  # sequence, whether the sequence begins, run
        self.views: list[Any] = []  # of inputs, kept

    def __call__(self, request: Request) -> Response | None:
        wanted = request.inputs["IN"].numpy()
        state = request.inputs["STATE"].numpy()
        told = request.parameters
        self.seen.append((told["sequence_id"], bool(told["sequence_start"]), int(state[0])))
        if wanted[0] == FOREVER and not self.views:
            self.views.append(wanted)
        if state[0] + 1 == -wanted[0]:
            raise ModelFailure("as it was told")
        request.reschedule(bool(state[0] + 1 < abs(wanted[0])))
        kept = Output("NEXT", "FP32", state + 1)
        answer = Response((Output("OUT", "FP32", state + 1), kept))
        if request.responses is not None:
            request.responses.send(answer, final=not request.rescheduled)
            return None
        return Response((kept,)) if request.rescheduled else answer


@pytest.fixture
def threads():
    with ThreadPoolExecutor(5) as executor:
        yield executor


def begin(rig: Rig, entry: ModelEntry, runs: float, timeout_s: float = 30, **told: Any) -> Call:
    call = rig.dispatcher.call(entry, RunOptions(parameters=told, timeout_s=timeout_s), True)
    feed(call, np.array([runs], np.float32))
    return call  # type: ignore[return-value]


def first(outcome: Any) -> float:
    return float(np.frombuffer(bytes(outcome.outputs[0].view), np.float32)[0])


def ask(
    rig: Rig, entry: ModelEntry, runs: float, timeout_s: float = 30, **told: Any
) -> list[float]:
    with begin(rig, entry, runs, timeout_s, **told) as call:
        if not entry.spec.decoupled:
            return [first(call.execute())]
        answers = []
        for outcome in call.stream():
            if outcome.error is not None:
                raise ModelFailure(outcome.error.message)
            answers.append(first(outcome))
        return answers


def counts(rig: Rig) -> ExecutorCounts:
    return read(rig.executors[0].status.counters)


def nothing_is_left(rig: Rig) -> Callable[[], bool]:
    loop = rig.executors[0].loop
    return lambda: loop.queued == 0 and slots_in_use(rig) == 0


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_request_runs_until_it_is_released(rig: Rig, decoupled: bool) -> None:
    model = Countdown()
    entry = rig.serve(model, spec=spec_of(decoupled=decoupled))
    assert ask(rig, entry, 4) == ([1, 2, 3, 4] if decoupled else [4])
    assert ask(rig, entry, 1, sequence_id=9) == [1]
    assert ask(rig, entry, 2, sequence_id="name")[-1] == 2
    assert model.seen == [
        *(((1 << 31) - 1, run == 0, run) for run in range(4)),  # no client begins with this number
        (9, True, 0),
        ("name", True, 0),
        ("name", False, 1),
    ]
    found = counts(rig)
    assert (found.requests, found.executions, found.inferences) == (3, 7, 7)
    assert rig.executors[0].loop.executed == 3


def test_an_answer_without_states_leaves_those_of_the_one_before(rig: Rig) -> None:
    def model(request: Request) -> None:
        run = request.inputs["STATE"].numpy() + 1
        again = bool(run[0] < request.inputs["IN"].numpy()[0])
        answer = Output("OUT", "FP32", run)
        request.responses.send(Response((answer, Output("NEXT", "FP32", run))))
        request.responses.send(Response((answer,)), final=not again)
        request.reschedule(again)

    entry = rig.serve(model, spec=spec_of(decoupled=True))
    assert ask(rig, entry, 3) == [1, 1, 2, 2, 3, 3]


def test_states_that_come_after_the_run_are_nobodys(rig: Rig, threads: ThreadPoolExecutor) -> None:
    kept: list[Any] = []

    def model(request: Request) -> None:
        kept.append(request)

    entry = rig.serve(model, spec=spec_of(decoupled=True))
    asked = threads.submit(ask, rig, entry, 1, sequence_id=9)
    until(lambda: counts(rig).executions == 1, "it has not run")
    (request,) = kept
    request.reschedule(True)  # too late as well
    five = np.array([5], np.float32)
    request.responses.send(
        Response((Output("OUT", "FP32", five), Output("NEXT", "FP32", five))), final=True
    )
    assert asked.result() == [5]
    assert rig.executors[0].loop._runner._states._pending == {}  # type: ignore[attr-defined]
    kept.clear()
    until(nothing_is_left(rig), "something is left")


@pytest.mark.parametrize("decoupled", [False, True])
def test_an_error_ends_it(rig: Rig, decoupled: bool) -> None:
    entry = rig.serve(Countdown(), spec=spec_of(decoupled=decoupled))
    with pytest.raises(ModelFailure, match="as it was told"):
        ask(rig, entry, -3)
    found = counts(rig)
    assert (found.requests, found.executions) == (0, 2)
    assert ask(rig, entry, 2)[-1] == 2
    until(nothing_is_left(rig), "something is left")


@pytest.mark.parametrize("decoupled", [False, True])
def test_who_goes_on_for_ever_is_cancelled_between_runs(rig, threads, decoupled) -> None:
    model = Countdown()
    entry = rig.serve(model, spec=spec_of(1, decoupled))
    with begin(rig, entry, FOREVER) as call:
        running = threads.submit(lambda: list(call.stream()) if decoupled else call.execute())
        until(lambda: len(model.seen) > 4, "it does not run")
        waits = threads.submit(ask, rig, entry, 2)  # the model has one slot
        call.cancel()
        with pytest.raises(Cancelled):
            running.result(30)
    assert waits.result(30)[-1] == 2
    loop = rig.executors[0].loop
    until(lambda: loop.queued == 0, "it waits still")
    if not decoupled:  # the model has a view of the input, whose slot stays in use until then
        assert model.views[0][0] == FOREVER
        assert slots_in_use(rig) == 1
    model.views.clear()
    until(nothing_is_left(rig), "something is left")


def test_deadline_and_bounds(rig: Rig, threads: ThreadPoolExecutor) -> None:
    model = Countdown()
    entry = rig.serve(model, spec=spec_of(1))
    late = threads.submit(ask, rig, entry, FOREVER, 4.0, sequence_id=7)
    until(lambda: len(model.seen) > 4, "it does not run")
    with pytest.raises(InvalidArgument, match=r"sequence 7 of model 'm' has not ended yet"):
        ask(rig, entry, 1, sequence_id=7)
    # which of the four comes last is not known: `queued` counts sequence 7 between its runs, too
    waiting = [threads.submit(ask, rig, entry, 1) for _ in range(4)]
    with pytest.raises(DeadlineExceeded):
        late.result(30)
    refused = [error for each in waiting if (error := each.exception(30))]
    assert [type(error) for error in refused] == [QueueFull]
    assert "maximum number of sequences" in str(refused[0])
    assert [each.result() for each in waiting if not each.exception()] == [[1]] * 3
    model.views.clear()
    until(nothing_is_left(rig), "something is left")


def test_only_states_may_come_with_a_rescheduled_request(rig: Rig) -> None:
    def model(request: Request) -> Response:
        request.reschedule(True)
        return Response((Output("OUT", "FP32", np.zeros(1, np.float32)),))

    entry = rig.serve(model, spec=spec_of())
    with pytest.raises(ModelFailure, match="answered by None, or with states only"):
        ask(rig, entry, 1)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_stop_lets_it_finish(rig: Rig, threads: ThreadPoolExecutor, decoupled: bool) -> None:
    model = Countdown()
    entry = rig.serve(model, spec=spec_of(decoupled=decoupled))
    executor = rig.executors[0]
    finishes = threads.submit(ask, rig, entry, 200)
    until(lambda: len(model.seen) > 4, "it does not run")
    executor.loop.stop()
    assert finishes.result(30)[-1] == 200
    executor.thread.join(30)
    assert not executor.thread.is_alive()


def test_busy_means_that_nothing_moves(rig: Rig) -> None:
    gate, answered = threading.Event(), threading.Semaphore(0)

    def sends_later(request: Request) -> None:
        value = Output("OUT", "FP32", request.inputs["IN"].numpy().copy())
        responses = request.responses

        def work() -> None:
            for _ in range(4):
                answered.acquire(timeout=30)
                responses.send(Response((value,)))
            gate.wait(30)
            responses.send(None, final=True)

        threading.Thread(target=work).start()

    entry = rig.serve(sends_later, spec=spec_of(decoupled=True))
    status = rig.executors[0].status
    with begin(rig, entry, 1, sequence_id=1, sequence_start=True, sequence_end=True) as call:
        stream = call.stream()
        for _ in range(4):
            begun = time.monotonic_ns()
            answered.release()
            next(stream)
            until(lambda begun=begun: status.busy_since > begun, "busy since its last answer")  # type: ignore[misc]
        gate.set()
        list(stream)
    until(lambda: status.busy_since == 0, "still busy")
