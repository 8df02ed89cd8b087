"""Arrays in GPU memory through CuPy, which is imported on first use.

Other processes cannot see this process's CUDA streams. So the client waits for all work on a
device (`synchronize`) before telling the server of device memory, and before using the memory
again.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shmserve.cuda import runtime
from shmserve.errors import ConfigError

Array = np.ndarray[Any, Any]
_ON_A_GPU = (2, 13)  # DLPack's kDLCUDA and kDLCUDAManaged


def cupy() -> Any:
    """Return the cupy module. Raise ImportError if CuPy is missing, or cannot be loaded."""
    try:
        return runtime.cupy()
    except ConfigError as ex:
        raise ImportError(ex.message) from None


def check(device: int) -> None:
    """Raise ValueError if CUDA shows this process no such device, ImportError as `cupy`."""
    cuda = cupy().cuda.runtime
    try:
        count = int(cuda.getDeviceCount())
    except cuda.CUDARuntimeError as ex:
        raise ValueError(f"CUDA device {device} cannot be used: {ex}") from None
    if not 0 <= device < count:
        raise ValueError(f"CUDA device {device} is not there: CUDA sees {count}")


def is_on_gpu(value: Any) -> bool:
    """Return True if an array of any library lies in GPU memory, False otherwise."""
    if isinstance(value, np.ndarray):
        return False
    device = getattr(value, "__dlpack_device__", None)
    if device is not None:
        return int(device()[0]) in _ON_A_GPU
    return hasattr(value, "__cuda_array_interface__")


def as_cupy(value: Any) -> Any:
    """Return a CuPy array that shares the memory of another library's array. Raise ImportError as
    `cupy` does, and ValueError if the array cannot be shared, e.g. a torch tensor that requires a
    gradient."""
    module = cupy()
    if isinstance(value, module.ndarray):
        return value
    try:
        return module.from_dlpack(value) if hasattr(value, "__dlpack__") else module.asarray(value)
    except (BufferError, TypeError, ValueError, RuntimeError) as ex:
        raise ValueError(str(ex)) from ex


def synchronize(device: int) -> None:
    """Wait for all work on a device, started by any library of this process."""
    cupy().cuda.Device(device).synchronize()


def empty(shape: Sequence[int], dtype: np.dtype[Any], device: int) -> Any:
    """Return an uninitialised CuPy array in memory that the server cannot open."""
    module = cupy()
    with module.cuda.Device(device):
        return module.empty(tuple(shape), dtype)


def copy(source: Any, target: Any) -> None:
    """Start to copy a CuPy array to `target`, memory of equal size on the same device."""
    module = cupy()
    with source.device:
        source = module.ascontiguousarray(source)
        target.data.copy_from_device_async(source.data, source.nbytes)


def to_host(array: Any, target: Array | None = None) -> Array:
    """Copy an array to host memory and return the copy, in `target` (of equal size) if given."""
    out = None if target is None else target.view(array.dtype).reshape(array.shape)
    host: Array = array.get(out=out)
    return host


def to_device(array: Array, device: int) -> Any:
    """Copy a row-major array to a device; the copy is complete on return."""
    copied = empty(array.shape, array.dtype, device)
    if copied.nbytes:
        with copied.device:
            copied.set(array)
            cupy().cuda.get_current_stream().synchronize()
    return copied
