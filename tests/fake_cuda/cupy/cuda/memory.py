"""Memory of the fake's arrays.

The pool allocates and frees at once, in the order of the array's stream. As mostly in the real
pool, blocks lie inside allocations, not at their start.
"""

from __future__ import annotations

from collections.abc import Callable

from cupy import _fake, _queues
from cupy.cuda import runtime
from cupy.cuda.device import Device
from cupy.cuda.stream import _BaseStream, get_current_stream

_BEFORE = 512  # bytes of an allocation before the pool's block


class OutOfMemoryError(MemoryError):
    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes)."
        )


class BaseMemory:
    ptr: int
    size: int
    device_id: int

    @property
    def device(self) -> Device:
        return Device(self.device_id)


class PooledMemory(BaseMemory):
    def __init__(self, size: int) -> None:
        self.size = size
        self.device_id = runtime.getDevice()
        self._queue = get_current_stream()._queue
        self._base = runtime.malloc(_BEFORE + size)
        self.ptr = self._base + _BEFORE

    def __del__(self, usable: Callable[[], bool] = _fake.usable) -> None:
        base = getattr(self, "_base", 0)
        if not base or not usable():
            return
        if self._queue.operations:
            self._queue.add(lambda: _fake.free(base))
        else:
            _fake.free(base)


class UnownedMemory(BaseMemory):
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id < 0:
            device_id = runtime.pointerGetAttributes(ptr).device
        self.ptr, self.size, self._owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: BaseMemory, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id
        self.device = mem.device

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __int__(self) -> int:
        return self.ptr

    def _add(self, dst: int, src: int, size: int, kind: int, stream: _BaseStream | None) -> None:
        queue = (stream or get_current_stream())._queue
        _queues.add_copy(queue, dst, src, size, kind)

    def copy_from_host_async(self, mem: int, size: int, stream: _BaseStream | None = None) -> None:
        self._add(self.ptr, mem, size, runtime.memcpyHostToDevice, stream)

    def copy_to_host_async(self, mem: int, size: int, stream: _BaseStream | None = None) -> None:
        self._add(mem, self.ptr, size, runtime.memcpyDeviceToHost, stream)

    def copy_from_device_async(
        self, src: MemoryPointer, size: int, stream: _BaseStream | None = None
    ) -> None:
        self._add(self.ptr, src.ptr, size, runtime.memcpyDeviceToDevice, stream)


class MemoryPool:
    def malloc(self, size: int) -> MemoryPointer:
        try:
            return MemoryPointer(PooledMemory(size), 0)
        except _fake.CUDARuntimeError as ex:
            if ex.status != 2:
                raise
            raise OutOfMemoryError(size, _fake.used(runtime.getDevice())) from None

    def used_bytes(self) -> int:
        return _fake.used(runtime.getDevice())

    def total_bytes(self) -> int:
        return self.used_bytes()

    def free_all_blocks(self, stream: _BaseStream | None = None) -> None:
        """Nothing to do: the pool keeps no blocks."""


_pool = MemoryPool()


def alloc(size: int) -> MemoryPointer:
    return _pool.malloc(size)
