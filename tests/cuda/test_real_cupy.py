"""The real CuPy over the stand-in: computations are right, and mistakes with kernels are found.

Run by `make test-cupy` (tests/cuda/standin.py), as are the other tests of this folder.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve.cuda.device import Device
from shmserve.cuda.ipc import Handles
from shmserve.errors import Internal
from shmserve.shm.mappings import Mappings
from tests.cuda import standin
from tests.cuda.exporting import exported
from tests.servers import beside

pytestmark = [
    pytest.mark.fake_cuda,
    pytest.mark.skipif(not standin.active(), reason="run by `make test-cupy`"),
]

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture
def found(fake_cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Return the kind of the last finding, which is kept from the session's result."""
    monkeypatch.setenv("FAKE_CUDA_FINDINGS", "")
    return lambda: fake_cupy._fake.findings()[1].partition(" ")[2].partition(":")[0]


@pytest.mark.parametrize(
    "compute",
    [
        lambda xp, x: x * 2 + 1,
        lambda xp, x: xp.exp(x / 24),
        lambda xp, x: x.sum(axis=0),
        lambda xp, x: x.mean(axis=1),
        lambda xp, x: x.max(),
        lambda xp, x: x.argmax(axis=1),
        lambda xp, x: xp.where(x > 7, x, 0),
        lambda xp, x: xp.concatenate([x, x.T.reshape(4, 6)], axis=1),
        lambda xp, x: xp.ascontiguousarray(x[::2, ::-3].T),
        lambda xp, x: x @ x.T,
        lambda xp, x: x.astype(xp.float16) + 1,
        lambda xp, x: x.astype(ml_dtypes.bfloat16) * 2,
        lambda xp, x: (x + 1j) * (2 - 1j),
    ],
    ids=lambda compute: "",
)
def test_it_computes_as_numpy_does(fake_cupy: Any, compute: Callable[[Any, Any], Any]) -> None:
    got, expected = compute(fake_cupy, fake_cupy.asarray(VALUES)), compute(np, VALUES)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got.get().astype(complex), expected.astype(complex), rtol=1e-5)
    assert fake_cupy._fake.findings() == (0, "")


def test_threads_of_a_block_wait_for_each_other(fake_cupy: Any) -> None:
    code = """
    extern "C" __global__ void turn(const int *x, int *y) {
        extern __shared__ int all[];
        all[threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
        __syncthreads();
        y[blockIdx.x * blockDim.x + threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
    }"""
    x, y = fake_cupy.arange(256, dtype="i4"), fake_cupy.empty(256, "i4")
    fake_cupy.RawKernel(code, "turn")((2,), (128,), (x, y), shared_mem=512)
    expected = np.concatenate([np.arange(128)[::-1], np.arange(128, 256)[::-1]])
    np.testing.assert_array_equal(y.get(), expected)


def test_a_program_with_an_error_is_refused_with_its_line(fake_cupy: Any) -> None:
    wrong = fake_cupy.RawKernel('extern "C" __global__ void f(int *x) { *x = y; }', "f")
    with pytest.raises(fake_cupy.cuda.compiler.CompileException, match=r"program.cu:1:45: error"):
        wrong((1,), (1,), (fake_cupy.zeros(1, "i4"),))


@pytest.mark.parametrize(
    ("model", "name", "gib", "capability"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", 80, (9, 0)),
        ("h200", "NVIDIA H200", 141, (9, 0)),
        ("b300", "NVIDIA B300", 270, (10, 3)),
        ("l4", "NVIDIA L4", 24, (8, 9)),
        ("mig", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10, (9, 0)),
    ],
)
def test_properties_lie_where_cupy_reads_them(
    fake_cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    name: str,
    gib: int,
    capability: tuple[int, int],
) -> None:
    monkeypatch.setenv("FAKE_CUDA_MODEL", model)
    runtime = fake_cupy.cuda.runtime
    told = runtime.getDeviceProperties(1)
    assert told["name"] == name.encode()
    assert told["totalGlobalMem"] == gib << 30 == runtime.memGetInfo()[1]
    assert (told["major"], told["minor"]) == capability
    for attribute, number in (
        ("multiProcessorCount", 16),
        ("l2CacheSize", 38),
        ("maxThreadsPerMultiProcessor", 39),
        ("sharedMemPerBlockOptin", 97),
        ("pciBusID", 33),
        ("unifiedAddressing", 41),
        ("asyncEngineCount", 40),
        ("memoryBusWidth", 37),
        ("maxBlocksPerMultiProcessor", 106),
    ):
        assert told[attribute] == runtime.deviceGetAttribute(number, 1), attribute


# ------------------------------------------------------------------------------------ mistakes


