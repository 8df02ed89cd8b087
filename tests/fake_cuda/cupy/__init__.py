"""A small fake of CuPy over host memory, with exactly the functions that shmserve uses.

_fake.py: devices and memory; _queues.py: streams; _array.py and _kernels.py: arrays.
"""

from typing import Any

import numpy

from cupy import _dlpack, _kernels, cuda
from cupy._array import ndarray

__version__ = "0-fake"
ascontiguousarray = _kernels.ascontiguousarray
float32, int32 = numpy.float32, numpy.int32

# ----------------------------------------------------------------------------------- creation


def empty(shape: Any, dtype: Any = float) -> ndarray:
    return ndarray(shape, dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None) -> ndarray:
    made = ndarray(shape, dtype or numpy.asarray(fill_value).dtype)
    made.fill(fill_value)
    return made


def zeros(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> ndarray:
    return full(shape, 1, dtype)


def empty_like(prototype: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(prototype.shape, dtype or prototype.dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    bounds = (0, start) if stop is None else (start, stop)
    return _kernels.from_host(numpy.arange(*bounds, step, dtype))


def array(obj: Any, dtype: Any = None, copy: bool | None = True) -> ndarray:
    if isinstance(obj, ndarray) and obj.device != cuda.Device():
        source, made = ascontiguousarray(obj), ndarray(obj.shape, obj.dtype)
        ends = made.data.ptr, made.data.device_id, source.data.ptr, source.data.device_id
        cuda.runtime.memcpyPeer(*ends, obj.nbytes)
    elif isinstance(obj, ndarray):
        made = obj.copy() if copy else obj
    elif hasattr(obj, "__cuda_array_interface__"):
        made = _from_interface(obj)
        made = made.copy() if copy else made
    else:
        made = _kernels.from_host(obj, dtype)
    return made if dtype is None else made.astype(dtype, copy=False)


def asarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, copy=None)


def _from_interface(obj: Any) -> ndarray:
    told = obj.__cuda_array_interface__
    memory = cuda.UnownedMemory(told["data"][0], 0, obj)
    if told.get("stream") is not None:
        cuda.runtime.streamSynchronize(told["stream"])
    kind, pointer = numpy.dtype(told["typestr"]), cuda.MemoryPointer(memory, 0)
    return ndarray(told["shape"], kind, pointer, told.get("strides"))


def from_dlpack(array: Any, *, device: Any = None, copy: bool | None = None) -> ndarray:
    """Import an object with the two DLPack methods, or a capsule; keep the memory alive."""
    if device is not None or copy:
        raise NotImplementedError("the fake imports in place only")
    if hasattr(array, "__dlpack_device__"):
        if array.__dlpack_device__()[0] != _dlpack.CUDA:
            raise TypeError("the fake imports device memory only")
        array = array.__dlpack__(stream=cuda.get_current_stream().ptr or cuda.runtime.streamLegacy)
    found, device_id = _dlpack.take(array)
    address = found.__array_interface__["data"][0]
    memory = cuda.UnownedMemory(address, found.nbytes, found, device_id)
    return ndarray(found.shape, found.dtype, cuda.MemoryPointer(memory, 0), found.strides)


def asnumpy(
    a: Any,
    stream: cuda.Stream | None = None,
    order: str = "C",
    out: numpy.ndarray | None = None,
    *,
    blocking: bool = True,
) -> numpy.ndarray:
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    return numpy.asarray(a)


def get_default_memory_pool() -> cuda.MemoryPool:
    return cuda.memory._pool


# ---------------------------------------------------------------------------------- functions

add = _kernels.elementwise(numpy.add)
subtract = _kernels.elementwise(numpy.subtract)
multiply = _kernels.elementwise(numpy.multiply)
divide = _kernels.elementwise(numpy.divide)
exp = _kernels.elementwise(numpy.exp)
sqrt = _kernels.elementwise(numpy.sqrt)
