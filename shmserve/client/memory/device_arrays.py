"""Arrays in the memory of GPUs, through CuPy, which is imported when one is met or asked for.

Other processes know nothing of this one's streams. So nothing is told to the server, or used
again, before everything that was begun on the device has ended (`synchronize`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shmserve.cuda import runtime
from shmserve.errors import ConfigError

Array = np.ndarray[Any, Any]
_ON_A_GPU = (2, 13)  # kDLCUDA and kDLCUDAManaged of DLPack


def cupy() -> Any:
    """The cupy module.

    Raises:
        ImportError: it is not installed, or its libraries cannot be loaded.
    """
    try:
        return runtime.cupy()
    except ConfigError as ex:
        raise ImportError(ex.message) from None


def check(device: int) -> None:
    """Raises ValueError if CUDA shows this process no such device; else as `cupy`."""
    cuda = cupy().cuda.runtime
    try:
        count = int(cuda.getDeviceCount())
    except cuda.CUDARuntimeError as ex:
        raise ValueError(f"CUDA device {device} cannot be used: {ex}") from None
    if not 0 <= device < count:
        raise ValueError(f"CUDA device {device} is not there: CUDA sees {count}")


def is_on_gpu(value: Any) -> bool:
    """Whether an array, of whatever library, lies in a GPU's memory."""
    if isinstance(value, np.ndarray):
        return False
    device = getattr(value, "__dlpack_device__", None)
    if device is not None:
        return int(device()[0]) in _ON_A_GPU
    return hasattr(value, "__cuda_array_interface__")


def as_cupy(value: Any) -> Any:
    """A CuPy array of the very memory of another library's array.

    Raises:
        ImportError: as `cupy`.
        ValueError: the array cannot be passed on, e.g. a torch tensor that requires a gradient.
    """
    module = cupy()
    if isinstance(value, module.ndarray):
        return value
    try:
        return module.from_dlpack(value) if hasattr(value, "__dlpack__") else module.asarray(value)
    except (BufferError, TypeError, ValueError, RuntimeError) as ex:
        raise ValueError(str(ex)) from ex


def synchronize(device: int) -> None:
    """Wait for everything that was begun on a device, by whatever library of this process."""
    cupy().cuda.Device(device).synchronize()


def empty(shape: Sequence[int], dtype: np.dtype[Any], device: int) -> Any:
    """A CuPy array in memory that only this process can use."""
    module = cupy()
    with module.cuda.Device(device):
        return module.empty(tuple(shape), dtype)


def copy(source: Any, target: Any) -> None:
    """Start to copy a CuPy array to `target`, as many bytes of the same device."""
    module = cupy()
    with source.device:
        source = module.ascontiguousarray(source)
        target.data.copy_from_device_async(source.data, source.nbytes)


def to_host(array: Any, target: Array | None = None) -> Array:
    """The elements in host memory, in `target` if there is one: as many bytes."""
    out = None if target is None else target.view(array.dtype).reshape(array.shape)
    host: Array = array.get(out=out)
    return host


def to_device(array: Array, device: int) -> Any:
    """A copy of a row-major array on a device, complete for whatever stream uses it."""
    copied = empty(array.shape, array.dtype, device)
    if copied.nbytes:
        with copied.device:
            copied.set(array)
            cupy().cuda.get_current_stream().synchronize()
    return copied
