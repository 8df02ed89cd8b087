"""Fake of nvidia-ml-py: the calls that a device monitor makes.

FAKE_CUDA_LACKS names functions (with commas, without "nvmlDevice") that the devices do not
support.
"""

import os
import time
import types

import fake_devices
from fake_devices import Physical

NVML_TEMPERATURE_GPU = 0
_initialised = 0


class NVMLError(Exception):
    def __init__(self, value: int = 0) -> None:
        super().__init__(value)
        self.value = value


class NVMLError_Uninitialized(NVMLError):
    pass


class NVMLError_InvalidArgument(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


def nvmlInit() -> None:
    global _initialised
    if not fake_devices.has_driver():
        raise NVMLError_LibraryNotFound(12)
    _initialised += 1


def nvmlShutdown() -> None:
    global _initialised
    _check("Shutdown")
    _initialised -= 1


def _check(function: str) -> None:
    if not _initialised:
        raise NVMLError_Uninitialized(1)
    if function in os.environ.get("FAKE_CUDA_LACKS", "").split(","):
        raise NVMLError_NotSupported(3)


def nvmlSystemGetDriverVersion() -> str:
    _check("SystemGetDriverVersion")
    return "570.0-fake"


def nvmlDeviceGetCount() -> int:
    _check("GetCount")
    return len(fake_devices.every())


def nvmlDeviceGetHandleByIndex(index: int) -> Physical:
    _check("GetHandleByIndex")
    if not 0 <= index < len(fake_devices.every()):
        raise NVMLError_InvalidArgument(2)
    return fake_devices.every()[index]


def nvmlDeviceGetUUID(handle: Physical) -> str:
    _check("GetUUID")
    return handle.name


def nvmlDeviceGetName(handle: Physical) -> str:
    _check("GetName")
    return fake_devices.NAME


def nvmlDeviceGetMemoryInfo(handle: Physical) -> types.SimpleNamespace:
    _check("GetMemoryInfo")
    total = fake_devices.memory_bytes()
    used = total // 8 * (handle.index + 1)
    return types.SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetUtilizationRates(handle: Physical) -> types.SimpleNamespace:
    _check("GetUtilizationRates")
    return types.SimpleNamespace(gpu=30 + handle.index, memory=10 + handle.index)  # percent


def nvmlDeviceGetTemperature(handle: Physical, sensor: int) -> int:
    _check("GetTemperature")
    if sensor != NVML_TEMPERATURE_GPU:
        raise NVMLError_InvalidArgument(2)
    return 40 + handle.index  # degrees Celsius


def nvmlDeviceGetPowerUsage(handle: Physical) -> int:
    _check("GetPowerUsage")
    return 150_000 + handle.index  # milliwatts


def nvmlDeviceGetPowerManagementLimit(handle: Physical) -> int:
    _check("GetPowerManagementLimit")
    return 300_000  # milliwatts


def nvmlDeviceGetTotalEnergyConsumption(handle: Physical) -> int:
    _check("GetTotalEnergyConsumption")
    return int(time.monotonic() * 150_000)  # millijoules


def nvmlDeviceGetMigMode(device: Physical) -> list[int]:
    """Now, and after the next reset."""
    _check("GetMigMode")
    return [int(bool(device.parts))] * 2


def nvmlDeviceGetMaxMigDeviceCount(device: Physical) -> int:
    _check("GetMaxMigDeviceCount")
    return 7 if device.parts else 0


def nvmlDeviceGetMigDeviceHandleByIndex(device: Physical, index: int) -> Physical:
    _check("GetMigDeviceHandleByIndex")
    if not 0 <= index < len(device.parts):
        raise NVMLError_NotFound(6)
    return device.parts[index]
