"""Blocks of a GPU's memory, which the server opens through CUDA's IPC handles.

Each is an allocation of its own, not part of a pool of CuPy's or torch's: the server opens
allocations as a whole, and only what nobody else's arrays lie in may be passed on.
"""

from __future__ import annotations

import base64
import weakref
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.client.memory import device_arrays
from shmserve.client.memory.block_pool import size_class
from shmserve.client.wire.cancel_scope import shielded
from shmserve.client.wire.http_transport import Transport
from shmserve.client.wire.inference_error import InferenceError
from shmserve.errors import InvalidArgument, ResourceExhausted, ShmserveError, Unavailable

# What CUDA allocates: smaller pieces share one, and are opened together (CUDA C++ Programming
# Guide, Interprocess Communication)
_UNIT = 2 << 20
_ANSWER_S = 10.0  # a server that cannot tell says so after 5 s
_REGIONS = "/v2/cudasharedmemory/region"


class DeviceBlocks:
    """Blocks of one device; implements `block_pool.BlockKind`.

    Attributes:
        refused: the server has refused a block, or the driver cannot share any.
    """

    def __init__(self, transport: Transport, device: int) -> None:
        """Raises ImportError without CuPy."""
        self.refused = False
        self.device = device
        self.cupy = device_arrays.cupy()
        self._transport = transport

    def size_of(self, nbytes: int) -> int:
        return -(-size_class(nbytes) // _UNIT) * _UNIT

    def make(self, name: str, size: int) -> DeviceBlock:
        cuda = self.cupy.cuda
        try:
            allocation = _Allocation(self.cupy, self.device, size)
        except cuda.runtime.CUDARuntimeError as ex:
            raise OSError(str(ex)) from None
        try:
            with cuda.Device(self.device):  # else CUDA begins to use another, too
                handle: bytes = cuda.runtime.ipcGetMemHandle(allocation.address)
        except cuda.runtime.CUDARuntimeError as ex:
            self.refused = True
            raise OSError(str(ex)) from None
        return DeviceBlock(self, name, allocation, handle)

    def register(self, name: str, size: int, handle: bytes) -> None:
        document = {
            "raw_handle": {"b64": base64.b64encode(handle).decode()},
            "device_id": self.device,
            "byte_size": size,
        }
        try:
            self._post(f"{name}/register", msgspec.json.encode(document))
        except Unavailable:  # nobody knows whether it is there
            self.unregister([name])
            raise
        except InvalidArgument as ex:
            if "already in manager" not in ex.message:  # names are ours alone: the same memory
                self.refused = True
                raise

    def unregister(self, names: list[str]) -> None:
        for name in names:
            self._post(f"{name}/unregister")

    def address_of(self, array: Any) -> int:
        return int(array.data.ptr)

    def _post(self, path: str, body: bytes = b"") -> None:
        try:
            path = f"{_REGIONS}/{path}"
            with shielded():
                reply = self._transport.request("POST", path, body=[body], timeout_s=_ANSWER_S)
        except InferenceError as ex:
            raise Unavailable(ex.message) from None
        if reply.status != 200:
            raise _error(reply.status)(reply.error)


class DeviceBlock:
    """One allocation; implements `block_pool.Block`. `handle`: CUDA's, for other processes."""

    def __init__(self, kind: DeviceBlocks, name: str, memory: _Allocation, handle: bytes) -> None:
        self.name, self.size, self.address = name, memory.size, memory.address
        self._kind = kind
        self._allocation: _Allocation | None = memory
        self._handle = handle

    def register(self) -> None:
        self._kind.register(self.name, self.size, self._handle)

    def window(self, offset: int, nbytes: int) -> tuple[Any, object]:
        cupy, alive = self._kind.cupy, _Alive(self._allocation)
        if alive.allocation is None:
            raise InferenceError(0, "the client has given up its memory meanwhile")
        memory = cupy.cuda.UnownedMemory(self.address, self.size, alive, self._kind.device)
        pointer = cupy.cuda.MemoryPointer(memory, offset)
        return cupy.ndarray((nbytes,), "uint8", memptr=pointer), alive

    def close(self) -> None:
        self._allocation = None


class _Allocation:
    """Memory that is freed with this object."""

    def __init__(self, cupy: Any, device: int, size: int) -> None:
        """Raises CuPy's CUDARuntimeError: there is none left."""
        self.size = size
        with cupy.cuda.Device(device):
            self.address = int(cupy.cuda.runtime.malloc(size))
        weakref.finalize(self, _free, cupy, device, self.address).atexit = False


class _Alive(Struct, eq=False, weakref=True):
    """What CuPy, and whoever CuPy's arrays are passed on to, keeps as long as an array of it."""

    allocation: _Allocation | None


def _free(cupy: Any, device: int, address: int) -> None:
    try:
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.free(address)
    except cupy.cuda.runtime.CUDARuntimeError:
        return  # the device is lost, and its memory with it; or a forked child tries


def _error(status: int) -> type[ShmserveError]:
    if status == 503:
        return ResourceExhausted
    return InvalidArgument if status < 500 or status == 501 else Unavailable
