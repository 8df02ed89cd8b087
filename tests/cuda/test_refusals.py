"""Unexpected errors of CUDA and NVML: the process goes on and reports the error."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmserve.client import Client
from shmserve.cuda.device import Device
from shmserve.cuda.ipc import Handles
from shmserve.executor.wrappers.sequence_requests import SequenceRequest
from shmserve.observe import gpus
from shmserve.shm.mappings import Mappings
from tests.backend_runner import FakeBackendRequest
from tests.cuda.exporting import exported
from tests.cuda.stub_server import StubServer

SIZE = 1 << 20
LOST = 700
COUNT = 1 << 18


def refuse(monkeypatch: pytest.MonkeyPatch, cupy: Any, name: str) -> None:
    """Let the next call of a function fail. Later calls succeed."""
    runtime = cupy.cuda.runtime
    call = getattr(runtime, name)

    def refusing(*_: Any) -> None:
        monkeypatch.setattr(runtime, name, call)
        raise runtime.CUDARuntimeError(LOST)

    monkeypatch.setattr(runtime, name, refusing)


@pytest.mark.parametrize("name", ["malloc", "ipcGetMemHandle"])
def test_memory_that_a_client_cannot_have_or_share(
    fake_cupy: Any, stub_client: Client, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The client then uses unshared memory, and tensors travel in requests."""
    with monkeypatch.context() as patched:
        refuse(patched, fake_cupy, name)
        x = stub_client.empty(COUNT, device=0)
        x.fill(1)
        assert stub_client.infer("double", {"IN": x}, device=0)["OUT"].get()[0] == 2
    del x
    stub_client.close()
    fake_cupy.get_default_memory_pool().free_all_blocks()
    assert fake_cupy._fake.used(0) == 0


def test_memory_of_a_lost_device_is_given_back_by_nobody(
    fake_cupy: Any, stub: StubServer, stub_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = stub_client.empty(COUNT, device=0)
    with monkeypatch.context() as patched:
        refuse(patched, fake_cupy, "free")
        stub_client.close()
        del x
        gc.collect()
    assert stub.regions == {}


def test_a_handle_that_cannot_be_closed_is_told(
    cupy: Any,
    cuda_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = Device(0, Mappings())
    handles = Handles(device)
    with exported(cuda_environment, SIZE) as (handle, _):
        memory = handles.open(handle, "r")
        with monkeypatch.context() as patched:
            close, closed = cupy.cuda.runtime.ipcCloseMemHandle, list[int]()
            refuse(patched, cupy, "ipcCloseMemHandle")
            closed.append(memory.address)
            del memory
            gc.collect()
        assert len(handles) == 0
        assert "memory of another process was not closed" in caplog.text
        close(closed[0])


def test_memory_that_cannot_be_unpinned_is_told(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mappings = Mappings()
    device = Device(0, mappings)
    array = np.ones(SIZE, np.uint8)
    address = array.__array_interface__["data"][0]
    mappings.mapped(address, SIZE, writable=True)
    device.put_in(array, device.empty((SIZE,), array.dtype))
    assert device.pins.nbytes == SIZE
    with monkeypatch.context() as patched:
        refuse(patched, cupy, "hostUnregister")
        mappings.unmapping(address)
    assert device.pins.nbytes == 0
    assert "shared memory was not unpinned" in caplog.text
    cupy.cuda.runtime.hostUnregister(address)


@pytest.mark.fake_cuda
def test_a_device_that_has_no_mig_mode(fake_with: Callable[..., object]) -> None:
    fake_with(LACKS="GetMigMode")
    found = gpus.present()
    assert found
    assert not any(gpu.mig for gpu in found)


def test_a_state_that_nobody_asked_for_lies_on_the_device(cupy: Any) -> None:
    request = SequenceRequest(FakeBackendRequest({}), {}, ("STATE",), cupy)  # type: ignore[arg-type]
    state = request.offer_on_device("STATE", "FP32", (2, 3))
    assert isinstance(state, cupy.ndarray)
    assert state.shape == (2, 3)
