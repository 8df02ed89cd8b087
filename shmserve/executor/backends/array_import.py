"""What a model gives for an output, as an array on its own memory."""

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

    Takes numpy's and CuPy's arrays as they are, and whatever speaks DLPack or has
    `__cuda_array_interface__`, such as torch's tensors, without a copy.

    Raises:
        Internal: the value is no array, or one of a type or layout that cannot be told.
        ConfigError: it lies in a GPU's memory, and CuPy cannot be used here.
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
