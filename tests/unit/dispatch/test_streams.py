"""Streams of answers, through real sockets and shared memory."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.core.registry import ModelEntry
from shmserve.dispatch.calls.call import Call
from shmserve.dispatch.outcome import RunOptions
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    ExecutorLost,
    ModelFailure,
    ProtocolViolation,
)
from shmserve.executor.backend import Output, Request, Response, Responses
from tests.unit.dispatch.test_dispatch import caller_that_sees, slots_in_use, until
from tests.unit.rig import SPEC, Model, Rig, feed

Array = np.ndarray[Any, Any]
DECOUPLED = msgspec.structs.replace(SPEC, decoupled=True)


def serve(rig: Rig, *models: Model) -> ModelEntry:
    return rig.serve(*models, spec=DECOUPLED)


def answer(value: float, size: int = 1) -> Response:
    return Response((Output("OUT", "FP32", np.full(size, value, np.float32)),))


def channel_of(request: Request) -> Responses:
    assert request.responses is not None
    return request.responses


def count_up(request: Request) -> None:
    """Answer as often as the first element says, each time with as many elements as the second
    element says."""
    given = request.inputs["IN"].numpy()
    for i in range(int(given[0])):
        channel_of(request).send(answer(i, int(given[1]) if given.size > 1 else 1))
    channel_of(request).send(None, final=True)


def start(
    rig: Rig, entry: ModelEntry, *values: float, cancellable: bool = False, **options: Any
) -> Call:
    call = rig.dispatcher.call(entry, RunOptions(**options), cancellable)
    feed(call, np.array(values, np.float32))
    return call  # type: ignore[return-value]


def first_elements(call: Call) -> list[float]:
    return [
        float(np.frombuffer(outcome.outputs[0].view, np.float32)[0])
        for outcome in call.stream()
        if outcome.outputs
    ]


def executor_slots(rig: Rig) -> int:
    return sum(len(executor.memory.rows("slots")) for executor in rig.executors)


def all_slots_come_back(rig: Rig) -> None:
    until(lambda: slots_in_use(rig) == 0, "input slots are held")
    gc.collect()
    until(lambda: executor_slots(rig) == 0, "output slots are held")


@pytest.mark.parametrize("count", [0, 1, 2, 10_000])
def test_every_answer_arrives_in_order(rig: Rig, count: int) -> None:
    entry = serve(rig, count_up)
    with start(rig, entry, count) as call:
        assert first_elements(call) == list(range(count))
    all_slots_come_back(rig)


def test_the_times_of_a_stream_are_those_of_all_answers(rig: Rig) -> None:
    call = start(rig, serve(rig, count_up), 5)
    taken = [call.receipt.timing for outcome in call.stream() if outcome.outputs]
    last, receipt = call.receipt.timing, call.receipt
    sums = [sum(getattr(t, name) for t in taken) for name in ("input", "infer", "output")]
    assert receipt.input_ns in (sums[0], sums[0] + last.input)
    whole = Receipt()
    whole.add(receipt)
    assert (whole.input_ns, whole.output_ns) == (receipt.input_ns, receipt.output_ns)
    assert whole.output_ns >= sums[2] > 0
    call.close()


def test_the_last_outcome_alone_is_final(rig: Rig) -> None:
    def ends_with_an_answer(request: Request) -> None:
        channel_of(request).send(answer(1))
        channel_of(request).send(answer(2), final=True)

    entry = serve(rig, ends_with_an_answer)
    with start(rig, entry, 0) as call:
        finals = [(outcome.final, len(outcome.outputs)) for outcome in call.stream()]
    assert finals == [(False, 1), (True, 1)]


def test_errors_of_single_answers_do_not_end_a_stream(rig: Rig) -> None:
    def half_failing(request: Request) -> None:
        channel_of(request).send(answer(1))
        channel_of(request).send(Response(error=ModelFailure("no 2", Code.NOT_FOUND)))
        channel_of(request).send(answer(3))
        channel_of(request).send(None, final=True)

    entry = serve(rig, half_failing)
    with start(rig, entry, 0) as call:
        told = [o.error.message if o.error else len(o.outputs) for o in call.stream()]
    assert told == [1, "no 2", 1, 0]


def test_an_answer_that_finds_no_room_is_replaced_by_its_error(rig_with) -> None:
    class Nothing:
        pool_bytes = 0

        def grant(self, nbytes: int, timeout_s: float) -> bool:
            return nbytes < 1 << 22

        def give_back(self, nbytes: int) -> None: ...

    def too_big(request: Request) -> None:
        channel_of(request).send(answer(1, 1 << 21))
        channel_of(request).send(answer(2))
        channel_of(request).send(None, final=True)

    rig = rig_with()
    entry = serve(rig, too_big)
    rig.executors[0].memory._budget = Nothing()
    with start(rig, entry, 0) as call:
        codes = [o.error.code if o.error else None for o in call.stream()]
    assert codes == [Code.RESOURCE_EXHAUSTED, None, None]
    all_slots_come_back(rig)


def test_threads_go_on_after_execute_has_returned(rig: Rig) -> None:
    threads: list[threading.Thread] = []
    entered = threading.Semaphore(0)
    gate = threading.Event()

    def in_background(request: Request) -> None:
        def work() -> None:
            gate.wait(30)
            count_up(request)

        threads.append(threading.Thread(target=work))
        threads[-1].start()
        entered.release()

    entry = serve(rig, in_background)

    def read() -> list[float]:
        with start(rig, entry, 50, 2000) as call:
            return first_elements(call)

    with ThreadPoolExecutor() as readers:
        results = [readers.submit(read) for _ in range(6)]
        for _ in results:  # all are in the model at once, before any has answered
            assert entered.acquire(timeout=30)
        gate.set()
    for thread in threads:
        thread.join()
    assert [each.result() for each in results] == [list(range(50))] * 6
    threads.clear()
    all_slots_come_back(rig)


def test_no_more_streams_than_allowed(rig_with) -> None:
    rig = rig_with(max_streams=2)
    kept: list[Responses] = []
    entry = serve(rig, lambda request: kept.append(channel_of(request)))
    calls = [start(rig, entry, 0) for _ in range(3)]
    with ThreadPoolExecutor() as readers:
        read = [readers.submit(list, call.stream()) for call in calls]
        until(lambda: len(kept) == 2, "two streams")
        until(lambda: rig.executors[0].loop.queued == 1, "the third waits")
        time.sleep(0.1)
        assert len(kept) == 2
        kept[0].send(None, final=True)
        until(lambda: len(kept) == 3, "the third stream")
        for responses in kept[1:]:
            responses.send(None, final=True)
    assert [len(each.result()) for each in read] == [1, 1, 1]
    for call in calls:
        call.close()


def test_a_slow_reader_holds_back_the_model(rig_with) -> None:
    rig = rig_with(stream_credit=4)
    sent: list[int] = []

    def eager(request: Request) -> None:
        for i in range(100):
            channel_of(request).send(answer(i, 50_000))
            sent.append(i)
        channel_of(request).send(None, final=True)

    entry = serve(rig, eager)
    peak = 0
    with start(rig, entry, 0) as call:
        seen = 0
        for outcome in call.stream():
            if not outcome.outputs:
                continue
            assert np.frombuffer(outcome.outputs[0].view, np.float32)[0] == seen
            seen += 1
            if seen in (1, 2, 40):  # two answers at most have not been acknowledged
                until(lambda least=seen + 2: len(sent) >= least, "the model does not go on")  # type: ignore[misc]
                time.sleep(0.1)
            assert len(sent) <= seen + 4
            peak = max(peak, executor_slots(rig))
    assert seen == 100
    assert 2 <= peak <= 5
    all_slots_come_back(rig)


def test_closing_the_iterator_cancels(rig: Rig) -> None:
    told = threading.Event()
    dropped: list[int] = []

    def endless(request: Request) -> None:
        for i in itertools.count():
            channel_of(request).send(answer(i, 5000))
            if request.cancelled:
                told.set()
                dropped.append(i)
            if len(dropped) >= 3:
                break
        channel_of(request).send(answer(-1), final=True)

    entry = serve(rig, endless)
    with start(rig, entry, 0) as call:
        stream = call.stream()
        next(stream)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert told.wait(30)
    all_slots_come_back(rig)
    assert len(rig.dispatcher.orphans) == 0
    with start(rig, entry, 0) as call:  # and closing the call, in the midst of the stream
        stream = call.stream()
        next(stream)
    all_slots_come_back(rig)


def test_a_blocked_send_is_released_by_a_cancel(rig_with) -> None:
    rig = rig_with(stream_credit=1)
    states: list[bool] = []

    def eager(request: Request) -> None:
        for i in range(3):
            channel_of(request).send(answer(i))
            states.append(request.cancelled)
        channel_of(request).send(None, final=True)

    entry = serve(rig, eager)
    with start(rig, entry, 0) as call:
        stream = call.stream()
        next(stream)
        until(lambda: len(states) == 1, "first answer")
        time.sleep(0.05)
        assert states == [False]
    until(lambda: len(states) == 3, "the model goes on")
    assert states == [False, True, True]
    all_slots_come_back(rig)


def test_a_reader_that_takes_nothing_loses_its_stream(rig_with) -> None:
    rig = rig_with(stream_credit=1)
    cancelled: list[bool] = []

    def eager(request: Request) -> None:
        for i in range(3):
            channel_of(request).send(answer(i))
        cancelled.append(request.cancelled)
        channel_of(request).send(None, final=True)

    entry = serve(rig, eager)
    with start(rig, entry, 0, timeout_s=2.0) as call:
        stream = call.stream()
        next(stream)
        until(lambda: cancelled == [True], "the model was not told")
        rest = list(stream)
    assert rest[-1].final
    assert isinstance(rest[-1].error, DeadlineExceeded)
    all_slots_come_back(rig)


def test_the_deadline_is_for_each_answer(rig: Rig) -> None:
    def slow(request: Request) -> None:
        last = request.inputs["IN"].numpy()[0]
        for i in range(6):
            time.sleep(0.0 if last else 0.4)
            channel_of(request).send(answer(i))
        if last:
            until(lambda: request.cancelled, "nobody gave up")
        channel_of(request).send(None, final=True)

    entry = serve(rig, slow)
    with start(rig, entry, 0, timeout_s=2.0) as call:
        assert first_elements(call) == list(range(6))
    with start(rig, entry, 1, timeout_s=2.0) as call:
        stream = call.stream()
        for _ in range(6):
            next(stream)
        with pytest.raises(DeadlineExceeded):
            next(stream)
    all_slots_come_back(rig)


def test_a_whole_stream_may_have_a_limit(rig_with) -> None:
    rig = rig_with(stream_timeout_s=0.5)

    def endless(request: Request) -> None:
        while not request.cancelled:
            channel_of(request).send(answer(0))
            time.sleep(0.02)
        channel_of(request).send(None, final=True)

    entry = serve(rig, endless)
    with start(rig, entry, 0) as call, pytest.raises(DeadlineExceeded, match="stream_timeout_s"):
        list(call.stream())
    all_slots_come_back(rig)


def test_a_queued_stream_that_is_cancelled_never_runs(rig: Rig) -> None:
    gate = threading.Event()
    ran: list[str] = []

    def slow(request: Request) -> None:
        ran.append(request.id)
        gate.wait(30)
        channel_of(request).send(None, final=True)

    entry = serve(rig, slow)
    with start(rig, entry, 0, request_id="first") as first:
        reader = threading.Thread(target=lambda: list(first.stream()))
        reader.start()
        until(lambda: ran == ["first"], "the first runs")
        gone = start(rig, entry, 0, request_id="second", on_wait=lambda: False)
        with gone as second, pytest.raises(Cancelled):
            next(second.stream())
        until(lambda: rig.executors[0].loop.queued == 0, "it is still queued")
        gate.set()
        reader.join()
    all_slots_come_back(rig)
    assert ran == ["first"]


def test_a_waiting_call_is_cancelled_at_once(rig: Rig) -> None:
    waits = threading.Event()

    def waiting(request: Request) -> None:
        waits.set()
        until(lambda: request.cancelled, "not told")
        channel_of(request).send(None, final=True)

    entry = serve(rig, waiting)
    with start(rig, entry, 0, cancellable=True) as call:
        reader = caller_that_sees(Cancelled, lambda: list(call.stream()))
        assert waits.wait(30)
        call.cancel()
        call.cancel()
        reader.join()
    call.cancel()  # when all is over
    all_slots_come_back(rig)
    with start(rig, entry, 0, cancellable=True) as call:  # and before it has begun
        call.cancel()
        with pytest.raises(Cancelled):
            next(call.stream())
    all_slots_come_back(rig)
    until(lambda: rig.dispatcher.executors.pools["x0"].in_flight == 0, "one counts for ever")


def test_a_model_that_raises_ends_its_stream(rig: Rig) -> None:
    def raising(request: Request) -> None:
        channel_of(request).send(answer(1))
        raise ValueError("/etc/secret")

    entry = serve(rig, raising)
    with start(rig, entry, 0) as call:
        first, last = list(call.stream())
    assert len(first.outputs) == 1
    assert last.final
    assert "secret" not in last.error.message
    all_slots_come_back(rig)


def test_sending_after_the_end_is_told_to_the_model(rig: Rig) -> None:
    errors: list[Exception] = []

    def talkative(request: Request) -> None:
        channel_of(request).send(None, final=True)
        for final in (False, True):
            try:
                channel_of(request).send(answer(1), final)
            except ProtocolViolation as ex:
                errors.append(ex)

    entry = serve(rig, talkative)
    for _ in range(2):
        with start(rig, entry, 0) as call:
            (only,) = list(call.stream())
            assert only.final
            assert only.error is None
    until(lambda: len(errors) == 4, "the model was not told")
    all_slots_come_back(rig)


def test_an_abandoned_stream_ends_with_an_error(rig: Rig) -> None:
    def forgetful(request: Request) -> None:
        channel_of(request).send(answer(1))
        channel_of(request).abandoned()

    entry = serve(rig, forgetful)
    with start(rig, entry, 0) as call:
        _, last = list(call.stream())
    assert "final response" in last.error.message
    all_slots_come_back(rig)


def test_inputs_that_the_model_still_looks_at_are_kept(rig: Rig) -> None:
    kept: list[Array] = []

    def keeper(request: Request) -> None:
        kept.append(request.inputs["IN"].numpy())
        channel_of(request).send(None, final=True)

    entry = serve(rig, keeper)
    with start(rig, entry, 7, 8, 9) as call:
        list(call.stream())
    assert slots_in_use(rig) == 1
    assert kept[0].tolist() == [7, 8, 9]
    kept.clear()
    all_slots_come_back(rig)  # without any further request


def test_offered_outputs_and_given_back_inputs(rig: Rig) -> None:
    def offering(request: Request) -> None:
        source = request.inputs["IN"].numpy()
        channel_of(request).send(Response((Output("OUT", "FP32", source[:1500]),)))
        for i in range(20):
            target = request.offer("OUT", "FP32", (2000,))
            target[:] = i
            channel_of(request).send(Response((Output("OUT", "FP32", target),)))
        request.offer("OUT", "FP32", (10,))  # and never used
        channel_of(request).send(None, final=True)

    entry = serve(rig, offering)
    array = np.arange(2000, dtype=np.float32)
    with start(rig, entry, *array) as call:
        seen = [np.frombuffer(bytes(o.outputs[0].view), np.float32) for o in call.stream()
                if o.outputs]  # fmt: skip
        assert call.receipt.copied_out == 0
    np.testing.assert_array_equal(seen[0], array[:1500])
    assert [float(x[0]) for x in seen[1:]] == list(range(20))
    all_slots_come_back(rig)


def test_an_executors_death_in_mid_stream(rig: Rig) -> None:
    told = threading.Event()

    def endless(request: Request) -> None:
        while not request.cancelled:
            channel_of(request).send(answer(0))
            time.sleep(0.01)
        told.set()
        channel_of(request).send(None, final=True)

    spec = msgspec.structs.replace(DECOUPLED, rerun=True)
    entry = rig.serve(endless, spec=spec)
    with start(rig, entry, 0) as call:
        stream = call.stream()
        next(stream)
        rig.cut_off()
        with pytest.raises(ExecutorLost):
            list(stream)
    assert told.wait(30)
    all_slots_come_back(rig)


def test_a_request_without_credit_is_refused(rig: Rig) -> None:
    entry = serve(rig, count_up)
    with start(rig, entry, 1) as call, pytest.raises(Exception, match="needs a stream"):
        call.execute()
    all_slots_come_back(rig)


def test_an_answer_too_long_to_send_is_replaced_by_its_error(rig: Rig) -> None:
    kept: list[Array] = []

    def wordy(request: Request) -> None:
        kept.append(request.inputs["IN"].numpy())
        channel_of(request).send(answer(1))
        for final in (False, True):
            channel_of(request).send(Response(parameters={"text": "x" * 200_000}), final)

    entry = serve(rig, wordy)
    with start(rig, entry, 5) as call:
        codes = [outcome.error.code if outcome.error else None for outcome in call.stream()]
    assert codes == [None, Code.INVALID_ARGUMENT, Code.INVALID_ARGUMENT]
    with start(rig, entry, 6) as call:
        list(call.stream())
    assert [array.tolist() for array in kept] == [[5], [6]]  # the kept arrays were not overwritten
    kept.clear()
    all_slots_come_back(rig)


def test_answers_that_do_not_fit_the_socket_wait_for_it(rig_with) -> None:
    """Parameters travel in the message: a reader that is behind must not stop the loop."""
    rig = rig_with(stream_credit=64)

    def wordy(request: Request) -> None:
        for i in range(60):
            channel_of(request).send(Response(parameters={"text": "x" * 50_000, "i": i}))
        channel_of(request).send(None, final=True)

    entry = serve(rig, wordy)
    with start(rig, entry, 0) as call, start(rig, entry, 0) as other:
        stream = call.stream()
        first = next(stream)
        assert len(list(other.stream())) == 61  # meanwhile other requests are served
        numbers = [first.parameters["i"], *(o.parameters["i"] for o in stream if o.parameters)]
    assert numbers == list(range(60))
    all_slots_come_back(rig)


def test_busy_means_that_nothing_moves(rig: Rig) -> None:
    gate = threading.Event()

    def pausing(request: Request) -> None:
        for i in range(8):
            channel_of(request).send(answer(i))
            time.sleep(0.1)
        gate.wait(30)
        channel_of(request).send(None, final=True)

    entry = serve(rig, pausing)
    status = rig.executors[0].status
    with start(rig, entry, 0) as call:
        stream = call.stream()
        begun = time.monotonic_ns()
        for _ in range(8):
            next(stream)
        until(lambda: status.busy_since > begun + 500_000_000, "busy since its last answer")
        gate.set()
        list(stream)
    until(lambda: status.busy_since == 0, "still busy")


def test_a_first_stream_is_busy_since_its_run_began(rig: Rig) -> None:
    gate = threading.Semaphore(0)

    def waiting(request: Request) -> None:
        channel_of(request).send(answer(0))
        assert gate.acquire(timeout=30)
        channel_of(request).send(None, final=True)

    entry = serve(rig, waiting)
    status = rig.executors[0].status
    for _ in range(2):
        before_ns = time.monotonic_ns()
        with start(rig, entry, 0) as call:
            stream = call.stream()
            next(stream)
            assert status.busy_since >= before_ns
            gate.release()
            list(stream)


def of_every_kind(request: Request) -> None:
    """IN: how many answers, of how many elements, and how it ends."""
    count, size, ending = (int(x) for x in request.inputs["IN"].numpy())
    ends: list[Callable[[], None]] = [
        lambda: channel_of(request).send(None, final=True),
        lambda: channel_of(request).send(answer(-1), final=True),
        lambda: channel_of(request).abandoned(),
        lambda: channel_of(request).fail(ModelFailure("on purpose")),
    ]

    def work() -> None:
        for i in range(count):
            channel_of(request).send(answer(i, size))
        ends[ending]()

    if size % 2:
        threading.Thread(target=work).start()
    else:
        work()


def read_at_random(rig: Rig, entry: ModelEntry, dice: random.Random) -> object:
    """Read one stream, perhaps not to the end; return a description of the error, if any."""
    count, ending = dice.randrange(40), dice.randrange(4)
    size, leave_at = dice.choice([1, 2, 999, 20_000]), dice.choice([3, 1000])
    seen: list[float] = []
    last = None
    with start(rig, entry, count, size, ending, cancellable=dice.random() < 0.5) as call:
        for outcome in call.stream():
            last = outcome
            if outcome.outputs:
                seen.append(float(np.frombuffer(outcome.outputs[0].view, np.float32)[-1]))
            if len(seen) >= leave_at:
                break
            time.sleep(0.02 * (dice.random() < 0.02))
    wanted = [*range(count), -1] if ending == 1 else list(range(count))
    if seen != wanted[:leave_at]:
        return wanted, seen
    if len(seen) < leave_at and (last is None or bool(last.error) != (ending > 1)):
        return ending, last
    return None


@pytest.mark.parametrize("seed", range(4))
def test_readers_of_every_kind_at_once(rig_with, seed: int) -> None:
    """Random sizes, pauses and ends on both sides: order is kept, everything comes back."""
    rig = rig_with(stream_credit=seed + 1, max_streams=5)
    entry = serve(rig, of_every_kind)
    wrong: list[object] = []

    def reader(number: int) -> None:
        dice = random.Random(1000 * seed + number)
        wrong.extend(read_at_random(rig, entry, dice) for _ in range(12))

    with ThreadPoolExecutor(8) as readers:
        list(readers.map(reader, range(8)))
    assert wrong == [None] * 96
    all_slots_come_back(rig)
    assert len(rig.dispatcher.orphans) == 0
    until(lambda: rig.dispatcher.executors.pools["x0"].in_flight == 0, "some count for ever")
