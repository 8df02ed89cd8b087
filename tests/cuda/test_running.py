"""Execution of requests on a device: copies to and from the device, and counts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from shmserve.core.region_kinds import CUDA
from shmserve.core.registry import Region
from shmserve.core.stats.executor_counters import NWORDS
from shmserve.cuda.runtime import no_memory
from shmserve.errors import Code
from shmserve.executor.backend import Output, Request, Response
from shmserve.executor.devices import Devices
from shmserve.executor.loop.request_runner import RequestRunner
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.peers.frontend_connections import FrontendConnection, FrontendProcess
from shmserve.executor.tensors.mapped_regions import ClientRegions
from shmserve.executor.tensors.workspace import Workspace
from shmserve.executor.wrappers.sequence_backend import _own
from shmserve.protocol.control.data_messages import (
    Answer,
    Execute,
    OutputPlace,
    RegionRef,
    WireTensor,
)
from shmserve.protocol.control.region_messages import RegionGiven, RegionsClosed
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.peer_segments import PeerSegments
from tests.cuda.exporting import exported
from tests.unit.rig import SPEC, FunctionBackend, Unlimited

COUNT = 1024
NBYTES = 4 * COUNT
NUMBERS = np.arange(COUNT, dtype=np.float32)


class Desk:
    """A coordinator that knows some CUDA regions."""

    def __init__(self) -> None:
        self.regions: dict[int, Region] = {}
        self.gone = False  # True: the region is unregistered when an executor asks
        self.sent: list[object] = []

    def ask(self, make: Callable[[int, bool], Any], timeout_s: float) -> tuple[Any, list[int]]:
        question = make(1, False)
        return RegionGiven(1, self.regions[question.number], self.gone), []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def add(self, number: int, handle: bytes, device: int = 0, nbytes: int = NBYTES) -> None:
        self.regions[number] = Region(
            f"r{number}", number, "", 0, nbytes, 0, kind=CUDA, device_id=device, handle=handle
        )


class Bench:
    """Runner of an executor and one frontend, without sockets."""

    def __init__(
        self, model: Callable[[Request], Response | None], ordinal: int | None = 0
    ) -> None:
        mappings = Mappings()
        self.desk = Desk()
        self.devices = Devices(ordinal, mappings)
        self.memory = ArenaMemory(
            Unlimited(), lambda: "cafe0123", lambda: 1 << 20, mappings=mappings
        )
        self.theirs = ArenaMemory(Unlimited(), lambda: "cafe0123", lambda: 1 << 20)
        self.frontend = FrontendProcess("http-1", mappings)
        self.ours = PeerSegments()
        self.following: tuple[FrontendConnection, Execute] | None = None
        backend = FunctionBackend(model)
        backend.reads_on_device = ordinal is not None
        self.regions = ClientRegions(self.desk, self.devices)
        self.workspace = Workspace(SPEC, self.memory, self.regions)
        self.statistics = RunStatistics([0] * NWORDS, SPEC)  # type: ignore[arg-type]
        connection: Any = SimpleNamespace(frontend=self.frontend)
        self.connection: FrontendConnection = connection
        self.runner = RequestRunner(
            backend, self.workspace, self.statistics, lambda *_: False, lambda: self.following
        )

    def slot(self, values: np.ndarray[Any, Any]) -> WireTensor:
        """An input in a slot of the frontend's."""
        slot = self.theirs.reserve(values.nbytes)
        slot.view[:] = values.tobytes()
        at = self.theirs.seal_and_lease(slot)
        offers, fds = self.theirs.offers([slot.segment], set())
        self.frontend.segments.accept(offers, fds)
        return WireTensor("IN", "FP32", values.shape, at)

    def message(self, tensor: WireTensor, place: RegionRef | None = None) -> Execute:
        places = (OutputPlace("OUT", place),) if place is not None else ()
        return Execute(1, "", (tensor,), (), {}, 0, 0, places=places)

    def run(self, message: Execute) -> Answer:
        (outcome,) = self.runner.run([(self.connection, message)], 0)
        assert outcome.answer is not None
        self.ours.accept(*self.memory.offers(outcome.segments, set()))
        return outcome.answer

    def result(self, answer: Answer) -> np.ndarray[Any, Any]:
        """Return the output as the frontend reads it."""
        assert not answer.error_code, answer.error
        at = answer.outputs[0].at
        return np.frombuffer(self.ours.view(at), np.float32)  # type: ignore[arg-type]

    def close(self) -> None:
        self.memory.close()
        self.theirs.close()


