"""The CUDA device of an executor, opened when it is needed and not before.

An instance on a GPU opens its device before its model is loaded. One on the CPU opens one
when a request names memory of a GPU, to copy it to the host and back.
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
    """The device of one executor. Any thread.

    Attributes:
        ordinal: of the instance's own device, among those this process sees; None: it is
            on the CPU.
        opened: the device, if it has been needed.
        mappings: the shared memory of this process, which the device copies from and to.
    """

    def __init__(self, ordinal: int | None, mappings: Mappings, number: int | None = None) -> None:
        """`number`: the device's among those that the service sees, if that is another."""
        self.ordinal = ordinal
        self.opened: Device | None = None
        self.mappings = mappings
        self._number = ordinal if number is None else number
        self._taken = ordinal  # stays, also if the instance cannot use it
        self._lock = threading.Lock()
        self._handles: Handles | None = None

    @classmethod
    def of(cls, device: str, mappings: Mappings) -> Devices:
        """Those of an instance on `device` ("cpu", "cuda:K"). To be called before anything of
        the process looks for devices."""
        return cls(device_names.take(device, os.environ), mappings, device_names.ordinal_of(device))

    def stay_on_cpu(self) -> None:
        """The instance cannot use its device."""
        self.ordinal = None

    def open(self, ordinal: int = 0) -> Device:
        """The instance's device; of one on the CPU: `ordinal`, as the service counts, unless it
        has one already.

        Raises:
            ConfigError: it cannot be used.
        """
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
        """How many bytes a region that is about to be registered could have.

        Raises:
            InvalidArgument: its handle leads nowhere.
            Unavailable: that cannot be told from this device.
        """
        self.open()
        assert self._handles is not None
        try:
            return self._handles.open(region.handle, region.name).nbytes
        except InvalidArgument as ex:
            if region.device_id != self._number:  # this device may not reach that one
                raise Unavailable(ex.message) from None
            raise

    def import_region(self, region: Region) -> tuple[Device, Imported]:
        """The memory of a CUDA region, and the device it is used from.

        Raises:
            InvalidArgument: it cannot be opened, is smaller than the region, or lies on a
                device that this one does not reach.
            ConfigError: no device can be used here.
        """
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
        """Let go of host memory that has been of no use for so long."""
        if self.opened is not None:
            self.opened.pins.trim(idle_s)

    def free_unused(self) -> None:
        """Let go of memory of the device that is only kept for later."""
        if self.opened is not None:
            self.opened.free_unused()

    def settle(self) -> ShmserveError | None:
        """Wait for everything that was begun on the device; what went wrong of it, if
        anything did."""
        if self.opened is None:
            return None
        try:
            self.opened.synchronize()
        except ShmserveError as ex:
            return ex
        return None


def is_on_device(array: Any) -> bool:
    """Whether it is an array in a GPU's memory; numpy's are not."""
    return type(array) is not np.ndarray and hasattr(array, "__cuda_array_interface__")
