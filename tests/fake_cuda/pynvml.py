"""A fake of nvidia-ml-py: the calls that a monitor of devices makes.

FAKE_CUDA_LACKS names, with commas, functions (without "nvmlDevice") that this device's kind lacks.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import fake_devices

NVML_TEMPERATURE_GPU = 0
NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_LIBRARY_NOT_FOUND = 12

_initialised = 0


class NVMLError(Exception):
    value = 0


class NVMLError_Uninitialized(NVMLError):
    value = NVML_ERROR_UNINITIALIZED


class NVMLError_InvalidArgument(NVMLError):
    value = NVML_ERROR_INVALID_ARGUMENT


class NVMLError_NotSupported(NVMLError):
    value = NVML_ERROR_NOT_SUPPORTED


class NVMLError_LibraryNotFound(NVMLError):
    value = NVML_ERROR_LIBRARY_NOT_FOUND


def nvmlInit() -> None:
    global _initialised
    if not fake_devices.has_driver():
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    _initialised += 1


def nvmlShutdown() -> None:
    global _initialised
    _check("Shutdown")
    _initialised -= 1


def _check(function: str) -> None:
    if not _initialised:
        raise NVMLError_Uninitialized("Uninitialized")
    if function in os.environ.get("FAKE_CUDA_LACKS", "").split(","):
        raise NVMLError_NotSupported("Not Supported")


def nvmlSystemGetDriverVersion() -> str:
    _check("SystemGetDriverVersion")
    return "570.0-fake"


def nvmlDeviceGetCount() -> int:
    _check("GetCount")
    return len(fake_devices.every())


def nvmlDeviceGetHandleByIndex(index: int) -> fake_devices.Physical:
    _check("GetHandleByIndex")
    devices = fake_devices.every()
    if not 0 <= index < len(devices):
        raise NVMLError_InvalidArgument("Invalid Argument")
    return devices[index]


def nvmlDeviceGetUUID(handle: fake_devices.Physical) -> str:
    _check("GetUUID")
    return f"{'MIG' if fake_devices.is_part(handle) else 'GPU'}-{handle.uuid}"


def nvmlDeviceGetName(handle: fake_devices.Physical) -> str:
    _check("GetName")
    return fake_devices.NAME


def nvmlDeviceGetMemoryInfo(handle: fake_devices.Physical) -> SimpleNamespace:
    _check("GetMemoryInfo")
    total = fake_devices.memory_bytes()
    used = total // 8 * (handle.index + 1)
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetUtilizationRates(handle: fake_devices.Physical) -> SimpleNamespace:
    _check("GetUtilizationRates")
    return SimpleNamespace(gpu=30 + handle.index, memory=10 + handle.index)  # percent


def nvmlDeviceGetTemperature(handle: fake_devices.Physical, sensor: int) -> int:
    _check("GetTemperature")
    if sensor != NVML_TEMPERATURE_GPU:
        raise NVMLError_InvalidArgument("Invalid Argument")
    return 40 + handle.index  # degrees Celsius


def nvmlDeviceGetPowerUsage(handle: fake_devices.Physical) -> int:
    _check("GetPowerUsage")
    return 150_000 + handle.index  # milliwatts


def nvmlDeviceGetPowerManagementLimit(handle: fake_devices.Physical) -> int:
    _check("GetPowerManagementLimit")
    return 300_000  # milliwatts


def nvmlDeviceGetEnforcedPowerLimit(handle: fake_devices.Physical) -> int:
    _check("GetEnforcedPowerLimit")
    return 290_000  # milliwatts


def nvmlDeviceGetTotalEnergyConsumption(handle: fake_devices.Physical) -> int:
    _check("GetTotalEnergyConsumption")
    return int(time.monotonic() * 150_000)  # millijoules


def nvmlDeviceGetMigMode(handle: fake_devices.Physical) -> list[int]:
    """FAKE_CUDA_MIG set: it is on, now and after the next start."""
    _check("GetMigMode")
    return [int("FAKE_CUDA_MIG" in os.environ)] * 2


def nvmlDeviceGetMaxMigDeviceCount(handle: fake_devices.Physical) -> int:
    _check("GetMaxMigDeviceCount")
    return len(fake_devices.parts(handle))


def nvmlDeviceGetMigDeviceHandleByIndex(
    handle: fake_devices.Physical, index: int
) -> fake_devices.Physical:
    _check("GetMigDeviceHandleByIndex")
    return fake_devices.parts(handle)[index]