@pytest.fixture
def bench(cupy: Any) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*arguments: Any) -> Bench:
        made.append(Bench(*arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def add_one(request: Request) -> Response:
    return answered(request.inputs["IN"].on_device() + 1)


def add_one_in_place(request: Request) -> Response:
    source = request.inputs["IN"].on_device()
    target = request.offer_on_device("OUT", "FP32", source.shape)
    target[...] = source + 1
    return answered(target)


def add_one_on_host(request: Request) -> Response:
    return answered(request.inputs["IN"].numpy() + 1)


def add_one_on_a_stream_of_its_own(request: Request) -> Response:
    import cupy

    source = request.inputs["IN"].on_device()
    cupy.cuda.Stream.null.synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        return answered(source + 1)


def answered(array: Any) -> Response:
    return Response((Output("OUT", "FP32", array),))


def region(first: int = 0) -> RegionRef:
    return RegionRef(1, first, NBYTES - first)


def test_from_slot_to_slot_is_one_copy_each_way(bench: Callable[..., Bench]) -> None:
    one = bench(add_one)
    answer = one.run(one.message(one.slot(NUMBERS)))
    assert np.array_equal(one.result(answer), NUMBERS + 1)
    assert (answer.copied.inputs, answer.copied.out, answer.copied.device) == (0, 0, 2 * NBYTES)


def test_a_model_may_have_its_own_stream(bench: Callable[..., Bench]) -> None:
    one = bench(add_one_on_a_stream_of_its_own)
    for _ in range(5):
        answer = one.run(one.message(one.slot(NUMBERS)))
        assert np.array_equal(one.result(answer), NUMBERS + 1)


@pytest.mark.parametrize("model", [add_one, add_one_in_place], ids=["own", "offered"])
def test_from_region_to_region(
    model: Callable[[Request], Response],
    bench: Callable[..., Bench],
    cuda_environment: dict[str, str],
) -> None:
    one = bench(model)
    with (
        exported(cuda_environment) as (source, _),
        exported(cuda_environment, first=500) as (target, _),
    ):
        one.desk.add(1, source)
        one.desk.add(2, target)
        tensor = WireTensor("IN", "FP32", (COUNT,), region())
        answer = one.run(one.message(tensor, RegionRef(2, 0, NBYTES)))
        assert not answer.error_code, answer.error
        moved = 0 if model is add_one_in_place else NBYTES
        assert (answer.copied.inputs, answer.copied.out, answer.copied.device) == (0, 0, moved)
        assert answer.outputs[0].at == RegionRef(2, 0, NBYTES)
        assert np.array_equal(read(one, 2), NUMBERS + 1)
        one.regions.clear()
    gc.collect()


def test_a_part_of_an_input_moves_within_its_region(
    bench: Callable[..., Bench], cuda_environment: dict[str, str]
) -> None:
    one = bench(lambda request: answered(request.inputs["IN"].on_device()[:-1]))
    with exported(cuda_environment) as (handle, _):
        one.desk.add(1, handle)
        tensor = WireTensor("IN", "FP32", (COUNT,), region())
        answer = one.run(one.message(tensor, region(4)))
        assert answer.copied.device == NBYTES - 4
        assert np.array_equal(read(one, 1)[1:], NUMBERS[:-1])
        one.regions.clear()


def read(one: Bench, number: int) -> np.ndarray[Any, Any]:
    """Return the current contents of a region."""
    _, imported = one.devices.import_region(one.desk.regions[number])
    device = one.devices.open()
    array = device.array_at(imported.address, (COUNT,), np.dtype(np.float32), imported, 0)
    return np.asarray(array.get())


def test_a_model_that_writes_into_its_inputs_is_given_a_copy(
    bench: Callable[..., Bench], cuda_environment: dict[str, str]
) -> None:
    def model(request: Request) -> Response:
        source = request.inputs["IN"].private_on_device()
        source += 1
        return answered(source)

    one = bench(model)
    with exported(cuda_environment) as (handle, _):
        one.desk.add(1, handle)
        for tensor in (WireTensor("IN", "FP32", (COUNT,), region()), one.slot(NUMBERS)):
            answer = one.run(one.message(tensor))
            assert np.array_equal(one.result(answer), NUMBERS + 1)
            assert answer.copied.device == 2 * NBYTES
        assert np.array_equal(read(one, 1), NUMBERS)
        one.regions.clear()


def test_it_is_told_when_memory_of_a_region_that_is_no_more_is_closed(
    bench: Callable[..., Bench], cuda_environment: dict[str, str]
) -> None:
    one = bench(add_one)
    regions = one.regions
    with exported(cuda_environment) as (handle, _):
        one.desk.add(1, handle)
        one.run(one.message(WireTensor("IN", "FP32", (COUNT,), region())))
        assert one.desk.sent == []
        regions.forget([1])
        assert one.desk.sent == [RegionsClosed((1,))]
        one.desk.add(2, handle)
        one.desk.gone = True  # so the import serves this request alone
        one.run(one.message(WireTensor("IN", "FP32", (COUNT,), RegionRef(2, 0, NBYTES))))
        regions.tell_closed()
        assert one.desk.sent[1:] == [RegionsClosed((2,))]


def test_a_model_on_the_host_is_given_copies(
    bench: Callable[..., Bench], cuda_environment: dict[str, str]
) -> None:
    one = bench(add_one_on_host, None)
    with exported(cuda_environment) as (handle, _):
        one.desk.add(1, handle)
        tensor = WireTensor("IN", "FP32", (COUNT,), region())
        answer = one.run(one.message(tensor, region()))
        assert not answer.error_code, answer.error
        assert answer.copied.device == 2 * NBYTES
        assert np.array_equal(read(one, 1), NUMBERS + 1)
        one.regions.clear()


@pytest.mark.parametrize("offset", [2, 4, 16], ids=str)
def test_a_window_that_is_not_aligned_is_copied_first(
    bench: Callable[..., Bench], cuda_environment: dict[str, str], offset: int
) -> None:
    """Kernels may read more than one element at once, so windows must be aligned to that size."""
    one = bench(add_one)
    with exported(cuda_environment) as (handle, _):
        one.desk.add(1, handle)
        tensor = WireTensor("IN", "FP32", (2,), RegionRef(1, offset, 8))
        answer = one.run(one.message(tensor))
        shifted = np.frombuffer(NUMBERS.tobytes()[offset : offset + 8], np.float32)
        assert np.array_equal(one.result(answer), shifted + 1)
        assert answer.copied.device == (8 if offset == 16 else 8 + 8)
        one.regions.clear()


def test_bytes_in_a_cuda_region_are_parsed_on_the_host(
    bench: Callable[..., Bench], cuda_environment: dict[str, str]
) -> None:
    seen: list[Any] = []

    def model(request: Request) -> Response:
        seen.append(request.inputs["IN"].numpy().tolist())
        return answered(NUMBERS)

    one = bench(model)
    with exported(cuda_environment) as (handle, _):  # 0.0: four bytes of zero, a length
        one.desk.add(1, handle)
        one.run(one.message(WireTensor("IN", "BYTES", (1,), RegionRef(1, 0, 4))))
        assert seen == [[b""]]
        answer = one.run(one.message(WireTensor("IN", "BYTES", (1,), RegionRef(1, 4, 4))))
        assert answer.error_code == Code.INVALID_ARGUMENT
        assert "incomplete string data" in answer.error
        one.regions.clear()


def test_the_next_request_is_brought_while_this_one_runs(
    bench: Callable[..., Bench], cupy: Any
) -> None:
    brought: list[float] = []
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()

    def model(request: Request) -> Response:
        brought.append(pool.used_bytes() - before)
        return add_one(request)

    one = bench(model)
    first, second = one.message(one.slot(NUMBERS)), one.message(one.slot(NUMBERS * 2))
    one.following = (one.connection, second)
    assert np.array_equal(one.result(one.run(first)), NUMBERS + 1)
    one.following = None
    assert brought[0] >= 2 * NBYTES  # both inputs are on the device before the model has begun
    answer = one.run(second)
    assert np.array_equal(one.result(answer), NUMBERS * 2 + 1)
    assert answer.copied.device == 2 * NBYTES


def test_a_next_request_that_never_comes_costs_nothing(
    bench: Callable[..., Bench], cupy: Any
) -> None:
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    one = bench(add_one)
    cancelled = one.message(one.slot(NUMBERS * 2))
    one.following = (one.connection, cancelled)
    one.run(one.message(one.slot(NUMBERS)))
    one.following = None
    other = one.run(one.message(one.slot(NUMBERS * 3)))
    assert np.array_equal(one.result(other), NUMBERS * 3 + 1)
    gc.collect()
    assert pool.used_bytes() <= before


@pytest.mark.fake_cuda
@pytest.mark.parametrize("end", ["dropped", "refused"])
def test_what_is_brought_in_vain_has_arrived_when_it_is_given_up(
    end: str, bench: Callable[..., Bench]
) -> None:
    """After that, the owner of the source memory may change it."""
    one = bench(add_one)
    queues = one.devices.open().cupy._queues
    if end == "dropped":
        one.following = (one.connection, one.message(one.slot(NUMBERS * 2)))
        one.runner._inputs_on_device(one.frontend, one.message(one.slot(NUMBERS)))
        one.runner.rest()
    else:
        one.desk.add(9, b"x" * 64)
        assert one.run(one.message(one.slot(NUMBERS), RegionRef(9, 0, NBYTES))).error_code
    assert not any(queue.operations for queue in queues._queues.values())
    gc.collect()
    assert one.devices.open().cupy.get_default_memory_pool().used_bytes() == 0


def test_what_is_wrong_with_the_next_request_is_its_own_affair(bench: Callable[..., Bench]) -> None:
    one = bench(add_one)
    good = one.message(one.slot(NUMBERS))
    bad = one.message(WireTensor("IN", "FP32", (COUNT,), RegionRef(9, 0, NBYTES)))
    one.desk.add(9, b"x" * 64)
    one.following = (one.connection, bad)
    assert np.array_equal(one.result(one.run(good)), NUMBERS + 1)
    # an unregistration need not wait for this executor
    assert one.desk.sent == [RegionsClosed((9,))]
    answer = one.run(bad)
    assert answer.error_code == Code.INVALID_ARGUMENT
    assert "'r9' cannot be opened" in answer.error
    assert "server's user in its PID namespace" in answer.error


@pytest.mark.fake_cuda
def test_a_lost_device_fails_the_request_and_is_noticed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_CUDA_BROKEN", str(tmp_path / "broken"))
    one = request.getfixturevalue("bench")(add_one)
    assert not one.run(one.message(one.slot(NUMBERS))).error_code
    (tmp_path / "broken").touch()
    answer = one.run(one.message(one.slot(NUMBERS)))
    assert answer.error_code == Code.INTERNAL
    assert "cudaErrorIllegalAddress" in answer.error
    assert answer.outputs == ()
    assert one.devices.open().lost


@pytest.mark.fake_cuda
def test_too_large_for_the_device(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Memory that torch caches is freed, so that the next request may fit."""
    emptied: list[bool] = []
    torch = SimpleNamespace(cuda=SimpleNamespace(empty_cache=lambda: emptied.append(True)))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(NBYTES + 512))
    one = request.getfixturevalue("bench")(add_one_in_place)
    answer = one.run(one.message(one.slot(NUMBERS)))
    assert answer.error_code == Code.RESOURCE_EXHAUSTED
    assert "CUDA device 0 has no memory left" in answer.error
    assert emptied
    assert not one.devices.open().lost


@pytest.mark.fake_cuda
def test_a_model_that_lacks_memory_has_the_device_for_itself(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The input and output of the model fit, but not together with the input of the next
    request."""

    def model(request: Request) -> Response:
        target = request.offer_on_device("OUT", "FP32", (COUNT,))
        target[...] = request.inputs["IN"].on_device()
        return answered(target)

    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(2 * NBYTES + 2048))
    one = request.getfixturevalue("bench")(model)
    first, second, third = (one.message(one.slot(NUMBERS * n)) for n in range(3))
    one.following = (one.connection, second)
    assert one.run(first).error_code == Code.RESOURCE_EXHAUSTED
    one.following = (one.connection, third)
    assert np.array_equal(one.result(one.run(second)), NUMBERS)
    one.following = None
    assert np.array_equal(one.result(one.run(third)), NUMBERS * 2)


@pytest.mark.fake_only
@pytest.mark.fake_cuda
@pytest.mark.parametrize("inputs", [0, 1, 2])
def test_what_cupy_has_no_use_for_is_there_for_others(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, inputs: int
) -> None:
    """Other libraries, such as torch. Of a next request with two inputs only one input fits, so
    none is copied."""
    pool = request.getfixturevalue("fake_cupy").get_default_memory_pool()
    # bytes in use at the time of the call; later use is lower, because CuPy keeps the rest
    freed: list[int] = []
    monkeypatch.setattr(type(pool), "free_all_blocks", lambda *_: freed.append(pool.used_bytes()))
    kept: list[int] = []

    def model(request: Request) -> Response:
        request.inputs["IN"].on_device()
        kept.append(freed[-1] - pool.used_bytes() if freed else 0)
        return Response(error=no_memory(0, "request"))

    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(2 * NBYTES + 2048))
    one = request.getfixturevalue("bench")(model)
    first, second = (one.message(one.slot(NUMBERS)) for _ in range(2))
    more = structs.replace(one.slot(NUMBERS), name="MORE")
    following = structs.replace(second, inputs=(*second.inputs, more)[:inputs])
    one.following = (one.connection, following) if inputs else None
    one.run(first)
    assert freed
    one.following = None
    one.run(second)
    assert kept == [0, 0]


def test_what_cannot_be_placed_fails_its_request_alone(bench: Callable[..., Bench]) -> None:
    one = bench(lambda request: answered(object()), None)
    for _ in range(2):
        answer = one.run(one.message(one.slot(NUMBERS)))
        assert answer.error_code == Code.INTERNAL


@pytest.mark.fake_cuda  # the machine may have only one device
@pytest.mark.parametrize("ordinal", [0, None], ids=["gpu", "cpu"])
def test_outputs_lie_on_one_device(bench: Callable[..., Bench], ordinal: int | None) -> None:
    """The instance's device. For an instance on the CPU whose model uses GPUs itself, the device
    of the first output."""

    def model(request: Request) -> Response:
        import cupy

        with cupy.cuda.Device(int(request.id)):
            return answered(cupy.asarray(NUMBERS) + 1)

    one = bench(model, ordinal)
    first, second = ("0", "1") if ordinal == 0 else ("1", "0")
    for number in (first, second, first):
        answer = one.run(structs.replace(one.message(one.slot(NUMBERS)), id=number))
        if number == first:
            assert np.array_equal(one.result(answer), NUMBERS + 1)
        else:
            assert answer.error_code == Code.INTERNAL
            assert answer.error == (
                f"output 'OUT' lies on CUDA device {second}, "
                f"but the outputs of this instance must lie on device {first}"
            )


def test_a_state_that_a_model_made_on_a_stream_of_its_own_is_whole(cupy: Any) -> None:
    source = cupy.asarray(NUMBERS)
    cupy.cuda.Stream.null.synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        made = source + 1
    assert np.array_equal(_own(made), NUMBERS + 1)
