"""Blocks of host memory: sealed memfds, whose descriptors are sent to the server."""

import ctypes
import fcntl
import mmap
import os
from typing import Any

import numpy as np

from shmserve.client.memory.block_pool import size_class
from shmserve.client.wire.client_connection import ControlConnection

Array = np.ndarray[Any, Any]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class HostBlock:
    """Mapped memfd; implements `block_pool.Block`."""

    def __init__(self, control: ControlConnection, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._control = control
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # running out of memory raises an error here, not SIGBUS later
            os.posix_fallocate(self.fd, 0, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self._mapping = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise
        self.address = HostBlocks.address_of(self.window(0, size)[0])

    def register(self) -> None:
        self._control.register(self.name, self.size, self.fd)

    def window(self, offset: int, nbytes: int) -> tuple[Array, object]:
        array: Array = np.frombuffer(self._mapping, np.uint8, nbytes, offset)
        return array, array  # this array is the base of every view

    def close(self) -> None:
        os.close(self.fd)


class HostBlocks:
    """Blocks of host memory; implements `block_pool.BlockKind`."""

    def __init__(self, control: ControlConnection) -> None:
        self._control = control

    size_of = staticmethod(size_class)

    def make(self, name: str, size: int) -> HostBlock:
        return HostBlock(self._control, name, size)

    def unregister(self, names: list[str]) -> None:
        self._control.unregister(names)

    @staticmethod
    def address_of(array: Array) -> int:
        if array.base is None:  # the array owns its memory, so no block contains it
            return 0
        try:  # five times as fast as the array interface
            return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
        except (TypeError, ValueError):  # read-only, or of a dtype of another library
            address: int = array.__array_interface__["data"][0]
            return address