def unowned(cupy: Any, address: int, device: int = 0) -> Any:
    memory = cupy.cuda.UnownedMemory(address, 64, None, device)
    return cupy.ndarray(16, np.float32, cupy.cuda.MemoryPointer(memory, 0))


def failing(call: Callable[[], object]) -> int:
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress") as caught:
        call()
    return int(caught.value.status)  # type: ignore[attr-defined]


def test_a_kernel_on_memory_that_was_freed(fake_cupy: Any, found: Callable[[], str]) -> None:
    runtime = fake_cupy.cuda.runtime
    address = runtime.malloc(64)
    runtime.free(address)
    computed = unowned(fake_cupy, address) + 1
    assert failing(computed.get) == 700
    assert found() == "use after free"


def test_a_kernel_beyond_an_end(fake_cupy: Any, found: Callable[[], str]) -> None:
    address = fake_cupy.cuda.runtime.malloc(512)
    computed = unowned(fake_cupy, address + 480) + 1
    assert failing(computed.get) == 700
    assert found() == "out of bounds"


def test_a_kernel_that_goes_astray(fake_cupy: Any, found: Callable[[], str]) -> None:
    code = 'extern "C" __global__ void f(int *x) { x[1 << 20] = 1; }'
    kernel = fake_cupy.RawKernel(code, "f")
    kernel((1,), (1,), (fake_cupy.zeros(1, "i4"),))
    assert failing(fake_cupy.cuda.runtime.deviceSynchronize) == 700
    assert found() == "out of bounds"


def test_a_kernel_on_another_devices_memory(fake_cupy: Any, found: Callable[[], str]) -> None:
    with fake_cupy.cuda.Device(1):
        address = fake_cupy.cuda.runtime.malloc(64)
    computed = unowned(fake_cupy, address, device=0) + 1
    assert failing(computed.get) == 700
    assert found() == "wrong device"


def test_a_kernel_that_does_not_wait(fake_cupy: Any, found: Callable[[], str]) -> None:
    stream = fake_cupy.cuda.Stream(non_blocking=True)
    array = fake_cupy.zeros(16, np.float32)
    stream.wait_event(fake_cupy.cuda.Stream.null.record())
    with stream:
        array += 1
    assert found() == ""
    array + 1
    assert found() == "race"


def test_memory_that_goes_back_to_the_pool_too_early(
    fake_cupy: Any, found: Callable[[], str]
) -> None:
    stream = fake_cupy.cuda.Stream(non_blocking=True)
    array = fake_cupy.zeros(16, np.float32)
    stream.wait_event(fake_cupy.cuda.Stream.null.record())
    with stream:
        kept = array + 1  # while a kernel reads the memory
    del array
    assert found() == ""
    fake_cupy.ones(16, np.float32)  # the default stream's next array is the same memory
    assert found() == "race"
    del kept


def test_what_is_not_given_back(fake_cupy: Any, found: Callable[[], str]) -> None:
    before = fake_cupy._fake.leaks()  # modules stay, because CuPy keeps them
    fake_cupy.cuda.runtime.malloc(64)
    assert fake_cupy._fake.leaks() == before + 1
    assert found() == "leak"


@pytest.mark.parametrize("call", ["cudaPointerGetAttributes", "cudaIpcOpenMemHandle"])
def test_a_handle_of_a_lost_device_is_not_to_blame(
    fake_cupy: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    device = Device(0, Mappings())
    handles = Handles(device)
    with exported({}) as (handle, _):
        monkeypatch.setenv("FAKE_CUDA_FAIL", f"{call}=700")
        with pytest.raises(Internal, match="cudaErrorIllegalAddress"):
            handles.open(handle, "r")
    assert device.lost
    assert len(handles) == 0


EXPORTER = """
import sys, cupy
stream = cupy.cuda.Stream(non_blocking=True)
event = cupy.cuda.Event(disable_timing=True, interprocess=True)
array = cupy.zeros(16, "f4")
stream.wait_event(cupy.cuda.Stream.null.record())
with stream:
    array += 7
    event.record()
runtime = cupy.cuda.runtime
memory = bytes(runtime.ipcGetMemHandle(array.data.ptr)).hex()
print(memory, bytes(runtime.ipcGetEventHandle(event.ptr)).hex(), flush=True)
sys.stdin.read()
"""


def test_an_event_of_another_process(fake_cupy: Any) -> None:
    runtime = fake_cupy.cuda.runtime
    with beside("-c", EXPORTER) as (told, process):
        handle, event = map(bytes.fromhex, told.split())
        opened = runtime.ipcOpenMemHandle(handle)
        waited = runtime.ipcOpenEventHandle(event)
        runtime.streamWaitEvent(0, waited)
        assert (unowned(fake_cupy, opened) + 1).get().tolist() == [8] * 16
        runtime.eventDestroy(waited)
        runtime.ipcCloseMemHandle(opened)
        process.communicate()
