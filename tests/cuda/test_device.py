"""`shmserve.cuda`: devices, pinned memory and other processes' memory, on the fake driver."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmserve.core.region_kinds import CUDA
from shmserve.core.registry import Region
from shmserve.cuda import device_trials
from shmserve.cuda.device import Device
from shmserve.cuda.ipc import Handles
from shmserve.errors import ConfigError, Internal, InvalidArgument, ResourceExhausted, ShmserveError
from shmserve.executor.devices import Devices
from shmserve.executor.tensors.cuda_region import CudaRegion
from shmserve.protocol.control.data_messages import Descriptor, RegionRef, SegmentOffer
from shmserve.shm.mappings import Mappings
from shmserve.shm.peer_segments import PeerSegments
from shmserve.shm.segment import Mapping
from tests.cuda.exporting import exported

SIZE = 1 << 20
BLOCK = 2 << 20  # bytes that no other allocation shares: every driver reports this size


@pytest.fixture
def device(cupy: Any) -> Device:
    return Device(0, Mappings())


@pytest.fixture
def shared() -> Iterator[int]:
    """A memfd that is mapped read-only, as executors map frontends' segments."""
    fd = os.memfd_create("shared")
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, np.arange(SIZE // 4, dtype=np.float32).tobytes(), 0)
    yield fd
    os.close(fd)


def mapped_writable(memfd: str) -> bool:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return any(f"/memfd:{memfd} " in line and line.split()[1].startswith("rw") for line in maps)


def mapped_device_memory() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:fakecuda")


def test_what_is_brought_is_there_when_it_was_awaited(device: Device) -> None:
    source = np.arange(12, dtype=np.float32).reshape(3, 4)
    array, event = device.bring(source)
    assert array.shape == (3, 4)
    device.await_copy(event)
    doubled = array + array
    assert np.array_equal(doubled.get(), source * 2)


def test_what_is_brought_is_there_for_a_thread_with_a_stream_of_its_own(device: Device) -> None:
    source = np.arange(12, dtype=np.float32)
    cuda = device.cupy.cuda
    own = cuda.Stream(non_blocking=True)
    try:
        own.use()
        array, event = device.bring(source)
        device.await_copy(event)
        copy = device.copied(array)
        both = array + copy
        own.synchronize()
        assert np.array_equal(both.get(), source * 2)
        target, there = np.zeros(3, np.float32), device.empty((3,), np.dtype(np.float32))
        device.take_out(both[::4], target)
        device.move(both[::4], there)
        device.synchronize()
        assert target.tolist() == there.get().tolist() == [0, 8, 16]
        assert cuda.get_current_stream() == own
    finally:
        cuda.Stream.null.use()


def test_what_is_taken_out_is_there_after_synchronising(device: Device) -> None:
    target = np.zeros(4, np.float32)
    device.take_out(device.cupy.asarray(np.arange(4, dtype=np.float32)), target)
    device.synchronize()
    assert target.tolist() == [0, 1, 2, 3]


def test_a_part_of_an_array_is_taken_out_in_order(device: Device) -> None:
    whole = device.cupy.asarray(np.arange(12, dtype=np.float32).reshape(3, 4))
    target = np.zeros(3, np.float32)
    device.take_out(whole[:, 1], target)
    device.synchronize()
    assert target.tolist() == [1, 5, 9]


@pytest.mark.fake_cuda
@pytest.mark.parametrize(
    ("way", "pinned", "told"),
    [
        ("readonly", SIZE, ""),
        ("all", SIZE, ""),
        ("writable", SIZE, ""),
        ("no", 0, "WARNING shared memory of frontends cannot be pinned"),
    ],
)
def test_read_only_memory_is_pinned_once_where_that_is_permitted(
    way: str,
    pinned: int,
    told: str,
    shared: int,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PIN", way)
    caplog.set_level("INFO", "shmserve.cuda.pins")
    request.getfixturevalue("fake_cupy")
    mappings = Mappings()
    device = Device(0, mappings)
    segments = PeerSegments(mappings=mappings)
    segments.accept([SegmentOffer(1, SIZE)], [os.dup(shared)])
    view = np.frombuffer(segments.view(Descriptor(1, 0, 0, 0, SIZE)), np.float32)
    for _ in range(2):
        array, event = device.bring(view[: SIZE // 8])
        device.await_copy(event)
        assert np.array_equal(array.get(), view[: SIZE // 8])
    assert device.pins.nbytes == pinned
    said = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    assert [one.startswith(told) for one in said] == ([True] if told else [])
    assert mapped_writable("shared") == (way == "writable"), "for a driver that wants it"
    assert not view.flags.writeable
    segments.drop([1])
    assert device.pins.nbytes == 0
    assert not device.cupy._fake.pinned
    assert not mapped_writable("shared")


@pytest.mark.fake_cuda
def test_what_cannot_be_mapped_for_the_driver_is_copied_all_the_same(
    shared: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PIN", "writable")
    request.getfixturevalue("fake_cupy")
    mappings = Mappings()
    device = Device(0, mappings)
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(sealed, 0, SIZE)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    segments = PeerSegments(mappings=mappings)
    segments.accept([SegmentOffer(1, SIZE)], [sealed])
    view = np.frombuffer(segments.view(Descriptor(1, 0, 0, 0, SIZE)), np.float32)
    for _ in range(2):
        array, event = device.bring(view)
        device.await_copy(event)
        assert np.array_equal(array.get(), view)
    assert device.pins.nbytes == 0
    segments.drop([1])


def test_memory_is_unpinned_when_its_copies_are_over(cupy: Any, shared: int) -> None:
    mappings = Mappings()
    device = Device(0, mappings)
    mapping = Mapping(shared, SIZE)
    mappings.mapped(mapping.address, SIZE, writable=False)
    view = np.frombuffer(mapping.view, np.float32)
    array, event = device.bring(view)
    mappings.unmapping(mapping.address)
    device.await_copy(event)
    assert np.array_equal(array.get(), view)


@pytest.mark.fake_cuda
def test_memory_is_unpinned_also_when_something_on_the_device_failed(
    device: Device, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings = Mappings()
    device = Device(0, mappings)
    mapping = Mapping(shared, SIZE)
    mappings.mapped(mapping.address, SIZE, writable=False)
    device.bring(np.frombuffer(mapping.view, np.float32))
    device.synchronize()
    assert device.cupy._fake.pinned

    def fail() -> None:
        raise device.cupy.cuda.runtime.CUDARuntimeError(1)

    monkeypatch.setattr(device.cupy.cuda.runtime, "deviceSynchronize", fail)
    mappings.unmapping(mapping.address)
    assert not device.cupy._fake.pinned


@pytest.mark.parametrize("writable", [False, True])
def test_idle_memory_of_peers_is_pinned_no_more(cupy: Any, shared: int, writable: bool) -> None:
    (facts, *_) = device_trials.devices().devices
    if refused := facts.pin_writable:  # copies work all the same
        pytest.skip(f"shared memory cannot be pinned here: {refused}")
    mappings = Mappings()
    device = Device(0, mappings)
    memory = mmap.mmap(shared, SIZE)  # as our own segments are mapped
    view = np.frombuffer(memory, np.float32)
    mappings.mapped(view.ctypes.data, SIZE, writable)
    for _ in range(2):
        device.bring(view)
        device.pins.trim(60)
        assert device.pins.nbytes == SIZE
        device.pins.trim(0)
        assert device.pins.nbytes == (SIZE if writable else 0)
    mappings.unmapping(view.ctypes.data)


@pytest.mark.fake_cuda
def test_memory_that_cannot_be_pinned_keeps_no_other_from_it(
    device: Device, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mappings = Mappings()
    device = Device(0, mappings)
    first, second = Mapping(shared, SIZE), Mapping(shared, SIZE)
    for mapping in (first, second):
        mappings.mapped(mapping.address, SIZE, writable=False)

    def refuse(*_: int) -> None:
        raise device.cupy.cuda.runtime.CUDARuntimeError(1)

    with monkeypatch.context() as patch:
        patch.setattr(device.cupy.cuda.runtime, "hostRegister", refuse)
        device.bring(np.frombuffer(first.view, np.float32))
    for mapping in (first, second):
        device.bring(np.frombuffer(mapping.view, np.float32))
    assert set(device.cupy._fake.pinned) == {second.address}


def test_small_copies_pin_nothing(device: Device, shared: int) -> None:
    mappings = Mappings()
    device = Device(0, mappings)
    mapping = Mapping(shared, SIZE)
    mappings.mapped(mapping.address, SIZE, writable=False)
    device.bring(np.frombuffer(mapping.view[:4096], np.float32))
    device.synchronize()
    assert device.pins.nbytes == 0


def test_mappings_find_what_lies_in_them_as_a_whole() -> None:
    mappings = Mappings()
    mappings.mapped(1000, 100, writable=True)
    mappings.mapped(2000, 100, writable=False)
    found = mappings.find(1010, 90)
    assert found is not None
    assert (found.address, found.writable) == (1000, True)
    assert mappings.find(1010, 91) is None
    assert mappings.find(999, 1) is None
    mappings.unmapping(1000)
    mappings.unmapping(1000)
    assert mappings.find(1010, 90) is None
    assert len(mappings) == 1


@pytest.mark.fake_cuda
def test_no_memory_left_is_told_and_the_device_goes_on(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(1 << 20))
    request.getfixturevalue("fake_cupy")
    device = Device(0, Mappings())
    with pytest.raises(ResourceExhausted, match="CUDA device 0 has no memory left"):
        device.empty((1 << 21,), np.dtype(np.uint8))
    assert not device.lost
    assert device.empty((8,), np.dtype(np.uint8)).nbytes == 8


@pytest.mark.fake_cuda
def test_a_lost_device_says_so(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_CUDA_BROKEN", str(tmp_path / "broken"))
    request.getfixturevalue("fake_cupy")
    device = Device(0, Mappings())
    device.synchronize()
    (tmp_path / "broken").touch()
    with pytest.raises(Internal, match="cudaErrorIllegalAddress"):
        device.synchronize()
    assert "cudaErrorIllegalAddress" in device.lost


@pytest.mark.fake_cuda
@pytest.mark.parametrize(("status", "lost"), [(700, True), (2, False), (None, False)], ids=str)
def test_what_comes_of_a_kernel_is_one_of_our_errors(
    status: int | None, lost: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(_: object) -> None:
        if status is None:
            raise RuntimeError("no compiler")
        raise device.cupy.cuda.driver.CUDADriverError(status)

    array = device.empty((2, 4), np.dtype(np.uint8))[:, 1]
    monkeypatch.setattr(device.cupy, "ascontiguousarray", launch)
    with pytest.raises(ShmserveError, match="CUDA device 0"):
        device.take_out(array, np.zeros(2, np.uint8))
    assert bool(device.lost) == lost


@pytest.mark.fake_only
@pytest.mark.fake_cuda
def test_a_handle_of_a_lost_device_is_not_to_blame(
    device: Device, cuda_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        error = device.cupy.cuda.runtime.CUDARuntimeError(1)
        error.status = 700
        raise error

    handles = Handles(device)
    with exported(cuda_environment) as (handle, _):
        for call in ("pointerGetAttributes", "setDevice"):
            monkeypatch.setattr(device.cupy.cuda.runtime, call, fail)
            with pytest.raises(Internal):
                handles.open(handle, "r")
            monkeypatch.undo()
            assert device.lost
            device.lost = ""
    assert len(handles) == 0


@pytest.mark.fake_cuda
def test_a_handle_costs_nobody_the_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may report any error for an invalid handle, such as "unknown"."""

    def unknown(*_: object) -> None:
        error = device.cupy.cuda.runtime.CUDARuntimeError(1)
        error.status = 999
        raise error

    monkeypatch.setattr(device.cupy.cuda.runtime, "ipcOpenMemHandle", unknown)
    with pytest.raises(InvalidArgument, match="cannot be opened"):
        Handles(device).open(bytes(64), "r")
    assert not device.lost


@pytest.mark.fake_cuda
def test_no_other_device_is_touched_by_threads_that_had_none(
    fake_cupy: Any, cuda_environment: dict[str, str]
) -> None:
    devices = Devices(1, Mappings())
    devices.open()
    with exported(cuda_environment, device=1) as (handle, _):
        probe = partial(devices.probe, region(handle, device_id=1))
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(probe).result() == 4096
    assert fake_cupy._fake.contexts == {1}


@pytest.mark.fake_cuda
@pytest.mark.parametrize(
    ("devices", "told"),
    [("0", "cudaErrorNoDevice"), ("none", "cudaErrorInsufficientDriver"), ("1", "CUDA sees 1")],
)
def test_a_device_that_is_not_there(
    devices: str, told: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", devices)
    request.getfixturevalue("fake_cupy")
    with pytest.raises(ConfigError, match=told):
        Device(1, Mappings())


def test_a_handle_is_opened_once_and_closed_with_its_last_array(
    device: Device, cuda_environment: dict[str, str]
) -> None:
    before = mapped_device_memory()
    handles = Handles(device)
    with exported(cuda_environment, count=BLOCK // 4) as (handle, process):
        imported = handles.open(handle, "r")
        assert handles.open(handle, "s") is imported
        assert (imported.nbytes, imported.ordinal) == (BLOCK, 0)
        array = device.array_at(imported.address, (4,), np.dtype(np.float32), imported, 0)
        del imported
        assert len(handles) == 1
        assert array.get().tolist() == [0, 1, 2, 3]
        process.kill()
        process.wait()
        part = array[1:]
        del array
        gc.collect()
        assert len(handles) == 1
        del part
        gc.collect()
        assert len(handles) == 0
        assert mapped_device_memory() == before
        with pytest.raises(InvalidArgument, match="is the process that exported it alive") as told:
            handles.open(handle, "r")
        assert handle.hex() not in told.value.message


def region(handle: bytes, device_id: int = 0, byte_size: int = 4096) -> Region:
    return Region("r", 7, "", 0, byte_size, 0, kind=CUDA, device_id=device_id, handle=handle)


def test_a_region_is_no_larger_than_its_allocation(
    cupy: Any, cuda_environment: dict[str, str]
) -> None:
    devices = Devices(0, Mappings())
    with exported(cuda_environment, count=BLOCK // 4) as (handle, _):
        told = f"has {2 * BLOCK} bytes, but its allocation has {BLOCK}"
        with pytest.raises(InvalidArgument, match=told):
            devices.import_region(region(handle, byte_size=2 * BLOCK))
        assert devices.import_region(region(handle, byte_size=BLOCK))[1].nbytes == BLOCK
    gc.collect()
    assert not [line for line in Path("/proc/self/maps").read_text().split() if "fakecuda0" in line]


@pytest.mark.fake_cuda
@pytest.mark.parametrize("peers", ["1", "0"])
def test_memory_of_another_device(
    peers: str,
    cuda_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PEERS", peers)
    request.getfixturevalue("fake_cupy")
    devices = Devices(0, Mappings())
    with exported(cuda_environment, device=1) as (handle, _):
        wrong_number = region(handle, device_id=0)  # the client numbers its devices differently
        if peers == "0":
            with pytest.raises(InvalidArgument, match=r"'r'.*|cannot be opened|cannot reach"):
                devices.import_region(wrong_number)
            return
        opened = CudaRegion(wrong_number, *devices.import_region(wrong_number))
        assert (opened.ordinal, opened.device.ordinal) == (1, 0)
        assert not opened.is_usable(RegionRef(7, 0, 16))
        near = opened.device.empty((4,), np.dtype(np.float32))
        opened.device.move(opened.array(RegionRef(7, 0, 16), (4,), near.dtype), near)
        opened.device.synchronize()
        assert near.get().tolist() == [0, 1, 2, 3]
        host = np.frombuffer(opened.to_host(RegionRef(7, 4, 12)), np.float32)
        assert host.tolist() == [1, 2, 3]
        assert opened.device.cupy._fake.contexts == {0}  # device 0 reaches the memory


def test_windows_are_checked_against_the_region(
    cupy: Any, cuda_environment: dict[str, str]
) -> None:
    devices = Devices(0, Mappings())
    with exported(cuda_environment) as (handle, _):
        small = region(handle, byte_size=64)
        opened = CudaRegion(small, *devices.import_region(small))
        dtype = np.dtype(np.float32)
        assert opened.array(RegionRef(7, 60, 4), (1,), dtype).get().tolist() == [15]
        for at, count in (
            (RegionRef(7, 64, 4), 1),
            (RegionRef(7, 0, 8), 4),
            (RegionRef(7, -4, 4), 1),
        ):
            with pytest.raises(InvalidArgument, match="Invalid offset"):
                opened.array(at, (count,), dtype)
