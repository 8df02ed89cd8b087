"""Blocks of GPU memory, which the server opens through CUDA IPC handles.

Each block is an allocation of its own, not part of a CuPy or torch memory pool. The server opens
whole allocations, so an allocation must hold no arrays of other users.
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

# CUDA's allocation unit in bytes. Smaller pieces share one unit and are opened together (CUDA C++
# Programming Guide, Interprocess Communication).
_UNIT = 2 << 20
_ANSWER_S = 10.0  # seconds; the server reports a failure after 5 s
_REGIONS = "/v2/cudasharedmemory/region"


class DeviceBlocks:
    """Blocks of one GPU; implements `block_pool.BlockKind`. `refused`: True if the server refused a
    block, or the driver cannot share memory."""

    def __init__(self, transport: Transport, device: int) -> None:
        """Import CuPy. Raise ImportError without CuPy."""
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
            with cuda.Device(self.device):  # otherwise CUDA would start to use another device, too
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
        except Unavailable:  # the server may have registered the block
            self.unregister([name])
            raise
        except InvalidArgument as ex:
            # the name is unique to this block: already registered
            if "already in manager" not in ex.message:
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
    """GPU allocation with its CUDA IPC handle; implements `block_pool.Block`."""

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
    """GPU memory that is freed with this object."""

    def __init__(self, cupy: Any, device: int, size: int) -> None:
        """Allocate `size` bytes. Raise CuPy's CUDARuntimeError without such memory."""
        self.size = size
        with cupy.cuda.Device(device):
            self.address = int(cupy.cuda.runtime.malloc(size))
        weakref.finalize(self, _free, cupy, device, self.address).atexit = False


class _Alive(Struct, eq=False, weakref=True):
    """Owner of an array's memory. CuPy, and any library that takes over CuPy's array, keeps this
    object as long as the array."""

    allocation: _Allocation | None


def _free(cupy: Any, device: int, address: int) -> None:
    try:
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.free(address)
    except cupy.cuda.runtime.CUDARuntimeError:
        return  # the device is lost with its memory, or this is a forked child


def _error(status: int) -> type[ShmserveError]:
    if status == 503:
        return ResourceExhausted
    return InvalidArgument if status < 500 or status == 501 else Unavailable
