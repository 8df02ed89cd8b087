"""Every CUDA call of the product is in a table, and a test or benchmark runs each."""

from collections import Counter
from functools import cache

from tests.cuda_calls import table
from tests.cuda_calls.scan import Site, sites


@cache
def used() -> list[Site]:
    return sites()


def test_the_table_has_every_use() -> None:
    """`python -m tests.cuda_calls` measures the calls and rewrites the table."""
    found = Counter((s.name, s.file.removeprefix("shmserve/")) for s in used())
    assert found == {(row.name, row.file): row.places for row in table.rows()}


def test_none_is_run_by_neither() -> None:
    assert [(row.name, row.file) for row in table.rows() if row.neither] == []


def test_what_is_passed_on_is_followed() -> None:
    """As an argument, as an attribute, as a property's and a function's result, by a later call."""
    names = {(site.name, site.file.removeprefix("shmserve/")) for site in used()}
    assert len(names) > 100
    for name, file in (
        ("cupy.cuda.runtime.hostRegister", "cuda/pins.py"),
        ("cupy.cuda.runtime.ipcOpenMemHandle", "cuda/ipc.py"),
        ("libcuda.cuMemGetAddressRange_v2", "cuda/ipc.py"),
        ("cupy.cuda.Device.use", "executor/backends/native/instance_device.py"),
        ("cupy.empty", "executor/wrappers/sequence_requests.py"),
        ("cupy.ndarray.set", "client/memory/device_arrays.py"),
        ("cupy.cuda.runtime.free", "client/memory/device_blocks.py"),
        ("cupy.cuda.Stream.use", "cuda/device.py"),
        ("pynvml.nvmlDeviceGetPowerUsage", "observe/gpu_use.py"),
        ("torch.cuda.empty_cache", "cuda/runtime.py"),
    ):
        assert (name, file) in names
