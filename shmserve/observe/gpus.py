"""CUDA devices visible to this service, found without any CUDA call.

NVML is asked if nvidia-ml-py is installed. Otherwise the driver's device files are counted.
"""

import os
import re
import threading
import time
from typing import Any

from shmserve.core import device_names
from shmserve.core.device_names import Gpu
from shmserve.observe import nvml

DEV = "/dev"
_FILE = re.compile(r"nvidia[0-9]+")
_KEEP_S = 5.0


class _Cache:
    """Tokens of the visible devices, cached for some seconds. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: tuple[str, ...] = ()
        self._until = 0.0

    def tokens(self) -> tuple[str, ...]:
        """Return the tokens, looked up again if too old."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._tokens = device_names.visible(
                    os.environ.get(device_names.VARIABLE), present()
                )
                self._until = time.monotonic() + _KEEP_S
            return self._tokens


_cache = _Cache()


def visible_devices() -> tuple[str, ...]:
    """Return a token per visible device (see `core.device_names.visible`), at most seconds old.

    Takes up to `nvml.DEADLINE_S` if the driver hangs.
    """
    return _cache.tokens()


def present() -> list[Gpu]:
    """Return the physically present devices, in the driver's order."""
    library = nvml.bindings()
    devices = nvml.bounded(lambda: _ask(library)) if library is not None else None
    return [Gpu()] * _device_files() if devices is None else devices


def _ask(library: Any) -> list[Gpu]:
    """Return the devices as NVML reports them. Raises NVML's errors."""
    count = library.nvmlDeviceGetCount()
    return [_gpu(library, library.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]


def _gpu(library: Any, handle: Any) -> Gpu:
    uuid = library.nvmlDeviceGetUUID(handle)
    try:
        mig = library.nvmlDeviceGetMigMode(handle)[0] != 0
    except library.NVMLError:  # this kind of device has no MIG mode
        mig = False
    return Gpu(uuid, mig, tuple(_parts(library, handle)) if mig else ())


def _parts(library: Any, handle: Any) -> list[str]:
    """Return the names of a device's MIG devices. NVML raises for unused numbers."""
    names = []
    for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            names.append(library.nvmlDeviceGetUUID(part))
        except library.NVMLError:
            continue
    return names


def _device_files() -> int:
    try:
        return sum(_FILE.fullmatch(name) is not None for name in os.listdir(DEV))
    except OSError:
        return 0
