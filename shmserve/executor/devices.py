"""The CUDA device of an executor, opened on first need.

An instance on a GPU opens its device before its model is loaded. An instance on the CPU opens a
device when a request names GPU memory, to copy that memory to the host and back.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from shmserve.core import device_names
from shmserve.core.registry import Region
from shmserve.errors import InvalidArgument, ShmserveError, Unavailable
from shmserve.shm.mappings import Mappings

if TYPE_CHECKING:
    from shmserve.cuda.device import Device
    from shmserve.cuda.ipc import Handles, Imported

log = logging.getLogger(__name__)


class Devices:
    """The device of one executor. For any thread.

    Attributes:
        ordinal: number of the instance's own device among the devices of this process; None: the
            instance is on the CPU.
        opened: the device, once a request or the model has needed the device.
        mappings: shared memory of this process, which the device copies from and to.
    """

    def __init__(self, ordinal: int | None, mappings: Mappings, number: int | None = None) -> None:
        """Create without opening a device. `number`: number of the device among the devices of the
        service; None: equal to `ordinal`."""
        self.ordinal = ordinal
        self.opened: Device | None = None
        self.mappings = mappings
        self._number = ordinal if number is None else number
        self._taken = ordinal  # kept even if the instance cannot use the device
        self._lock = threading.Lock()
        self._handles: Handles | None = None

    @classmethod
    def of(cls, device: str, mappings: Mappings) -> Devices:
        """Return the devices of an instance on `device` ("cpu", "cuda:K"). Must be called before
        any code of the process looks for CUDA devices."""
        return cls(device_names.take(device, os.environ), mappings, device_names.ordinal_of(device))

    def stay_on_cpu(self) -> None:
        """Note that the instance cannot use its device."""
        self.ordinal = None

    def open(self, ordinal: int = 0) -> Device:
        """Return the instance's device. An instance on the CPU opens device `ordinal`, in the
        numbering of the service, unless it has opened another before. Raise ConfigError if the
        device cannot be used."""
        with self._lock:
            if self.opened is None:
                from shmserve.cuda.device import Device
                from shmserve.cuda.ipc import Handles

                chosen = self.ordinal
                if chosen is None:
                    chosen = self._taken if ordinal == self._number else ordinal
                assert chosen is not None
                self.opened = Device(chosen, self.mappings)
                self._handles = Handles(self.opened)
                log.info("uses CUDA device %d (%s)", chosen, self.opened.name)
            return self.opened

    def probe(self, region: Region) -> int:
        """Return the size, in bytes, of the device memory behind a region that is about to be
        registered. Raise InvalidArgument if the region's handle names no memory. Raise Unavailable
        if the handle cannot be opened here: the region is on another device, perhaps out of
        reach."""
        self.open()
        assert self._handles is not None
        try:
            return self._handles.open(region.handle, region.name).nbytes
        except InvalidArgument as ex:
            # this device may be unable to reach the region's device
            if region.device_id != self._number:
                raise Unavailable(ex.message) from None
            raise

    def import_region(self, region: Region) -> tuple[Device, Imported]:
        """Open the memory of a CUDA region. Return the device that uses the memory, and the memory.
        Raise InvalidArgument if the memory cannot be opened, is smaller than the region, or is on a
        GPU that the device cannot reach. Raise ConfigError if no device can be used here."""
        device = self.open(region.device_id)
        assert self._handles is not None
        imported = self._handles.open(region.handle, region.name)
        if imported.nbytes < region.byte_size:
            raise InvalidArgument(
                f"CUDA shared memory region '{region.name}' has {region.byte_size} bytes, but its"
                f" allocation has {imported.nbytes}"
            )
        if not device.reaches(imported.ordinal):
            raise InvalidArgument(
                f"CUDA shared memory region '{region.name}' lies on device {imported.ordinal},"
                f" which device {device.ordinal} of this instance cannot reach (no peer access)"
            )
        return device, imported

    def trim(self, idle_s: float) -> None:
        """Release pinned host memory that has been idle for `idle_s` seconds."""
        if self.opened is not None:
            self.opened.pins.trim(idle_s)

    def free_unused(self) -> None:
        """Release device memory that is only cached."""
        if self.opened is not None:
            self.opened.free_unused()

    def settle(self) -> ShmserveError | None:
        """Wait for all work on the device. Return the error of this work, or None."""
        if self.opened is None:
            return None
        try:
            self.opened.synchronize()
        except ShmserveError as ex:
            return ex
        return None


def is_on_device(array: Any) -> bool:
    """Return True for an array in GPU memory, False for numpy's arrays."""
    return type(array) is not np.ndarray and hasattr(array, "__cuda_array_interface__")
