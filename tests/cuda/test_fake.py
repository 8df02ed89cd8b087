"""Traps of the fake: mistakes that fail on a real device must fail on the fake."""

import contextlib
import ctypes
import mmap
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cuda import fake
from tests.servers import beside

pytestmark = pytest.mark.fake_cuda

VALUES = np.arange(6, dtype=np.float32)
TO_DEVICE, TO_HOST = 1, 2
READ_ONLY = 8

# Prints the handle of an array of VALUES, as hex, frees the memory if asked to, then waits.
EXPORTER = """
import sys, cupy, numpy as np
runtime = cupy.cuda.runtime
runtime.setDevice(int(sys.argv[1]))
memory, values = runtime.malloc(24), np.arange(6, dtype=np.float32)
runtime.memcpy(memory, values.ctypes.data, 24, 1)
print(bytes(runtime.ipcGetMemHandle(memory)).hex(), flush=True)
for line in sys.stdin:
    runtime.free(memory)
    print("free", flush=True)
"""


@pytest.fixture(autouse=True)
def _mistakes_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the stand-in (tests/cuda/standin.py), mistakes of other tests fail the session."""
    monkeypatch.setenv("FAKE_CUDA_FINDINGS", "")


@pytest.fixture
def export(compiled: Path) -> Iterator[Callable[..., tuple[bytes, subprocess.Popen[str]]]]:
    """Start an exporter on a device: the handle, and the process."""
    environ = os.environ | fake.environment(compiled)
    with contextlib.ExitStack() as stack:

        def start(device: int = 0) -> tuple[bytes, subprocess.Popen[str]]:
            program = beside("-c", EXPORTER, str(device), environ=environ)
            handle, process = stack.enter_context(program)
            return bytes.fromhex(handle), process

        yield start


def failing(call: Callable[..., object], *args: object) -> int:
    """Return the status that a call fails with."""
    with pytest.raises(RuntimeError, match=r"^cudaError[A-Za-z]+: ") as caught:
        call(*args)
    return int(caught.value.status)  # type: ignore[attr-defined]


def held() -> list[str]:
    """Return the mapped device memory of this process."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "fakecuda" in line]


# ----------------------------------------------------------------------------------------- IPC


def test_a_handle_opens_the_memory_of_another_process(fake_cupy: Any, export: Any) -> None:
    runtime, cuda = fake_cupy.cuda.runtime, fake_cupy.cuda
    handle, _ = export(1)
    first = runtime.ipcOpenMemHandle(handle)
    assert runtime.ipcOpenMemHandle(handle) == first
    assert runtime.pointerGetAttributes(first).device == 1
    with cuda.Device(1):
        pointer = cuda.MemoryPointer(cuda.UnownedMemory(first, 24, None), 0)
        array = fake_cupy.ndarray((6,), np.float32, pointer)
        np.testing.assert_array_equal(array.get(), VALUES)
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    inside = ctypes.c_uint64(first + 8)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), inside) == 0
    assert (base.value, size.value) == (first, 512)
    runtime.ipcCloseMemHandle(first)
    assert len(held()) == 1
    runtime.ipcCloseMemHandle(first)
    assert held() == []
    assert driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), inside) == 1
    assert failing(runtime.ipcCloseMemHandle, first) == 1


def test_handles_that_cannot_be_opened(fake_cupy: Any, export: Any) -> None:
    runtime = fake_cupy.cuda.runtime
    assert failing(runtime.ipcOpenMemHandle, bytes(64)) == 1
    own = runtime.malloc(24)
    assert failing(runtime.ipcOpenMemHandle, runtime.ipcGetMemHandle(own)) == 201
    freed, process = export()
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "free\n"
    assert failing(runtime.ipcOpenMemHandle, freed) == 205
    process.kill()
    process.wait()
    assert failing(runtime.ipcOpenMemHandle, freed) == 400


