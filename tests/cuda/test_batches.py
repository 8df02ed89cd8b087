"""Batches on a device: rows of each request are copied from their place, and results are views."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from shmserve.errors import Code
from shmserve.executor.backend import BatchForm, Output, Request, Response
from shmserve.executor.loop.batch_runner import BatchMember, BatchRunner
from shmserve.protocol.control.data_messages import Execute, RegionRef, WireTensor
from tests.cuda.exporting import exported
from tests.cuda.test_running import NBYTES, Bench
from tests.unit.rig import FunctionBackend

WIDTH = 1 << 14  # elements of a row: worth pinning
Array = np.ndarray[Any, Any]


class BatchBench(Bench):
    """Batch runner of an executor, with one frontend."""

    def __init__(self, model: Callable[[Request], Response]) -> None:
        super().__init__(model)
        self.shapes: list[tuple[int, ...]] = []

        def watched(request: Request) -> Response:
            self.shapes.append(request.inputs["IN"].shape)
            return model(request)

        backend = FunctionBackend(watched)
        backend.reads_on_device = True
        backend.batching = BatchForm.STACKED
        self.batches = BatchRunner(
            backend, self.workspace, self.statistics, lambda *_: False, nullcontext()
        )

    def run_batch(self, *tensors: WireTensor) -> Sequence[BatchMember]:
        connection: Any = Mock(frontend=self.frontend)
        batch = [
            (connection, Execute(number, "", (tensor,), (), {}, 0, 0))
            for number, tensor in enumerate(tensors, 1)
        ]
        members = self.batches.run(batch, 0)
        for member in members:
            self.ours.accept(*self.memory.offers(member.segments, set()))
        return members

    def values(self, member: BatchMember) -> Array:
        """Return the output as the frontend reads it."""
        return self.result(member.answer).reshape(member.answer.outputs[0].shape)


@pytest.fixture
def make(cupy: Any) -> Iterator[Callable[[Callable[[Request], Response]], BatchBench]]:
    made: list[BatchBench] = []

    def make(model: Callable[[Request], Response]) -> BatchBench:
        made.append(BatchBench(model))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


Make = Callable[[Callable[[Request], Response]], BatchBench]


def doubled(request: Request) -> Response:
    return Response((Output("OUT", "FP32", request.inputs["IN"].on_device() * 2),))


def rows(count: int, first: int, width: int = WIDTH) -> Array:
    return (np.arange(count * width, dtype=np.float32) + first).reshape(count, width)


@pytest.mark.fake_cuda
def test_each_request_is_one_dma_from_its_pinned_slot_and_one_out(
    make: Make, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, plain = cupy.cuda.runtime, cupy.cuda.runtime.memcpyAsync
    begun: list[tuple[int, int, int, int, int]] = []

    def noted(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        begun.append((target, source, nbytes, kind, stream))
        plain(target, source, nbytes, kind, stream)

    monkeypatch.setattr(runtime, "memcpyAsync", noted)
    bench = make(doubled)
    parts = [rows(1, 0), rows(2, 500), rows(1, 9)]
    members = bench.run_batch(*map(bench.slot, parts))
    assert bench.shapes == [(4, WIDTH)]
    copies_in = [copy for copy in begun if copy[3] == runtime.memcpyHostToDevice]
    copies_out = [copy for copy in begun if copy[3] == runtime.memcpyDeviceToHost]
    assert begun == copies_in + copies_out  # in the requests' order
    sizes = [part.nbytes for part in parts]
    for copies, near, far in ((copies_in, 0, 1), (copies_out, 1, 0)):
        assert [copy[2] for copy in copies] == sizes
        places = [copy[near] for copy in copies]  # on the device: behind each other
        assert np.diff(places).tolist() == sizes[:-1]
        pinned = cupy._fake.pinned.items()
        for copy in copies:
            assert any(a <= copy[far] and copy[far] + copy[2] <= a + n for a, (n, _) in pinned)
    (ahead,) = {copy[4] for copy in copies_in}
    assert ahead not in (0, 1)  # not the stream that models compute on
    for member, part in zip(members, parts, strict=True):
        copied = member.answer.copied
        assert (copied.batch, copied.inputs, copied.out) == (0, 0, 0)
        assert copied.device == 2 * part.nbytes
        assert np.array_equal(bench.values(member), part * 2)


def test_nothing_stays_behind(make: Make, cupy: Any) -> None:
    pool = cupy.get_default_memory_pool()
    bench = make(doubled)
    tensors = [bench.slot(rows(1, n)) for n in range(3)]
    before = pool.used_bytes()
    for _ in range(3):
        members = bench.run_batch(*tensors)
        slots = [slot for member in members for slot in member.leases]
        assert len(bench.memory.rows("slots")) == len(slots) == 3  # outputs, and nothing gathered
        for lease in slots:
            bench.memory.release(*lease)
        gc.collect()
        assert pool.used_bytes() == before
        assert not bench.memory.rows("slots")


def test_rows_of_a_region_meet_those_of_slots(make: Make, cuda_environment: dict[str, str]) -> None:
    bench = make(doubled)
    width = NBYTES // 4
    with exported(cuda_environment) as (handle, _):
        bench.desk.add(1, handle)
        there = WireTensor("IN", "FP32", (1, width), RegionRef(1, 0, NBYTES))
        outside = WireTensor("IN", "FP32", (1, width), RegionRef(1, 64, NBYTES))
        parts = [rows(2, 7, width), rows(1, 0, width), rows(1, 70, width)]
        first, inside, wrong, last = bench.run_batch(
            bench.slot(parts[0]), there, outside, bench.slot(parts[2])
        )
        assert wrong.answer.error_code == Code.INVALID_ARGUMENT  # only of this request
        assert "Invalid offset + byte size" in wrong.answer.error
        assert bench.shapes == [(4, width)]
        for member, part in zip((first, inside, last), parts, strict=True):
            assert np.array_equal(bench.values(member), part * 2)
        bench.regions.clear()
    gc.collect()


def test_a_model_may_look_at_the_batch_on_the_host(make: Make) -> None:
    seen: list[Array] = []

    def model(request: Request) -> Response:
        tensor = request.inputs["IN"]
        array = tensor.numpy()
        assert not array.flags.writeable
        assert bytes(tensor.buffer) == array.tobytes()
        seen.append(array.copy())
        own = tensor.private()
        own += 1
        return Response((Output("OUT", "FP32", own),))

    bench = make(model)
    parts = [rows(1, 3), rows(1, 4)]
    members = bench.run_batch(*map(bench.slot, parts))
    assert np.array_equal(seen[0], np.concatenate(parts))
    for member, part in zip(members, parts, strict=True):
        assert np.array_equal(bench.values(member), part + 1)
