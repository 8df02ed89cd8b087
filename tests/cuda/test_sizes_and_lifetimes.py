"""Reported size, lifetime and device of memory."""

import gc
from typing import Any

import numpy as np
import pytest

from shmserve.client import Client
from shmserve.core.region_kinds import CUDA
from shmserve.core.registry import Region
from shmserve.cuda.device import Device
from shmserve.cuda.ipc import Handles, bytes_behind
from shmserve.executor.tensors.cuda_region import CudaRegion
from shmserve.protocol.control.data_messages import RegionRef
from shmserve.shm.mappings import Mappings
from tests.cuda.exporting import exported

BLOCK = 2 << 20
FLOAT = np.dtype(np.float32)


def test_what_lies_behind_an_address_is_the_rest_of_its_allocation(cupy: Any) -> None:
    address = cupy.cuda.runtime.malloc(BLOCK)
    try:
        assert bytes_behind(address) == BLOCK
        assert bytes_behind(address + 512) == BLOCK - 512
    finally:
        cupy.cuda.runtime.free(address)


@pytest.mark.fake_cuda
def test_a_mapping_is_registered_as_a_whole(fake_cupy: Any) -> None:
    mappings = Mappings()
    device = Device(0, mappings)
    array = np.ones(BLOCK, np.uint8)
    address = array.__array_interface__["data"][0]
    mappings.mapped(address, BLOCK, writable=True)
    device.put_in(array, device.empty((BLOCK,), array.dtype))
    assert {a: nbytes for a, (nbytes, _) in fake_cupy._fake.pinned.items()} == {address: BLOCK}
    device.synchronize()
    mappings.unmapping(address)
    assert not fake_cupy._fake.pinned


def test_a_region_is_open_as_long_as_a_model_has_arrays_of_it(
    cupy: Any, cuda_environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(0, Mappings())
    handles = Handles(device)
    with exported(cuda_environment, count=BLOCK // 4) as (handle, _):
        told = Region("r", 7, "", 0, BLOCK, 0, kind=CUDA, device_id=0, handle=handle)
        region = CudaRegion(told, device, handles.open(handle, "r"))
        array = region.array(RegionRef(7, 0, BLOCK), (4,), FLOAT)
        del region
        gc.collect()
        assert len(handles) == 1
        assert array.get().tolist() == [0, 1, 2, 3]
        del array
        gc.collect()
        assert len(handles) == 0
    assert "was not closed" not in caplog.text, "once is enough"


@pytest.mark.fake_cuda
def test_a_client_has_its_memory_on_the_device_it_names(
    fake_cupy: Any, stub_client: Client
) -> None:
    assert fake_cupy.cuda.runtime.getDevice() == 0
    x = stub_client.empty(BLOCK, device=1)
    assert fake_cupy._fake.used(1) >= BLOCK
    assert fake_cupy._fake.used(0) == 0
    del x


@pytest.mark.fake_cuda
def test_work_is_done_on_the_device_itself(fake_cupy: Any) -> None:
    """Even if the calling thread has chosen another device, which stays chosen."""
    device = Device(1, Mappings())
    with fake_cupy.cuda.Device(0):
        array = device.empty((4,), FLOAT)
        assert fake_cupy.cuda.runtime.getDevice() == 0
    assert array.device.id == 1