def test_what_is_open_outlives_the_exporter(fake_cupy: Any, export: Any) -> None:
    runtime = fake_cupy.cuda.runtime
    handle, process = export()
    opened, found = runtime.ipcOpenMemHandle(handle), np.zeros_like(VALUES)
    process.kill()
    process.wait()
    runtime.memcpy(found.ctypes.data, opened, 24, TO_HOST)
    np.testing.assert_array_equal(found, VALUES)


def test_devices_that_do_not_reach_each_other(
    fake_cupy: Any, export: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PEERS", "0")
    runtime = fake_cupy.cuda.runtime
    handle, _ = export(1)
    assert failing(runtime.ipcOpenMemHandle, handle) == 217
    assert runtime.deviceCanAccessPeer(0, 1) == 0
    with fake_cupy.cuda.Device(1):
        assert runtime.ipcOpenMemHandle(handle)


# ------------------------------------------------------------------------------------- streams


def test_nothing_has_happened_before_it_is_waited_for(fake_cupy: Any) -> None:
    runtime = fake_cupy.cuda.runtime
    memory, host = runtime.malloc(VALUES.nbytes), np.zeros_like(VALUES)
    stream = fake_cupy.cuda.Stream(non_blocking=True)
    runtime.memcpyAsync(memory, VALUES.ctypes.data, VALUES.nbytes, TO_DEVICE, stream.ptr)
    runtime.memcpyAsync(host.ctypes.data, memory, VALUES.nbytes, TO_HOST, stream.ptr)
    runtime.streamSynchronize(0)
    assert not host.any()
    stream.synchronize()
    np.testing.assert_array_equal(host, VALUES)


def test_the_default_stream_sees_another_stream_after_an_event(fake_cupy: Any) -> None:
    array = fake_cupy.zeros(6, np.float32)
    fake_cupy.cuda.Device().synchronize()
    stream = fake_cupy.cuda.Stream(non_blocking=True)
    array.set(VALUES, stream)
    event = stream.record()
    missed = array + 1
    fake_cupy.cuda.Stream.null.synchronize()
    fake_cupy.cuda.Stream.null.wait_event(event)
    seen = array + 1
    np.testing.assert_array_equal(missed.get(), np.ones(6))
    np.testing.assert_array_equal(seen.get(), VALUES + 1)


def test_the_default_stream_waits_for_a_blocking_stream(fake_cupy: Any) -> None:
    array, stream = fake_cupy.empty(6, np.float32), fake_cupy.cuda.Stream()
    array.set(VALUES, stream)
    np.testing.assert_array_equal((array + 1).get(), VALUES + 1)


@pytest.mark.fake_only
def test_a_kernel_does_not_keep_the_memory_it_uses(fake_cupy: Any) -> None:
    cuda = fake_cupy.cuda
    with cuda.Stream(non_blocking=True) as stream:
        array = fake_cupy.asarray(VALUES)
    stream.synchronize()
    computed = array * 2
    del array  # returns to its stream, which has no work left
    assert failing(computed.get) == 700
    assert failing(cuda.runtime.getDeviceCount) == 700


@pytest.mark.fake_only
def test_no_implicit_copies(fake_cupy: Any) -> None:
    array = fake_cupy.asarray(VALUES)
    for mixed in (np.asarray, np.exp, lambda a: a + VALUES, lambda a: VALUES + a):
        with pytest.raises(TypeError):
            mixed(array)
    with fake_cupy.cuda.Device(1), pytest.raises(ValueError, match="must be same as the current"):
        array + array


def test_dlpack_keeps_the_memory(fake_cupy: Any) -> None:
    array = fake_cupy.asarray(VALUES)
    again = fake_cupy.from_dlpack(array)
    assert (again.data.ptr, array.__dlpack_device__()) == (array.data.ptr, (2, 0))
    del array
    np.testing.assert_array_equal(again.get(), VALUES)


# -------------------------------------------------------------------------------------- memory


@pytest.mark.fake_only
def test_memory_has_an_end(monkeypatch: pytest.MonkeyPatch, fake_cupy: Any) -> None:
    monkeypatch.setenv("FAKE_CUDA_MEMORY", "4096")
    runtime = fake_cupy.cuda.runtime
    memory = runtime.malloc(3000)
    assert runtime.memGetInfo() == (1024, 4096)
    assert failing(runtime.malloc, 1025) == 2
    with pytest.raises(fake_cupy.cuda.memory.OutOfMemoryError):
        fake_cupy.empty(600, np.uint8)  # plus the bytes that the pool leaves before a block
    with fake_cupy.cuda.Device(1):
        fake_cupy.empty(600, np.uint8)
    assert len(held()) == 1
    runtime.free(memory)
    assert held() == []


def test_copies_beyond_an_allocation_are_refused(fake_cupy: Any) -> None:
    runtime = fake_cupy.cuda.runtime
    memory, host = runtime.malloc(512), np.zeros(1024, np.uint8)
    assert failing(runtime.memcpyAsync, memory, host.ctypes.data, 513, TO_DEVICE, 0) == 1
    assert failing(runtime.memcpyAsync, memory, host.ctypes.data, 512, TO_HOST, 0) == 1


def test_a_lost_device_stays_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fake_cupy: Any
) -> None:
    broken = tmp_path / "broken"
    monkeypatch.setenv("FAKE_CUDA_BROKEN", str(broken))
    runtime = fake_cupy.cuda.runtime
    runtime.deviceSynchronize()
    broken.touch()
    assert failing(runtime.deviceSynchronize) == 700
    broken.unlink()
    assert failing(runtime.malloc, 1) == 700


