"""Batches over real sockets and shared memory: which requests meet, copies, attribution of
errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from shmserve.core.memory.slots import SlotState
from shmserve.core.stats.executor_counters import read
from shmserve.dispatch.calls.call import Call
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import InvalidArgument, ModelFailure, NotFound, QueueFull, ShmserveError
from shmserve.executor.backend import BatchForm, Output, Request, Response
from shmserve.executor.wrappers.ragged import RaggedBackend
from shmserve.tensor.config_document import (
    BatchingEntry,
    BatchOutputEntry,
    ConfigDocument,
    QueuePolicyEntry,
)
from shmserve.tensor.spec import ModelSpec, TensorSpec
from tests.unit.dispatch.test_dispatch import until
from tests.unit.rig import SPEC, FunctionBackend, Rig, feed

Array = np.ndarray[Any, Any]


def spec_of(batching: BatchingEntry, max_batch_size: int = 8) -> ModelSpec:
    return msgspec.structs.replace(
        SPEC,
        max_batch_size=max_batch_size,
        inputs=(TensorSpec("IN", "FP32", (-1, -1)),),
        outputs=(TensorSpec("OUT", "FP32", (-1, -1)),),
        config=ConfigDocument(max_batch_size=max_batch_size, dynamic_batching=batching),
    )


class Gate(FunctionBackend):
    """A model that waits for permission before each execution, and records its requests.

    `answer` makes the response to a request, which stands for several requests if stacked.
    """

    def __init__(
        self, answer: Callable[[Request], Response], batching: BatchForm = BatchForm.LISTED
    ) -> None:
        super().__init__(answer)
        self.batching = batching
        self.open = threading.Semaphore(0)
        self.entered = 0
        self.rows: list[list[int]] = []  # of each execution's requests

    def execute(self, requests: Sequence[Request]) -> list[Response]:
        self.entered += 1
        # Asking for `cancelled` makes the executor take in arrived messages.
        until(lambda: requests[0].cancelled or self.open.acquire(False), "nobody let it go on")
        self.rows.append([request.inputs["IN"].shape[0] for request in requests])
        return [self.model(request) for request in requests]


def doubled(request: Request) -> Response:
    given = request.inputs["IN"].numpy()
    out = request.offer("OUT", "FP32", given.shape)
    np.multiply(given, 2, out=out)
    return Response((Output("OUT", "FP32", out),))


def failed_with(result: object, kind: type[ShmserveError], message: str) -> bool:
    return isinstance(result, kind) and result.message == message


def own_doubled(request: Request) -> Response:
    return Response((Output("OUT", "FP32", request.inputs["IN"].numpy() * 2),))


class Clients:
    """Requests from separate threads; results by request number, in the order of completion. A
    result is the first output; `names` has the names of all outputs.

    block: True: the model is busy with a request of one row from the beginning.
    """

    def __init__(self, rig: Rig, spec: ModelSpec, gate: Gate, block: bool = True) -> None:
        self.rig = rig
        self.gate = gate
        self.entry = rig.serve(gate, spec=spec)  # type: ignore[arg-type]
        self.loop = rig.executors[0].loop
        self.results: dict[int, Array | ShmserveError] = {}
        self.names: dict[int, list[str]] = {}
        self.calls: dict[int, Call] = {}
        self.batch_bytes: dict[int, int] = {}
        self._threads: list[threading.Thread] = []
        if block:
            self.ask(-1, np.zeros((1, 1), np.float32))
            until(lambda: self.gate.entered == 1, "the model does not run")

    def ask(self, number: int, array: Array, **parameters: Any) -> None:
        thread = threading.Thread(target=self._run, args=(number, array, parameters))
        self._threads.append(thread)
        thread.start()

    def queue(self, *arrays: Array, first: int = 0, **parameters: Any) -> None:
        """Ask one after the other, each as soon as the previous request waits."""
        for number, array in enumerate(arrays, start=first):
            waiting = self.loop.queued
            self.ask(number, array, **parameters)
            until(lambda waiting=waiting: self.loop.queued > waiting, f"{number} is not queued")  # type: ignore[misc]

    def _run(self, number: int, array: Array, parameters: dict[str, Any]) -> None:
        owner, outputs = parameters.pop("owner", 0), parameters.pop("outputs", ())
        options = RunOptions(
            parameters=dict(parameters), sequence_owner=owner, outputs=tuple(outputs)
        )
        with self.rig.dispatcher.call(self.entry, options, cancellable=True) as call:
            self.calls[number] = call  # type: ignore[assignment]
            feed(call, array)
            try:
                outcome = call.execute()
                self.names[number] = [output.name for output in outcome.outputs]
                out = outcome.outputs[0]
                result = np.frombuffer(bytes(out.view), np.float32).reshape(out.shape)
                self.batch_bytes[number] = call.receipt.copied_batch
                self.results[number] = result
            except ShmserveError as ex:
                self.results[number] = ex

    def finish(self, executions: int = 50) -> None:
        self.gate.open.release(executions)
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def assert_no_slots(self) -> None:
        memory = self.rig.executors[0].memory

        def is_free() -> bool:  # the slots of small outputs are released with the next request
            self.rig.dispatcher.executors.flush()
            return memory.stats().slots == memory.stats().free

        until(is_free, "a slot is not given back")


def rows(count: int, width: int = 3, value: float = 1.0) -> Array:
    return np.full((count, width), value, np.float32)


PLAIN = BatchingEntry()
FLAT = ConfigDocument(
    batch_output=(BatchOutputEntry(("OUT",), "BATCH_SCATTER_WITH_INPUT_SHAPE", ("IN",)),)
)


@pytest.mark.parametrize("batching", [BatchForm.LISTED, BatchForm.STACKED])
@pytest.mark.parametrize("model", [doubled, own_doubled])
@pytest.mark.parametrize("width", [0, 3, 3000])
def test_what_waits_meets_in_one_execution(rig: Rig, batching, model, width) -> None:
    gate = Gate(model, batching)
    clients = Clients(rig, spec_of(PLAIN), gate)
    arrays = [rows(count, width, count) for count in (1, 3, 2)]
    clients.queue(*arrays)
    clients.finish()
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(clients.results[number], array * 2)
        gathered = array.nbytes if batching is BatchForm.STACKED else 0
        assert clients.batch_bytes[number] == gathered
    assert gate.rows == ([[1], [1, 3, 2]] if batching is BatchForm.LISTED else [[1], [6]])
    counts = read(rig.executors[0].status.counters)
    assert (counts.executions, counts.inferences, counts.requests) == (2, 7, 4)
    assert {size: values[0] for size, values in counts.batches.items()} == {1: 1, 6: 1}
    clients.assert_no_slots()


@pytest.mark.parametrize("form", [BatchForm.LISTED, BatchForm.STACKED])
@pytest.mark.parametrize("offers", [True, False])
def test_requests_for_different_outputs_share_a_batch(
    rig: Rig, form: BatchForm, offers: bool
) -> None:
    asked: list[tuple[str, ...]] = []

    def model(request: Request) -> Response:
        asked.append(request.requested)
        given, outputs = request.inputs["IN"].numpy(), []
        for name in request.requested:
            array = request.offer(name, "FP32", given.shape) if offers else given.copy()
            np.multiply(given, 2 if name == "OUT" else 3, out=array)
            outputs.append(Output(name, "FP32", array))
        return Response(tuple(outputs))

    spec = spec_of(PLAIN)
    three = msgspec.structs.replace(spec.outputs[0], name="THREE")
    gate = Gate(model, form)
    clients = Clients(rig, msgspec.structs.replace(spec, outputs=(*spec.outputs, three)), gate)
    wanted = [("OUT",), ("THREE",), (), ("THREE", "OUT")]
    for number, outputs in enumerate(wanted):
        clients.queue(rows(2, 3000, number), first=number, outputs=outputs)
    clients.finish()
    both = ("OUT", "THREE")
    each = [names or both for names in wanted]
    assert gate.rows[1:] == ([[2] * 4] if form is BatchForm.LISTED else [[8]])
    assert asked[1:] == (each if form is BatchForm.LISTED else [both])
    for number, names in enumerate(each):
        assert clients.names[number] == list(names)
        factor = 2 if names[0] == "OUT" else 3
        np.testing.assert_array_equal(clients.results[number], rows(2, 3000, number * factor))
    clients.assert_no_slots()


class RaggedGate(Gate):
    """A model that gets batches in one tensor through `batch_output`."""

    def execute(self, requests: Sequence[Request]) -> list[Response]:
        whole = Mock(execute=super().execute)
        return list(RaggedBackend(whole, FLAT, np).execute(requests))


@pytest.mark.parametrize("form", [BatchForm.STACKED, BatchForm.LISTED])
@pytest.mark.parametrize("failure", ["raised", "answered", "of another size"])
def test_an_output_that_fails_is_the_error_of_those_who_want_it(
    rig: Rig, form: BatchForm, failure: str
) -> None:
    """Listed: with `batch_output`, so the model gets one tensor as well."""

    def model(request: Request) -> Response:
        given = request.inputs["IN"].numpy()
        if "THREE" not in request.requested:
            return own_doubled(request)
        if failure == "raised":
            raise ModelFailure("no THREE")
        if failure == "answered":
            return Response(error=ModelFailure("no THREE"))
        return Response((Output("THREE", "FP32", given[1:]),))

    spec = spec_of(PLAIN)
    three = msgspec.structs.replace(spec.outputs[0], name="THREE")
    config = spec.config
    if form is BatchForm.LISTED:
        config = msgspec.structs.replace(config, batch_output=FLAT.batch_output)
    spec = msgspec.structs.replace(spec, outputs=(*spec.outputs, three), config=config)
    kind = Gate if form is BatchForm.STACKED else RaggedGate
    gate = kind(model, form)
    clients = Clients(rig, spec, gate, block=False)
    clients.ask(-1, rows(1), outputs=("OUT",))
    until(lambda: gate.entered == 1, "the model does not run")
    for number, outputs in enumerate([("OUT",), ("THREE",), ("OUT",)]):
        clients.queue(rows(2, 3000, number), first=number, outputs=outputs)
    clients.finish()
    assert gate.rows == [[1], [6], [2], [2], [2]]
    for number in (0, 2):
        np.testing.assert_array_equal(clients.results[number], rows(2, 3000, number * 2))
    has_failed = isinstance(clients.results[1], ShmserveError)
    assert has_failed or (form, failure) == (BatchForm.STACKED, "of another size")
    counts = read(rig.executors[0].status.counters)
    expected = (3, 5, 3) if has_failed else (4, 7, 4)
    assert (counts.executions, counts.inferences, counts.requests) == expected
    clients.assert_no_slots()


def test_who_has_left_a_failed_batch_does_not_run_again(rig: Rig) -> None:
    def model(request: Request) -> Response:
        if len(request.requested) > 1:
            clients.calls[0].cancel()
            until(lambda: not all(clients.loop._running.values()) or request.cancelled, "no")
            raise ModelFailure("not both")
        return own_doubled(request)

    spec = spec_of(PLAIN)
    three = msgspec.structs.replace(spec.outputs[0], name="THREE")
    gate = Gate(model, BatchForm.STACKED)
    spec = msgspec.structs.replace(spec, outputs=(*spec.outputs, three))
    clients = Clients(rig, spec, gate, block=False)
    clients.ask(-1, rows(1), outputs=("OUT",))
    until(lambda: gate.entered == 1, "the model does not run")
    clients.queue(rows(2), outputs=("THREE",))
    clients.queue(rows(3), first=1, outputs=("OUT",))
    clients.finish()
    assert gate.rows == [[1], [5], [3]]
    np.testing.assert_array_equal(clients.results[1], rows(3) * 2)
    clients.assert_no_slots()


def test_a_batch_is_not_larger_than_allowed_and_needs_equal_shapes(rig: Rig) -> None:
    gate = Gate(doubled)
    clients = Clients(rig, spec_of(PLAIN, max_batch_size=4), gate)
    clients.queue(rows(2), rows(2), rows(2), rows(1, 5), rows(1, 5))
    clients.finish()
    assert gate.rows == [[1], [2, 2], [2], [1, 1]]
    clients.assert_no_slots()


@pytest.mark.parametrize(
    ("form", "together"), [(BatchForm.LISTED, [1, 2]), (BatchForm.STACKED, [3])]
)
def test_a_list_has_sequences_of_one_owner_only(
    rig: Rig, form: BatchForm, together: list[int]
) -> None:
    """A model that calls others in the name of a sequence knows whose sequence."""
    gate = Gate(own_doubled, form)
    clients = Clients(rig, spec_of(PLAIN), gate)
    clients.queue(rows(1), sequence_id=5, owner=1)
    clients.queue(rows(1), rows(1), first=1, sequence_id=5, owner=2)
    clients.finish()
    assert [sum(each) for each in gate.rows] == [1, *together]


def test_an_error_of_one_is_that_ones_only(rig: Rig) -> None:
    def model(request: Request) -> Response:
        if request.inputs["IN"].numpy()[0, 0] == 13:
            return Response(error=ModelFailure("unlucky"))
        return doubled(request)

    clients = Clients(rig, spec_of(PLAIN), Gate(model))
    clients.queue(rows(1), rows(1, value=13), rows(1))
    clients.finish()
    assert failed_with(clients.results[1], ModelFailure, "unlucky")
    assert all(isinstance(clients.results[number], np.ndarray) for number in (0, 2))
    clients.assert_no_slots()


class Streaming(Gate):
    def execute(self, requests: Sequence[Request]) -> list[Response]:
        for request, response in zip(requests, super().execute(requests), strict=True):
            request.responses.send(response, final=True)
        return []


def test_a_decoupled_model_gets_one_request_at_a_time(rig: Rig) -> None:
    gate = Streaming(doubled)
    entry = rig.serve(gate, spec=msgspec.structs.replace(spec_of(PLAIN), decoupled=True))  # type: ignore[arg-type]

    def ask(_: int) -> int:
        with rig.dispatcher.call(entry) as call:
            feed(call, rows(1))
            return sum(1 for _ in call.stream())

    with ThreadPoolExecutor(3) as threads:
        answers = threads.map(ask, range(3))
        until(lambda: gate.entered == 1 and rig.executors[0].loop.queued >= 2, "two do not wait")
        gate.open.release(3)
        assert list(answers) == [1, 1, 1]
    assert gate.rows == [[1], [1], [1]]


@pytest.mark.parametrize("batching", [BatchForm.LISTED, BatchForm.STACKED])
def test_what_the_model_raises_is_everybodys_error(rig: Rig, batching: BatchForm) -> None:
    def model(request: Request) -> Response:
        request.offer("OUT", "FP32", (4, 4))
        if request.inputs["IN"].numpy()[0, 0]:
            raise ModelFailure("no")
        return doubled(request)

    clients = Clients(rig, spec_of(PLAIN), Gate(model, batching))
    clients.queue(rows(1), rows(1))
    clients.finish()
    assert [getattr(clients.results[n], "message", "") for n in (-1, 0, 1)] == ["", "no", "no"]
    clients.assert_no_slots()


@pytest.mark.parametrize("answered", [False, True])
def test_values_that_the_model_refuses_are_the_error_of_their_request(
    rig: Rig, answered: bool
) -> None:
    def model(request: Request) -> Response:
        if (request.inputs["IN"].numpy() > 1).any():
            if answered:
                return Response(error=InvalidArgument("too large"))
            raise InvalidArgument("too large")
        return own_doubled(request)

    gate = Gate(model, BatchForm.STACKED)
    clients = Clients(rig, spec_of(PLAIN), gate)
    clients.queue(rows(2), rows(3, value=5), rows(1))
    clients.finish()
    assert gate.rows == [[1], [6], [2], [3], [1]]
    assert failed_with(clients.results[1], InvalidArgument, "too large")
    for number, count in ((0, 2), (2, 1)):
        np.testing.assert_array_equal(clients.results[number], rows(count) * 2)
    clients.assert_no_slots()


@pytest.mark.parametrize("lacking", ["response", "rows"])
def test_answers_that_are_missing_are_errors(rig: Rig, lacking: str) -> None:
    class Short(Gate):
        def execute(self, requests: Sequence[Request]) -> list[Response]:
            responses = super().execute(requests)
            if len(self.rows) == 1:
                return responses
            if lacking == "response":
                return responses[:-1]
            (output,) = responses[0].outputs
            return [Response((msgspec.structs.replace(output, array=output.array[1:]),))]

    batching = BatchForm.LISTED if lacking == "response" else BatchForm.STACKED
    clients = Clients(rig, spec_of(PLAIN), Short(doubled, batching))
    clients.queue(rows(1), rows(1))
    clients.finish()
    expected = (
        "the model gave 1 responses to 2 requests"
        if lacking == "response"
        else "output 'OUT' has shape [1, 3], but the batch has 2 rows"
    )
    assert [getattr(clients.results[n], "message", "") for n in (0, 1)] == [expected] * 2
    clients.assert_no_slots()


@pytest.mark.parametrize("what", ["input", "output"])
def test_a_batch_that_the_model_keeps_stays_as_it_is(rig: Rig, what: str) -> None:
    kept: list[Array] = []

    def model(request: Request) -> Response:
        given = request.inputs["IN"].numpy()
        out = request.offer("OUT", "FP32", given.shape)
        np.multiply(given, 2, out=out)
        if len(given) > 1:
            kept.append(given if what == "input" else out)
        return Response((Output("OUT", "FP32", out),))

    clients = Clients(rig, spec_of(PLAIN), Gate(model, BatchForm.STACKED))
    clients.queue(rows(2, 3000), rows(3, 3000))
    clients.finish()
    memory = rig.executors[0].memory

    def is_only_held() -> bool:
        rig.dispatcher.executors.flush()
        return memory.stats().leased == 1

    until(is_only_held, "the slot is not held")
    assert [s.state for s in memory._arena.slots()] == [SlotState.LEASED]
    np.testing.assert_array_equal(kept[0], rows(5, 3000, 1 if what == "input" else 2))
    kept.clear()
    clients.assert_no_slots()


def test_what_is_cancelled_before_it_began_never_runs(rig: Rig) -> None:
    gate = Gate(doubled)
    clients = Clients(rig, spec_of(PLAIN), gate)
    clients.queue(rows(1), rows(2), rows(3))
    clients.calls[1].cancel()
    until(lambda: clients.loop.queued == 2, "the cancelled one waits still")
    clients.finish()
    assert gate.rows == [[1], [1, 3]]
    clients.assert_no_slots()


def test_a_small_batch_waits_for_company(rig: Rig) -> None:
    for delay_s, requests in ((0.3, 1), (20.0, 2)):
        batching = BatchingEntry(max_queue_delay_microseconds=int(delay_s * 1e6))
        gate = Gate(doubled)
        gate.open.release(100)
        clients = Clients(rig, spec_of(batching, max_batch_size=2), gate, block=False)
        begun = time.monotonic()
        for number in range(requests):
            clients.ask(number, rows(1))
        clients.finish()
        assert gate.rows == [[1] * requests]
        assert requests > 1 or time.monotonic() - begun >= delay_s


def test_urgent_requests_run_first(rig: Rig) -> None:
    batching = BatchingEntry(priority_levels=3, default_priority_level=2)
    order: list[float] = []

    def model(request: Request) -> Response:
        order.append(float(request.inputs["IN"].numpy()[0, 0]))
        return doubled(request)

    clients = Clients(rig, spec_of(batching, max_batch_size=1), Gate(model))
    clients.queue(rows(1, value=3), first=3, priority=3)
    clients.queue(rows(1, value=2), first=2)
    clients.queue(rows(1, value=1), first=1, priority=1)
    clients.finish()
    assert order == [0, 1, 2, 3]


def test_a_full_queue_refuses_at_once(rig: Rig) -> None:
    batching = BatchingEntry(default_queue_policy=QueuePolicyEntry(max_queue_size=2))
    gate = Gate(doubled)
    clients = Clients(rig, spec_of(batching), gate)
    clients.queue(rows(1), rows(1))
    clients.ask(2, rows(1))
    until(lambda: 2 in clients.results, "it is not refused while the model runs")
    full = "[request id: <id_unknown>] Exceeds maximum queue size"
    assert failed_with(clients.results[2], QueueFull, full)
    clients.finish()
    assert gate.rows == [[1], [1, 1]]
    clients.assert_no_slots()


@pytest.mark.parametrize("action", ["REJECT", "DELAY"])
def test_who_waits_too_long(rig: Rig, action: str) -> None:
    policy = QueuePolicyEntry(action, 60_000_000, True)
    gate = Gate(doubled)
    clients = Clients(rig, spec_of(BatchingEntry(default_queue_policy=policy)), gate)
    if action == "REJECT":
        clients.ask(0, rows(1), timeout=100_000)
        until(lambda: 0 in clients.results, "it is not rejected while the model runs")
        assert failed_with(clients.results[0], QueueFull, "Request timeout expired")
        clients.queue(rows(2), first=1)
    else:
        clients.queue(rows(1), timeout=100_000)
        clients.queue(rows(2), first=1)
        time.sleep(0.2)
    clients.finish()
    assert gate.rows == [[1], [2] if action == "REJECT" else [2, 1]]
    clients.assert_no_slots()


def test_what_was_taken_is_answered_when_the_loop_stops(rig: Rig) -> None:
    batching = BatchingEntry(max_queue_delay_microseconds=60_000_000)
    gate = Gate(doubled)
    gate.open.release(100)
    clients = Clients(rig, spec_of(batching), gate, block=False)
    clients.queue(rows(1), rows(2))
    clients.loop.stop()
    clients.finish()
    assert gate.rows == [[1, 2]]
    assert not any(isinstance(result, Exception) for result in clients.results.values())


@pytest.mark.parametrize("batching", [BatchForm.LISTED, BatchForm.STACKED])
def test_client_memory_that_is_gone_is_its_own_clients_trouble(rig, batching, monkeypatch) -> None:
    gate = Gate(doubled, batching)
    clients = Clients(rig, spec_of(PLAIN, max_batch_size=16), gate)
    workspace = clients.loop._workspace
    name = "copy_input" if batching is BatchForm.STACKED else "read"
    ordinary = getattr(workspace, name)

    def without_seven(*arguments: Any) -> Any:
        described = arguments[1]
        tensors = getattr(described, "inputs", (described,))
        if tensors[0].shape[0] == 7:
            raise InvalidArgument("gone")
        return ordinary(*arguments)

    monkeypatch.setattr(workspace, name, without_seven)
    clients.queue(rows(2, value=2), rows(7), rows(3, value=3))
    gate.open.release(50)
    clients.finish()
    assert getattr(clients.results[1], "message", "") == "gone"
    for number, count in ((0, 2), (2, 3)):
        np.testing.assert_array_equal(clients.results[number], rows(count, value=2 * count))
    clients.assert_no_slots()


def test_a_request_without_memory_does_not_spoil_who_runs_again(rig: Rig, monkeypatch) -> None:
    def model(request: Request) -> Response:
        if (request.inputs["IN"].numpy() > 4).any():
            raise InvalidArgument("too large")
        return own_doubled(request)

    clients = Clients(rig, spec_of(PLAIN, max_batch_size=16), Gate(model, BatchForm.STACKED))
    workspace = clients.loop._workspace
    ordinary = workspace.copy_input

    def without_seven(frontend: Any, tensor: Any, target: memoryview) -> None:
        if tensor.shape[0] == 7:
            raise NotFound("gone")
        ordinary(frontend, tensor, target)

    monkeypatch.setattr(workspace, "copy_input", without_seven)
    clients.queue(rows(2, value=2), rows(7), rows(3, value=5))
    clients.finish()
    assert failed_with(clients.results[1], NotFound, "gone")
    assert failed_with(clients.results[2], InvalidArgument, "too large")
    np.testing.assert_array_equal(clients.results[0], rows(2, value=4))
    clients.assert_no_slots()
