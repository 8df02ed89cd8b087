"""GPU utilization from NVML: units, missing values, and drivers that fail."""

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmserve.core.device_names import Gpu
from shmserve.observe import gpu_use, gpus, nvml
from shmserve.observe.gpu_use import GpuUse
from tests.cuda.fake import FOLDER
from tests.running_server import wait_until

UUID = "GPU-fa4ec0da-1111-1111-1111-111111110101"  # the fake's first GPU
OTHER = "GPU-fa4ec0da-1111-1111-1111-111111110201"


@pytest.fixture(autouse=True)
def _unasked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test run as a process that has not used NVML yet; forget the results afterwards."""
    _forget()
    for name in [n for n in os.environ if n.startswith("FAKE_CUDA_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(nvml, "_library", nvml._Library())
    monkeypatch.setattr(nvml, "_calling", threading.Lock())
    monkeypatch.setattr(nvml, "DEADLINE_S", 60.0)
    monkeypatch.setattr(gpu_use, "FRESH_S", 60.0)
    yield
    _forget()


def _forget() -> None:
    for name in ("pynvml", "fake_devices"):
        sys.modules.pop(name, None)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The fake's pynvml, on a host with two GPUs."""
    monkeypatch.syspath_prepend(FOLDER)
    for index in range(2):
        (tmp_path / f"nvidia{index}").touch()
    monkeypatch.setattr(gpus, "DEV", str(tmp_path))
    return importlib.import_module("pynvml")


def sampled() -> GpuUse:
    use = GpuUse()
    use.sample()
    return use


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_values_have_the_units_they_are_told_in(driver: Any) -> None:
    first, second = sampled().latest()
    handle = driver.nvmlDeviceGetHandleByIndex(1)
    assert (first.uuid, first.index, first.name) == (UUID, 0, "Fake GPU")
    assert (second.uuid, second.index) == (OTHER, 1)
    assert second.utilization == driver.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    memory = driver.nvmlDeviceGetMemoryInfo(handle)
    assert (second.memory_used, second.memory_total) == (memory.used, memory.total)
    assert second.temperature == driver.nvmlDeviceGetTemperature(handle, 0)
    assert (second.power, second.power_limit) == (150.001, 300.0)
    assert second.energy is not None
    assert 0 < second.energy <= driver.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000


@pytest.mark.parametrize(
    ("lacks", "fields"),
    [
        ("GetUtilizationRates", {"utilization"}),
        ("GetMemoryInfo", {"memory_used", "memory_total"}),
        ("GetTemperature,GetPowerUsage", {"temperature", "power"}),
        ("GetTotalEnergyConsumption,GetPowerManagementLimit", {"energy", "power_limit"}),
    ],
)
@pytest.mark.usefixtures("driver")
def test_what_a_gpu_does_not_tell_is_left_out(
    monkeypatch: pytest.MonkeyPatch, lacks: str, fields: set[str]
) -> None:
    monkeypatch.setenv("FAKE_CUDA_LACKS", lacks)
    found = sampled().latest()
    assert len(found) == 2
    for gpu in found:
        assert {field for field in gpu.__struct_fields__ if getattr(gpu, field) is None} == fields


@pytest.mark.parametrize(
    ("setting", "indices"),
    [
        ("1", [1]),
        ("1,0", [0, 1]),
        (UUID, [0]),
        (OTHER[:-2], [1]),
        (UUID[:12], []),
        ("", []),
        ("7", []),
    ],
)
@pytest.mark.usefixtures("driver")
def test_only_visible_gpus_are_told_of(
    monkeypatch: pytest.MonkeyPatch, setting: str, indices: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert [gpu.index for gpu in sampled().latest()] == indices


@pytest.mark.parametrize("setting", ["MIG-b", f"MIG-{UUID}/1/0", None])
@pytest.mark.usefixtures("driver")
def test_of_a_mig_device_its_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    split = [Gpu(UUID, True, ("MIG-a", "MIG-b")), Gpu(OTHER, True, ("MIG-c",))]
    monkeypatch.setattr(gpus, "present", lambda: split)
    if setting is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert [gpu.uuid for gpu in sampled().latest()] == [UUID]


def test_what_was_read_long_ago_is_not_told(
    driver: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use, released = sampled(), threading.Event()
    monkeypatch.setattr(nvml, "DEADLINE_S", 0.05)
    monkeypatch.setattr(driver, "nvmlDeviceGetPowerUsage", lambda _: released.wait())
    try:
        for _ in range(3):
            use.sample()  # the first of which hangs
        assert len(use.latest()) == 2  # the earlier values
        monkeypatch.setattr(gpu_use, "FRESH_S", 0.0)
        assert use.latest() == ()
        assert len(warnings(caplog)) == 1
    finally:
        released.set()
    assert nvml.bounded(lambda: 1, 60.0) == 1  # the thread that hung has ended


def test_a_driver_may_go_and_come_back(driver: Any, caplog: pytest.LogCaptureFixture) -> None:
    use = sampled()
    before = use._read
    driver.nvmlShutdown()
    for _ in range(3):
        use.sample()
    assert use._read is before  # and soon too old to be told
    driver.nvmlInit()
    use.sample()
    assert len(use.latest()) == 2
    assert use._read is not before
    assert [text.rpartition(" ")[2] for text in warnings(caplog)] == ["metrics", "again"]


def test_one_gpu_that_is_lost_hides_no_other(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use, handle = sampled(), driver.nvmlDeviceGetHandleByIndex

    def lost(index: int) -> Any:
        if index == 0:
            raise driver.NVMLError("GPU is lost")
        return handle(index)

    monkeypatch.setattr(driver, "nvmlDeviceGetHandleByIndex", lost)
    monkeypatch.setattr(use, "_look_at", 0.0)  # not even while GPUs are looked for again
    use.sample()
    assert [gpu.index for gpu in use.latest()] == [1]


@pytest.mark.parametrize("missing", ["driver", "package"])
@pytest.mark.usefixtures("driver")
def test_without_a_driver_nothing_is_told_and_nothing_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "none")
    if missing == "package":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    with caplog.at_level("INFO"):
        assert sampled().latest() == ()
    assert caplog.records == []


@pytest.mark.usefixtures("driver")
def test_a_thread_of_its_own_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_use, "_EVERY_S", 0.01)
    use = GpuUse()
    use.start()
    wait_until(lambda: len(use.latest()) == 2, "a reading")
    first = use._read
    wait_until(lambda: use._read is not first, "another reading")
    use.stop()
    wait_until(lambda: "gpu-use" not in {t.name for t in threading.enumerate()}, "its end")


@pytest.mark.gpu
def test_a_real_gpu_is_told_of() -> None:
    for gpu in sampled().latest():
        assert gpu.uuid.startswith("GPU-")
        assert gpu.name
        assert gpu.memory_used is not None
        assert gpu.memory_total is not None
        assert 0 < gpu.memory_used < gpu.memory_total
        assert gpu.utilization is None or 0 <= gpu.utilization <= 1  # None: in MIG mode
        assert gpu.temperature is None or 0 < gpu.temperature < 120  # None: hidden from guests
        assert gpu.power is None or 0 < gpu.power < 2 * (gpu.power_limit or 1e4)
    assert sampled().latest()