@pytest.mark.parametrize(
    ("mode", "flags", "status"),
    [
        ("readonly", 0, 1),
        ("readonly", READ_ONLY, 0),
        ("all", 0, 0),
        ("writable", 0, 1),
        ("writable", READ_ONLY, 801),
        ("no", READ_ONLY, 304),
    ],
)
def test_pinning_what_may_not_be_written(
    fake_cupy: Any, monkeypatch: pytest.MonkeyPatch, mode: str, flags: int, status: int
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PIN", mode)
    runtime = fake_cupy.cuda.runtime
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ) as mapping:
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        if status:
            assert failing(runtime.hostRegister, address, mmap.PAGESIZE, flags) == status
        else:
            runtime.hostRegister(address, mmap.PAGESIZE, flags)
            assert fake_cupy._fake.pinned == {address: (mmap.PAGESIZE, flags)}


def test_pinning_twice_and_what_is_not_mapped(fake_cupy: Any) -> None:
    runtime = fake_cupy.cuda.runtime
    memory = runtime.hostAlloc(2 * mmap.PAGESIZE, 0)
    assert failing(runtime.hostRegister, memory, mmap.PAGESIZE, 0) == 712
    assert failing(runtime.hostRegister, mmap.PAGESIZE, mmap.PAGESIZE, 0) == 1
    assert failing(runtime.hostUnregister, memory) == 713
    runtime.freeHost(memory)


# ------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("faults", "setting", "expected"),
    [
        ({"devices": 3}, "2,0,7,1", [2, 0]),
        ({"devices": 3}, "", []),
        ({"devices": 3}, "1,1", []),
        ({"devices": 2}, "GPU-fa4ec0da-1111-1111-1111-111111110201", [1]),
        ({"devices": 2, "mig": 1}, "0,1", [1]),
        (
            {"devices": 2, "mig": 1},
            "MIG-fa4ec0da-1111-1111-1111-111111110203,MIG-fa4ec0da-1111-1111-1111-111111110202",
            [1],
        ),
        ({"devices": "none"}, None, []),
    ],
)
def test_visible_devices(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    faults: dict[str, object],
    setting: str | None,
    expected: list[int],
) -> None:
    for name, value in faults.items():
        monkeypatch.setenv(f"FAKE_CUDA_{name.upper()}", str(value))
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    cupy = request.getfixturevalue("fake_cupy")
    assert [device.index for device in cupy._fake.devices] == expected
    assert cupy.cuda.is_available() == bool(expected)
    if not expected:
        assert failing(cupy.empty, 1) == (35 if faults["devices"] == "none" else 100)
