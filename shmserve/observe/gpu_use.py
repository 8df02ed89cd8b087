"""How busy the visible GPUs are, read from NVML once a second by a thread of its own.

Nobody waits for a driver that hangs, and what it said long ago is not told: a reading is told
for `FRESH_S` at most.
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
MOST = 64  # GPUs that are told of
_EVERY_S = 1.0
_REST_S = 30.0  # where there is no driver, or none yet
_LOOK_S = 60.0  # MIG devices may come and go

_log = logging.getLogger(__name__)


class GpuUse:
    """A thread that reads, and what it has read last. Where there is no driver, or no package
    for it, there is no GPU."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._read: tuple[float, tuple[GpuReport, ...]] = (0.0, ())
        self._visible: frozenset[str] | None = None
        self._look_at = 0.0
        self._silent = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpu-use", daemon=True).start()

    def stop(self) -> None:
        """Read no more. A reading that hangs is not waited for."""
        self._over.set()

    def latest(self) -> tuple[GpuReport, ...]:
        """Every visible GPU of which there is a fresh reading."""
        moment, reports = self._read
        return reports if time.monotonic() - moment < FRESH_S else ()

    def sample(self) -> None:
        """Read all; what `start`'s thread does once a second. Takes a few seconds at most."""
        module = nvml.bindings()
        if module is None:
            return
        begun = time.monotonic()
        wanted = self._look(begun)
        reports = nvml.bounded(lambda: read(module, wanted)) if wanted is not None else None
        if reports is not None:
            self._read = begun, reports
        if reports is None and not self._silent:
            _log.warning("the NVIDIA driver does not answer: GPUs are left out of the metrics")
        elif reports is not None and self._silent:
            _log.warning("the NVIDIA driver answers again")
        self._silent = reports is None

    def _look(self, now: float) -> frozenset[str] | None:
        """Which GPUs are visible, as last known; None: the driver has never said."""
        if now >= self._look_at:
            seen = visible_uuids()
            if seen is not None:
                self._visible, self._look_at = seen, now + _LOOK_S
        return self._visible

    def _run(self) -> None:
        while not self._over.wait(_EVERY_S if nvml.bindings() is not None else _REST_S):
            self.sample()


def visible_uuids() -> frozenset[str] | None:
    """The GPUs that this service sees, or has a MIG device of; None: the driver is silent."""
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
    """Whether a token of `devices.visible` stands for the GPU or for a part of it."""
    parent = token.removeprefix("MIG-").partition("/")[0]  # of a part's older name
    return token == str(index) or token in gpu.parts or gpu.uuid.startswith(parent)


def read(module: ModuleType, wanted: Collection[str]) -> tuple[GpuReport, ...]:
    """The wanted GPUs (uuids) right now. `module`: pynvml, initialised; may hang.

    Raises:
        module.NVMLError: the driver has gone.
    """
    count = min(module.nvmlDeviceGetCount(), MOST)
    reports = (_gpu(module, index, wanted) for index in range(count))
    return tuple(report for report in reports if report is not None)


def least_memory() -> int:
    """Bytes of the smallest of the visible GPUs; 0: there is none."""
    module = nvml.bindings()
    if module is None:
        return 0
    reports = nvml.bounded(lambda: read(module, visible_uuids() or ())) or ()
    return min((report.memory_total or 0 for report in reports), default=0)


def _gpu(module: ModuleType, index: int, wanted: Collection[str]) -> GpuReport | None:
    """One GPU; None: it is lost, or not wanted."""

    def value(query: Callable[[], Any]) -> Any:
        try:
            return query()
        except module.NVMLError:  # most often: this kind of GPU does not tell that
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
