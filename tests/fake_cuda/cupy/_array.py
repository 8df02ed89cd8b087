"""`cupy.ndarray`: a shape over device memory, and kernels that are numpy functions.

The array's `_numpy` is never read but by operations that run on a stream.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from cupy import _dlpack, _queues, cuda
from cupy.cuda import runtime

_IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. "
    "Please use `.get()` to construct a NumPy array explicitly."
)
_SCALARS = (bool, int, float, complex, np.generic)
Key = Any


class ndarray:
    __array_ufunc__ = None  # numpy's functions do not run on devices
    __array_priority__ = 100

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = float,
        memptr: cuda.MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        dtype = np.dtype(dtype)
        if dtype.hasobject or dtype.kind in "SU":
            raise ValueError(f"Unsupported dtype {dtype}")
        nbytes = dtype.itemsize * int(np.prod(shape, dtype=object))
        self.data = memptr or cuda.alloc(nbytes)
        described = {
            "data": (self.data.ptr, False),
            "shape": shape,
            "typestr": f"|V{dtype.itemsize}",
            "strides": strides,
            "version": 3,
        }
        owner = SimpleNamespace(__array_interface__=described, memory=self.data)
        self._numpy = np.asarray(owner).view(dtype)

    def _over(self, view: np.ndarray) -> ndarray:
        """An array of the same memory, where a view of `_numpy` lies."""
        offset = view.__array_interface__["data"][0] - self.data.ptr
        memory = self.data + offset if view.size else self.data
        return ndarray(view.shape, view.dtype, memory, view.strides)

    def _content(self) -> np.ndarray:
        """For operations that run on a stream: the array in memory that still exists."""
        low, high = np.lib.array_utils.byte_bounds(self._numpy)
        _queues.check_alive(low, high - low if self.size else 0)
        return self._numpy

    # ------------------------------------------------------------------------------ description

    dtype = property(lambda self: self._numpy.dtype)
    shape = property(lambda self: self._numpy.shape)
    strides = property(lambda self: self._numpy.strides)
    ndim = property(lambda self: self._numpy.ndim)
    size = property(lambda self: self._numpy.size)
    nbytes = property(lambda self: self._numpy.nbytes)
    itemsize = property(lambda self: self._numpy.itemsize)
    device = property(lambda self: self.data.device)
    T = property(lambda self: self._over(self._numpy.T))

    @property
    def flags(self) -> SimpleNamespace:
        told = self._numpy.flags
        return SimpleNamespace(
            c_contiguous=told.c_contiguous, f_contiguous=told.f_contiguous, owndata=told.owndata
        )

    def __len__(self) -> int:
        return len(self._numpy)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError(_IMPLICIT)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = cuda.get_current_stream().ptr
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": stream or runtime.streamLegacy,
            "version": 3,
            "strides": None if self._numpy.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _dlpack.CUDA, self.data.device_id

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A capsule. The consumer's stream waits for the current one."""
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("the fake exports device memory in place only")
        if stream != -1:
            current, consumer = cuda.get_current_stream(), cuda.ExternalStream(stream or 1)
            if current._queue is not consumer._queue:
                consumer.wait_event(current.record())
        return _dlpack.export(self._numpy, self.data.device_id, max_version)

    # ------------------------------------------------------------------------------------ copies

    def get(
        self,
        stream: cuda.Stream | None = None,
        order: str = "C",
        out: np.ndarray | None = None,
        blocking: bool = True,
    ) -> np.ndarray:
        with self.device:
            source = ascontiguousarray(self)
            if out is None:
                out = np.empty(self.shape, self.dtype)
            if (out.shape, out.dtype) != (self.shape, self.dtype) or not out.flags.c_contiguous:
                raise ValueError("out must have the shape and the dtype, and be contiguous")
            stream = stream or cuda.get_current_stream()
            source.data.copy_to_host_async(out.ctypes.data, self.nbytes, stream)
            if blocking:
                stream.synchronize()
        return out

    def set(self, arr: np.ndarray, stream: cuda.Stream | None = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self._numpy.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        arr = np.ascontiguousarray(arr)
        with self.device:
            if stream is None and cuda.get_current_stream().ptr == 0:
                self.data.copy_from_host(arr.ctypes.data, self.nbytes)
                return
            stream = stream or cuda.get_current_stream()
            self.data.copy_from_host_async(arr.ctypes.data, self.nbytes, stream)
            stream._queue.add(lambda: arr)  # its memory stays until it has been read

    def item(self, *index: int) -> Any:
        return self.get().item(*index)

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self) -> bytes:
        return self.get().tobytes()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    # ----------------------------------------------------------------------------------- views

    def view(self, dtype: Any = None) -> ndarray:
        return self._over(self._numpy.view() if dtype is None else self._numpy.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        shape = shape[0] if len(shape) == 1 else shape
        try:
            return self._over(self._numpy.reshape(shape, copy=False))
        except ValueError:
            return launch(np.reshape, self, shape=shape)

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        return self._over(self._numpy.transpose(*axes))

    def squeeze(self, axis: int | None = None) -> ndarray:
        return self._over(self._numpy.squeeze(axis))

    def __getitem__(self, key: Key) -> ndarray:
        return self._over(self._numpy[_basic(key)])

    def __setitem__(self, key: Key, value: Any) -> None:
        target = self[key]
        launch(lambda v: np.broadcast_to(v, target.shape), value, out=target, casting="unsafe")

    # --------------------------------------------------------------------------------- kernels

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        return launch(lambda a: a.astype(dtype), self)

    def copy(self) -> ndarray:
        with self.device:
            return launch(np.copy, self)

    def fill(self, value: Any) -> None:
        self[...] = value


def _basic(key: Key) -> tuple[Any, ...]:
    """Slices and numbers, which make views; of other keys the fake has nothing."""
    parts = key if isinstance(key, tuple) else (key,)
    for part in parts:
        if not isinstance(part, (int, np.integer, slice, type(None), type(...))):
            raise NotImplementedError(f"the fake does not index with {type(part)}")
    return parts if any(part is ... for part in parts) else (*parts, ...)


def _stand_in(operand: Any) -> Any:
    """What has the operand's shape and dtype, and no memory of a device."""
    if isinstance(operand, ndarray):
        if operand.data.device_id != runtime.getDevice():
            raise ValueError(
                "Array device must be same as the current device: array device = "
                f"{operand.data.device_id} while current = {runtime.getDevice()}"
            )
        return np.broadcast_to(np.ones((), operand.dtype), operand.shape)
    if isinstance(operand, _SCALARS):
        return operand
    raise TypeError(f"Unsupported type {type(operand)}")


def launch(
    function: Callable[..., Any],
    *operands: Any,
    out: ndarray | None = None,
    casting: str = "same_kind",
    **options: Any,
) -> ndarray:
    """Run a function of numpy on the current stream, later; its result's array now."""
    queue = cuda.get_current_stream()._queue
    if queue.device != runtime.getDevice():
        raise runtime.CUDARuntimeError(400)
    with np.errstate(all="ignore"):
        model = np.asarray(function(*map(_stand_in, operands), **options))
    if out is None:
        out = ndarray(model.shape, model.dtype)
    elif _stand_in(out).shape != model.shape:
        raise ValueError(f"Out shape is mismatched: {out.shape}, not {model.shape}")
    elif not np.can_cast(model.dtype, out.dtype, casting):
        raise TypeError(f"output (typecode {model.dtype}) could not be coerced to {out.dtype}")
    result = out

    def kernel() -> None:
        read = [x._content() if isinstance(x, ndarray) else x for x in operands]
        with np.errstate(all="ignore"):
            result._content()[...] = np.asarray(function(*read, **options)).astype(result.dtype)

    queue.add(kernel)
    return out


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    array = a if isinstance(a, ndarray) else ndarray_from(a, dtype)
    if dtype is not None:
        array = array.astype(dtype, copy=False)
    return array if array.flags.c_contiguous else array.copy()


def ndarray_from(a: Any, dtype: Any = None) -> ndarray:
    """A device array of what is on the host. The host memory is read on the current stream."""
    host = np.ascontiguousarray(np.asarray(a, dtype)).reshape(np.shape(a))
    made = ndarray(host.shape, host.dtype)
    stream = cuda.get_current_stream()
    if host.nbytes:
        made.data.copy_from_host_async(host.ctypes.data, host.nbytes, stream)
        stream._queue.add(lambda: host)  # its memory stays until it has been read
    return made


def _operator(function: np.ufunc, swapped: bool) -> Callable[[ndarray, Any], ndarray]:
    def apply(self: ndarray, other: Any) -> ndarray:
        return launch(function, other, self) if swapped else launch(function, self, other)

    return apply


def _in_place(function: np.ufunc) -> Callable[[ndarray, Any], ndarray]:
    def apply(self: ndarray, other: Any) -> ndarray:
        return launch(function, self, other, out=self)

    return apply


def _reduction(function: Callable[..., Any]) -> Callable[..., ndarray]:
    def apply(self: ndarray, axis: Any = None, keepdims: bool = False) -> ndarray:
        return launch(function, self, axis=axis, keepdims=keepdims)

    return apply


for _name, _function in {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
}.items():
    setattr(ndarray, f"__{_name}__", _operator(_function, swapped=False))
    setattr(ndarray, f"__r{_name}__", _operator(_function, swapped=True))
    if _name != "matmul":
        setattr(ndarray, f"__i{_name}__", _in_place(_function))
for _name, _function in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    setattr(ndarray, f"__{_name}__", _operator(_function, swapped=False))
for _name in ("sum", "mean", "max", "min", "argmax", "argmin"):
    setattr(ndarray, _name, _reduction(getattr(np, _name)))
ndarray.__neg__ = lambda self: launch(np.negative, self)
ndarray.__hash__ = None
