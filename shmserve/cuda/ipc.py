"""Device memory of other processes, opened through CUDA IPC handles.

A process opens a handle once for all users, and closes the handle with the last array. While a
handle is open, the memory stays allocated even if the exporter has died. So a handle must not be
kept longer than its region (Triton's shared-memory extension; CUDA Runtime API,
cudaIpcOpenMemHandle).
"""

import ctypes
import logging
import threading
import weakref

from msgspec import Struct

from shmserve.cuda import runtime
from shmserve.cuda.device import Device
from shmserve.errors import Internal, InvalidArgument

_log = logging.getLogger(__name__)

_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class Imported(Struct, eq=False, weakref=True):
    """Opened memory of another process: `nbytes` bytes from `address` on device `ordinal`. Every
    array on the memory keeps this object alive."""

    address: int
    nbytes: int
    ordinal: int


class Handles:
    """Open handles of this process. Thread-safe."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._open: weakref.WeakValueDictionary[bytes, Imported] = weakref.WeakValueDictionary()

    def open(self, handle: bytes, name: str) -> Imported:
        """Return the memory of a handle. `name` is the region's name, for errors. Raise
        InvalidArgument if the handle cannot be opened here. Raise ShmserveError if the device has
        failed, or has no memory left."""
        with self._lock:
            imported = self._open.get(handle)
            if imported is None:
                imported = self._opened(handle, name)
                self._open[handle] = imported
            return imported

    def __len__(self) -> int:
        return len(self._open)

    def _opened(self, handle: bytes, name: str) -> Imported:
        cuda = self._device.cupy.cuda.runtime
        try:
            with self._device.here():
                address = int(cuda.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
        except cuda.CUDARuntimeError as ex:
            if runtime.is_out_of_memory(ex):
                raise self._device.failure(ex) from None
            self._device.check()  # raise if the device is lost: a bad handle can cause any error
            _log.warning("a handle of region %r cannot be opened: %s", name, runtime.text_of(ex))
            raise InvalidArgument(
                f"the memory of CUDA shared memory region '{name}' cannot be opened"
                f" ({runtime.text_of(ex)}): is the process that exported it alive, run by the"
                " server's user in its PID namespace, and is its GPU visible to the server?"
            ) from None
        try:
            with self._device.working():
                imported = Imported(
                    address, bytes_behind(address), int(cuda.pointerGetAttributes(address).device)
                )
        except BaseException:
            _close(self._device, address)
            raise
        weakref.finalize(imported, _close, self._device, address).atexit = False
        return imported


def _close(device: Device, address: int) -> None:
    cuda = device.cupy.cuda.runtime
    try:
        with device.here():
            cuda.ipcCloseMemHandle(address)
    except cuda.CUDARuntimeError as ex:
        _log.warning("memory of another process was not closed: %s", runtime.text_of(ex))


def bytes_behind(address: int) -> int:
    """Return the number of bytes from an address to the end of its allocation (CUDA Driver API,
    because neither the runtime nor CuPy offers the call). Raise Internal if the driver returned an
    error."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    library = ctypes.CDLL("libcuda.so.1")
    status = library.cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    if status:
        raise Internal(f"the size of a CUDA allocation is not known (error {status})")
    return base.value + size.value - address
