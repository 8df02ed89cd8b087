"""The parts of `cupy.cuda` that the fake supports."""

from cupy.cuda import device, driver, memory, runtime, stream
from cupy.cuda.device import Device
from cupy.cuda.memory import BaseMemory, MemoryPointer, MemoryPool, UnownedMemory, alloc
from cupy.cuda.stream import Event, ExternalStream, Stream, get_current_stream

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "MemoryPointer",
    "MemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "device",
    "driver",
    "get_current_stream",
    "is_available",
    "memory",
    "runtime",
    "stream",
]


def is_available() -> bool:
    try:
        return runtime.getDeviceCount() > 0
    except runtime.CUDARuntimeError as ex:
        if ex.status not in (35, 100):
            raise
        return False
