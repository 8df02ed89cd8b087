"""`cupy.ndarray`: a shape over device memory. _kernels.py adds the computations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from cupy import _dlpack, cuda
from cupy.cuda import runtime

_IMPLICIT = (
    "Implicit conversion to a NumPy array is not allowed. "
    "Please use `.get()` to construct a NumPy array explicitly."
)


def _over(
    address: int, shape: Any, dtype: np.dtype, strides: Any, memory: object = None
) -> np.ndarray:
    """Return a numpy array over device memory, which only `memory` protects from being freed."""
    described = {
        "data": (address, False),
        "shape": shape,
        "typestr": f"|V{dtype.itemsize}",
        "strides": strides,
        "version": 3,
    }
    owner = SimpleNamespace(__array_interface__=described, memory=memory)
    return np.asarray(owner).view(dtype)


class ndarray:
    """Device array. Only streams may read the content of `_numpy`; its shape and dtype are free to
    use."""

    __array_ufunc__ = None  # numpy's functions do not run on devices
    __hash__ = None

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
        self._numpy = _over(self.data.ptr, shape, dtype, strides)

    def _view(self, view: np.ndarray) -> ndarray:
        """An array of the same memory, where a view of `_numpy` lies."""
        offset = view.__array_interface__["data"][0] - self.data.ptr if view.size else 0
        return ndarray(view.shape, view.dtype, self.data + offset, view.strides)

    # ------------------------------------------------------------------------------ description

    dtype = property(lambda self: self._numpy.dtype)
    shape = property(lambda self: self._numpy.shape)
    strides = property(lambda self: self._numpy.strides)
    ndim = property(lambda self: self._numpy.ndim)
    size = property(lambda self: self._numpy.size)
    nbytes = property(lambda self: self._numpy.nbytes)
    itemsize = property(lambda self: self._numpy.itemsize)
    device = property(lambda self: self.data.device)
    T = property(lambda self: self._view(self._numpy.T))

    @property
    def flags(self) -> SimpleNamespace:
        told = self._numpy.flags
        return SimpleNamespace(c_contiguous=told.c_contiguous, f_contiguous=told.f_contiguous)

    def __len__(self) -> int:
        return len(self._numpy)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError(_IMPLICIT)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": cuda.get_current_stream().ptr or runtime.streamLegacy,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
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
        """Return a capsule. The consumer's stream (None: the default stream) waits for the current
        stream."""
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("the fake exports device memory in place only")
        if stream != -1:
            current, consumer = cuda.get_current_stream(), cuda.ExternalStream(stream or 1)
            if current._queue is not consumer._queue:
                consumer.wait_event(current.record())
        kept = _over(self.data.ptr, self.shape, self.dtype, self.strides, self.data.mem)
        return _dlpack.export(kept, self.data.device_id, max_version)

    # ------------------------------------------------------------------------------------ copies

    def get(
        self,
        stream: cuda.Stream | None = None,
        order: str = "C",
        out: np.ndarray | None = None,
        blocking: bool = True,
    ) -> np.ndarray:
        """`blocking=False`: the result must be kept until the stream has been waited for."""
        out = np.empty(self.shape, self.dtype) if out is None else out
        if (out.shape, out.dtype) != (self.shape, self.dtype) or not out.flags.c_contiguous:
            raise ValueError("out must have the shape and the dtype, and be contiguous")
        with self.device:
            source = self if self.flags.c_contiguous else self.copy()
            stream = stream or cuda.get_current_stream()
            source.data.copy_to_host_async(out.ctypes.data, self.nbytes, stream)
            if blocking:
                stream.synchronize()
        return out

    def set(self, arr: np.ndarray, stream: cuda.Stream | None = None) -> None:
        """The array must be kept until the stream has been waited for; which the default is."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        with self.device:
            given = stream or cuda.get_current_stream()
            self._set_later(np.ascontiguousarray(arr), given)
            if stream is None and given.ptr == 0:
                given.synchronize()

    def _set_later(self, arr: np.ndarray, stream: Any) -> None:
        """Read `arr` on a stream, and keep `arr` alive until then."""
        self.data.copy_from_host_async(arr.ctypes.data, self.nbytes, stream)
        stream._queue.add(lambda: arr)

    def item(self, *args: int) -> Any:
        return self.get().item(*args)

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
        return self._view(self._numpy.view() if dtype is None else self._numpy.view(dtype))

    def reshape(self, *shape: Any) -> ndarray:
        shape = shape[0] if len(shape) == 1 else shape
        if not self.flags.c_contiguous:
            return self.copy().reshape(shape)
        return self._view(self._numpy.reshape(shape))

    def ravel(self) -> ndarray:
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        return self._view(self._numpy.transpose(*axes))

    def squeeze(self, axis: int | None = None) -> ndarray:
        return self._view(self._numpy.squeeze(axis))

    def __getitem__(self, key: Any) -> ndarray:
        """Slices and numbers, which make views; of other keys the fake has nothing."""
        parts = key if isinstance(key, tuple) else (key,)
        for part in parts:
            if not isinstance(part, (int, np.integer, slice, type(None), type(...))):
                raise NotImplementedError(f"the fake does not index with {type(part)}")
        whole = any(part is ... for part in parts)
        return self._view(self._numpy[parts if whole else (*parts, ...)])
