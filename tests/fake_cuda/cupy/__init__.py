"""A small fake of CuPy over memory of the host: what it does not have, shmserve does not use.

See _fake.py for devices and memory, _queues.py for streams, _array.py for arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from cupy import _dlpack, cuda
from cupy._array import ascontiguousarray as ascontiguousarray
from cupy._array import launch, ndarray, ndarray_from

__version__ = "0-fake"
bool_, float16, float32, float64 = numpy.bool_, numpy.float16, numpy.float32, numpy.float64
int8, int16, int32, int64 = numpy.int8, numpy.int16, numpy.int32, numpy.int64
uint8, uint16, uint32, uint64 = numpy.uint8, numpy.uint16, numpy.uint32, numpy.uint64
newaxis = None


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


def empty_like(a: ndarray, dtype: Any = None) -> ndarray:
    return ndarray(a.shape, dtype or a.dtype)


def zeros_like(a: ndarray, dtype: Any = None) -> ndarray:
    return zeros(a.shape, dtype or a.dtype)


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    bounds = (0, start) if stop is None else (start, stop)
    return ndarray_from(numpy.arange(*bounds, step, dtype))


def array(obj: Any, dtype: Any = None, copy: bool | None = True) -> ndarray:
    if isinstance(obj, ndarray) and obj.device != cuda.Device():
        made = ndarray(obj.shape, obj.dtype)
        source = obj.copy() if not obj.flags.c_contiguous else obj
        args = made.data.ptr, made.data.device_id, source.data.ptr, obj.data.device_id
        cuda.runtime.memcpyPeer(*args, obj.nbytes)
    elif isinstance(obj, ndarray):
        made = obj.copy() if copy else obj
    elif hasattr(obj, "__cuda_array_interface__"):
        made = _from_interface(obj)
        made = made.copy() if copy else made
    else:
        made = ndarray_from(obj, dtype)
    return made if dtype is None else made.astype(dtype, copy=False)


def asarray(a: Any, dtype: Any = None) -> ndarray:
    return array(a, dtype, copy=None)


def _from_interface(obj: Any) -> ndarray:
    told = obj.__cuda_array_interface__
    pointer, kind = told["data"][0], numpy.dtype(told["typestr"])
    memory = cuda.UnownedMemory(pointer, 0, obj)
    if told.get("stream") is not None:
        cuda.runtime.streamSynchronize(told["stream"])
    return ndarray(told["shape"], kind, cuda.MemoryPointer(memory, 0), told.get("strides"))


def from_dlpack(array: Any, *, device: Any = None, copy: bool | None = None) -> ndarray:
    """Of an object with the two methods, or a capsule; keeps the memory it is in."""
    if hasattr(array, "__dlpack_device__"):
        if array.__dlpack_device__()[0] != _dlpack.CUDA:
            raise TypeError("the fake imports device memory only")
        array = array.__dlpack__(stream=cuda.get_current_stream().ptr or cuda.runtime.streamLegacy)
    found, device_id = _dlpack.take(array)
    pointer = found.__array_interface__["data"][0]
    memory = cuda.UnownedMemory(pointer, found.nbytes, found, device_id)
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


def get_array_module(*args: Any) -> Any:
    return sys.modules[__name__ if any(isinstance(a, ndarray) for a in args) else "numpy"]


def get_default_memory_pool() -> cuda.MemoryPool:
    return cuda.memory._pool


# ---------------------------------------------------------------------------------- functions


def _function(function: Callable[..., Any]) -> Callable[..., ndarray]:
    def apply(*operands: Any, out: ndarray | None = None, **options: Any) -> ndarray:
        if not any(isinstance(operand, ndarray) for operand in operands):
            raise TypeError(f"Unsupported type {type(operands[0])}")
        return launch(function, *operands, out=out, **options)

    return apply


add = _function(numpy.add)
subtract = _function(numpy.subtract)
multiply = _function(numpy.multiply)
divide = true_divide = _function(numpy.divide)
maximum = _function(numpy.maximum)
minimum = _function(numpy.minimum)
negative = _function(numpy.negative)
exp = _function(numpy.exp)
log = _function(numpy.log)
tanh = _function(numpy.tanh)
sqrt = _function(numpy.sqrt)
matmul = _function(numpy.matmul)
where = _function(numpy.where)


def _reduction(function: Callable[..., Any]) -> Callable[..., ndarray]:
    def apply(
        a: ndarray, axis: Any = None, out: ndarray | None = None, keepdims: bool = False
    ) -> ndarray:
        return launch(function, a, axis=axis, keepdims=keepdims, out=out)

    return apply


sum = _reduction(numpy.sum)
mean = _reduction(numpy.mean)
max = _reduction(numpy.max)
min = _reduction(numpy.min)
argmax = _reduction(numpy.argmax)


def concatenate(arrays: Sequence[ndarray], axis: int = 0) -> ndarray:
    return launch(lambda *parts: numpy.concatenate(parts, axis), *arrays)


def stack(arrays: Sequence[ndarray], axis: int = 0) -> ndarray:
    return launch(lambda *parts: numpy.stack(parts, axis), *arrays)


def transpose(a: ndarray, axes: Sequence[int] | None = None) -> ndarray:
    return a.transpose(axes)


def reshape(a: ndarray, newshape: Any) -> ndarray:
    return a.reshape(newshape)
