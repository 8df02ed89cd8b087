"""Computations: numpy's functions, run on a stream when a caller waits for the stream."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy import _queues, cuda
from cupy._array import ndarray
from cupy.cuda import runtime

_SCALARS = (bool, int, float, complex, np.generic)


def _stand_in(operand: Any) -> Any:
    """Return an array with the operand's shape and dtype, without device memory."""
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


def _content(operand: Any) -> Any:
    """Return the array if its memory still exists."""
    if isinstance(operand, np.ndarray) and operand.size:
        low, high = np.lib.array_utils.byte_bounds(operand)
        _queues.check_alive(low, high - low)
    return operand


def launch(
    function: Callable[..., Any],
    *operands: Any,
    out: ndarray | None = None,
    casting: str = "same_kind",
    **options: Any,
) -> ndarray:
    """Queue a function of numpy on the current stream and return the array for its result.

    As with a real kernel, only the caller keeps the used memory alive.
    """
    queue = cuda.get_current_stream()._queue
    if queue.device != runtime.getDevice():
        raise runtime.CUDARuntimeError(400)
    with np.errstate(all="ignore"):
        model = np.asarray(function(*map(_stand_in, operands), **options))
    result = ndarray(model.shape, model.dtype) if out is None else out
    if _stand_in(result).shape != model.shape:
        raise ValueError(f"Out shape is mismatched: {result.shape}, not {model.shape}")
    if not np.can_cast(model.dtype, result.dtype, casting):
        raise TypeError(f"output of {model.dtype} could not be coerced to {result.dtype}")
    target = result._numpy
    sources = [x._numpy if isinstance(x, ndarray) else x for x in operands]

    def kernel() -> None:
        with np.errstate(all="ignore"):
            made = function(*map(_content, sources), **options)
            _content(target)[...] = np.asarray(made).astype(target.dtype)

    queue.add(kernel)
    return result


def from_host(a: Any, dtype: Any = None) -> ndarray:
    """Return a device array of host data, which is read on the current stream."""
    host = np.array(a, dtype, order="C", copy=None)
    made = ndarray(host.shape, host.dtype)
    made._set_later(host, cuda.get_current_stream())
    return made


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    array = a if isinstance(a, ndarray) else from_host(a, dtype)
    if dtype is not None and array.dtype != dtype:
        return array.astype(dtype)
    return array if array.flags.c_contiguous else array.copy()


def elementwise(function: Callable[..., Any]) -> Callable[..., ndarray]:
    """Make `cupy.add` and similar functions."""

    def apply(*args: Any, out: ndarray | None = None) -> ndarray:
        if not any(isinstance(operand, ndarray) for operand in args):
            raise TypeError(f"Unsupported type {type(args[0])}")
        return launch(function, *args, out=out)

    return apply


def reduction(function: Callable[..., Any]) -> Callable[..., ndarray]:
    """Make `cupy.sum` and similar functions, which are methods too."""

    def apply(
        a: ndarray, /, axis: Any = None, out: ndarray | None = None, keepdims: bool = False
    ) -> ndarray:
        return launch(function, a, axis=axis, keepdims=keepdims, out=out)

    return apply


# ------------------------------------------------------------------------ methods of the array


def _astype(self: ndarray, dtype: Any, copy: bool = True) -> ndarray:
    if not copy and self.dtype == dtype:
        return self
    return launch(lambda a: a.astype(dtype), self)


def _copy(self: ndarray) -> ndarray:
    with self.device:
        return launch(np.copy, self)


def _set_item(self: ndarray, key: Any, value: Any) -> None:
    target = self[key]
    shape = target.shape
    launch(lambda v: np.broadcast_to(v, shape), value, out=target, casting="unsafe")


def _binary(function: np.ufunc) -> Callable[[ndarray, Any], ndarray]:
    return lambda self, other: launch(function, self, other)


def _swapped(function: np.ufunc) -> Callable[[ndarray, Any], ndarray]:
    return lambda self, other: launch(function, other, self)


def _in_place(function: np.ufunc) -> Callable[[ndarray, Any], ndarray]:
    return lambda self, other: launch(function, self, other, out=self)


_ARITHMETIC = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
    "matmul": np.matmul,
}
_COMPARISONS = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
for _name, _function in (_ARITHMETIC | _COMPARISONS).items():
    setattr(ndarray, f"__{_name}__", _binary(_function))
for _name, _function in _ARITHMETIC.items():
    setattr(ndarray, f"__r{_name}__", _swapped(_function))
    if _name != "matmul":
        setattr(ndarray, f"__i{_name}__", _in_place(_function))
for _name in ("sum", "mean", "max", "min", "argmax", "argmin"):
    setattr(ndarray, _name, reduction(getattr(np, _name)))
ndarray.astype = _astype
ndarray.copy = _copy
ndarray.fill = lambda self, value: _set_item(self, ..., value)
ndarray.__setitem__ = _set_item
ndarray.__neg__ = lambda self: launch(np.negative, self)
