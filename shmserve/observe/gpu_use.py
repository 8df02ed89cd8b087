"""Use of the visible GPUs, read from NVML once a second by a separate thread.

No caller waits for a driver that hangs. A reading is reported for at most `FRESH_S`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any

from shmserve.core import device_names
from shmserve.core.device_names import Gpu
from shmserve.observe import gpus, nvml
from shmserve.protocol.control.stats_messages import GpuReport

FRESH_S = 5.0
MOST = 64  # limit of reported GPUs
_EVERY_S = 1.0
_REST_S = 30.0  # pause without a driver
_LOOK_S = 60.0  # MIG devices may come and go

_log = logging.getLogger(__name__)


class GpuUse:
    """A thread that reads GPUs, and the latest reading. Without driver or package, no GPU."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._read: tuple[float, tuple[GpuReport, ...]] = (0.0, ())
        self._visible: frozenset[str] | None = None
        self._look_at = 0.0
        self._silent = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpu-use", daemon=True).start()

    def stop(self) -> None:
        """Stop reading. Does not wait for a reading that hangs."""
        self._over.set()

    def latest(self) -> tuple[GpuReport, ...]:
        """Return every visible GPU with a fresh reading."""
        moment, reports = self._read
        return reports if time.monotonic() - moment < FRESH_S else ()

    def sample(self) -> None:
        """Read all visible GPUs: done once a second by the thread, in a few seconds at most."""
        module = nvml.bindings()
        if module is None:
            return
        begun = time.monotonic()
        visible = self._look(begun)
        reports = nvml.bounded(lambda: read(module, visible)) if visible is not None else None
        if reports is not None:
            self._read = begun, reports
        if reports is None and not self._silent:
            _log.warning("the NVIDIA driver does not answer: GPUs are left out of the metrics")
        elif reports is not None and self._silent:
            _log.warning("the NVIDIA driver answers again")
        self._silent = reports is None

    def _look(self, now: float) -> frozenset[str] | None:
        """Return the visible GPUs' uuids as last known; None without any answer so far."""
        if now >= self._look_at:
            seen = visible_uuids()
            if seen is not None:
                self._visible, self._look_at = seen, now + _LOOK_S
        return self._visible

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S if nvml.bindings() is not None else _REST_S):
            self.sample()


def visible_uuids() -> frozenset[str] | None:
    """Return the uuids of GPUs that this service sees, in whole or as a MIG device.

    Return None if the driver does not answer.
    """
    present = gpus.present()
    if not all(gpu.uuid for gpu in present):
        return None
    tokens = device_names.visible(os.environ.get(device_names.VARIABLE), present)
    return frozenset(
        gpu.uuid
        for index, gpu in enumerate(present)
        if any(_is_of(token, index, gpu) for token in tokens)
    )


def _is_of(token: str, index: int, gpu: Gpu) -> bool:
    """Return True if a token of visible devices means the GPU or a part of the GPU."""
    # older names of MIG devices hold the GPU's uuid
    parent = token.removeprefix("MIG-").partition("/")[0]
    return token == str(index) or token in gpu.parts or gpu.uuid.startswith(parent)


def read(module: ModuleType, wanted: Collection[str]) -> tuple[GpuReport, ...]:
    """Return the present reading of the `wanted` GPUs (uuids). `module`: pynvml, initialised. Calls
    may hang. Raise module.NVMLError if the driver was unloaded."""
    count = min(module.nvmlDeviceGetCount(), MOST)
    reports = (_gpu(module, index, wanted) for index in range(count))
    return tuple(report for report in reports if report is not None)


def least_memory() -> int:
    """Return the bytes of the smallest visible GPU, or 0 without a GPU."""
    module = nvml.bindings()
    if module is None:
        return 0
    reports = nvml.bounded(lambda: read(module, visible_uuids() or ())) or ()
    return min((report.memory_total or 0 for report in reports), default=0)


def _gpu(module: ModuleType, index: int, wanted: Collection[str]) -> GpuReport | None:
    """Return the reading of a GPU, or None if the GPU is lost or not wanted."""

    def value(query: Callable[[], Any]) -> Any:
        try:
            return query()
        except module.NVMLError:  # usually this kind of GPU does not report the value
            return None

    def parts(query: Callable[[], int], of_a_unit: int) -> float | None:
        number = value(query)
        return None if number is None else number / of_a_unit

    handle = value(lambda: module.nvmlDeviceGetHandleByIndex(index))
    uuid = value(lambda: module.nvmlDeviceGetUUID(handle)) if handle is not None else None
    if uuid is None or uuid not in wanted:
        return None
    memory = value(lambda: module.nvmlDeviceGetMemoryInfo(handle))
    return GpuReport(
        uuid=uuid,
        index=index,
        name=value(lambda: module.nvmlDeviceGetName(handle)) or "",
        utilization=parts(lambda: module.nvmlDeviceGetUtilizationRates(handle).gpu, 100),
        memory_used=memory.used if memory is not None else None,
        memory_total=memory.total if memory is not None else None,
        temperature=value(
            lambda: module.nvmlDeviceGetTemperature(handle, module.NVML_TEMPERATURE_GPU)
        ),
        power=parts(lambda: module.nvmlDeviceGetPowerUsage(handle), 1000),
        power_limit=parts(lambda: module.nvmlDeviceGetPowerManagementLimit(handle), 1000),
        energy=parts(lambda: module.nvmlDeviceGetTotalEnergyConsumption(handle), 1000),
    )
