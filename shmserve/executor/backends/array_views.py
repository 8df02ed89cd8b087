"""Array views: numpy and CuPy arrays on memory that another object owns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from shmserve.cuda import runtime


class _Memory:
    """Memory lent to numpy. Arrays keep this object alive, and this object keeps the owner
    alive."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self._owner = owner


def array_at(
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    owner: object,
    strides: tuple[int, ...] | None = None,
) -> np.ndarray[Any, Any]:
    """Return an array at an address, without a copy.

    Args:
        address: address of the first element; ignored if there are no elements.
        shape: shape in elements.
        dtype: element type of fixed size.
        owner: object kept alive as long as the array or a view of it.
        strides: strides in bytes; None for row-major.
    """
    if 0 in shape:
        return np.empty(shape, dtype)
    interface = {
        "version": 3,
        "shape": shape,
        "typestr": f"|V{dtype.itemsize}",  # numpy has no type string for BF16
        "data": (address, False),
        "strides": strides,
    }
    return np.asarray(_Memory(interface, owner)).view(dtype)


def device_array_at(
    address: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    owner: object,
    device: int,
    strides: tuple[int, ...] | None = None,
) -> Any:
    """Return a CuPy array at an address in GPU memory, without a copy. Arguments as `array_at`.

    `device`: CUDA ordinal in this process; -1: CUDA finds the device from the address.

    Raise ConfigError if CuPy cannot be used here.
    """
    cupy = runtime.cupy()
    if 0 in shape:
        return cupy.empty(shape, dtype)
    nbytes = math.prod(shape) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(address, nbytes, owner, device)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)
