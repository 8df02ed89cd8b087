"""Array import: takes a model's output as an array on the model's own memory."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from shmserve.cuda import runtime
from shmserve.errors import Internal
from shmserve.executor.backends import dlpack
from shmserve.executor.devices import is_on_device


def to_array(value: Any, where: str) -> Any:
    """Return a value as a numpy or CuPy array.

    numpy and CuPy arrays are returned unchanged. Objects with DLPack or
    `__cuda_array_interface__`, such as torch tensors, are taken without a copy.

    Raises:
        Internal: the value is no array, or has an unknown type or layout.
        ConfigError: the value lies in GPU memory, and CuPy cannot be used here.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return value
    try:
        if hasattr(value, "__dlpack__"):
            return dlpack.take(value)
        if is_on_device(value):
            return runtime.cupy().asarray(value)
    except (TypeError, ValueError, BufferError) as ex:
        raise Internal(f"{where}: {ex}") from None
    raise Internal(f"{where} must be an array, got {type(value).__name__}")
