"""Counting devices without CUDA: NVML, device files, and an NVML that hangs."""

import sys
import threading
from types import SimpleNamespace

import pytest

from shmserve.core.device_names import Gpu
from shmserve.observe import gpus, nvml

PARTS = {0: [], 1: ["MIG-a", None, "MIG-b"]}  # by device; None: a number that is not taken


class NVMLError(Exception):
    pass


def _mig_mode(handle):
    if handle == 0:
        raise NVMLError("Not Supported")
    return [1, 1]


def _part(handle, index):
    if PARTS[handle][index] is None:
        raise NVMLError("Not Found")
    return PARTS[handle][index]


def stand_in(**changed):
    """Return a module like pynvml with two devices, the second in MIG mode."""
    functions = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "1.0",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: handle if type(handle) is str else f"GPU-{handle}",
        "nvmlDeviceGetMigMode": _mig_mode,
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: len(PARTS[handle]),
        "nvmlDeviceGetMigDeviceHandleByIndex": _part,
    }
    return SimpleNamespace(**{**functions, **changed})


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Set the host's pynvml module (or None) and number of device files."""

    def prepare(module, files=0):
        monkeypatch.setattr(nvml, "_library", nvml._Library())
        monkeypatch.setattr(nvml, "_calling", threading.Lock())
        monkeypatch.setitem(sys.modules, "pynvml", module)
        monkeypatch.setattr(gpus, "DEV", str(tmp_path))
        monkeypatch.setattr(gpus, "_cache", gpus._Cache())
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        for name in ["nvidiactl", "nvidia-uvm", *(f"nvidia{index}" for index in range(files))]:
            (tmp_path / name).touch()

    return prepare


def test_nvml_tells_devices_and_their_parts(host, monkeypatch):
    host(stand_in())
    assert gpus.present() == [Gpu("GPU-0"), Gpu("GPU-1", True, ("MIG-a", "MIG-b"))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-b,MIG-a")
    assert gpus.visible_devices() == ("MIG-b", "MIG-a")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpus.visible_devices() == ("MIG-b", "MIG-a")  # for some seconds
    monkeypatch.setattr(gpus, "_cache", gpus._Cache())
    assert gpus.visible_devices() == ("0",)


def test_device_files_are_counted_without_the_package(host):
    host(None, files=3)
    assert nvml.bindings() is None
    assert gpus.visible_devices() == ("0", "1", "2")


def test_no_driver_is_no_device(host):
    def missing():
        raise NVMLError("NVML Shared Library Not Found")

    host(stand_in(nvmlInit=missing))
    assert nvml.bindings() is None
    assert gpus.visible_devices() == ()


@pytest.mark.parametrize("where", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_driver_that_hangs_holds_nobody_up_for_good(host, monkeypatch, where):
    released = threading.Event()
    host(stand_in(**{where: released.wait}), files=1)
    if where != "nvmlInit":
        assert nvml.bindings() is not None
    monkeypatch.setattr(nvml, "DEADLINE_S", 0.05)
    try:
        assert gpus.present() == [Gpu()]
        assert nvml.bounded(lambda: 1) is None  # one thread hangs, no second one is risked
    finally:
        released.set()
    assert nvml.bounded(lambda: 1, 10.0) == 1


def test_a_thread_that_cannot_be_started_costs_one_answer(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert nvml.bounded(lambda: 1) is None
    assert nvml.bounded(lambda: 1, 10.0) == 1


def test_nvml_is_initialised_once(host):
    calls = []
    host(stand_in(nvmlInit=lambda: calls.append(1)))
    assert nvml.bindings() is nvml.bindings() is not None
    assert calls == [1]
