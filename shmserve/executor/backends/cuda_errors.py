"""CUDA errors: recognises errors of CuPy and torch that a model let through."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback

from shmserve.cuda import runtime
from shmserve.errors import Internal, ShmserveError

# Torch's texts begin like this; further lines give advice. TorchScript's operators raise only
# RuntimeError, with torch's text at the end of TorchScript's own traceback.
_TORCH = re.compile(r"(?:\A|\n[\w.]+: )CUDA (?:(out of memory)|error: (.*))")


def from_cuda(ex: BaseException, purpose: str) -> ShmserveError | None:
    """Return the error for the client, or None if the exception is not from CUDA.

    After an out-of-memory error, the arrays of the failed call are released, and CuPy and torch
    have returned their unused memory to the device.
    """
    torchs = _TORCH.search(str(ex)) if isinstance(ex, RuntimeError) else None
    if runtime.is_out_of_memory(ex) or (torchs and torchs[1]):
        error = runtime.no_memory(_device(), purpose)
        traceback.clear_frames(ex.__traceback__)
        runtime.free_unused()
        return error
    if runtime.is_cuda_error(ex):
        return runtime.error_of(ex, _device(), purpose)
    if torchs:
        return Internal(f"CUDA device {_device()} failed: {torchs[2]}")
    return None


def _device() -> int:
    """Return the ordinal of the calling thread's device, on which the model has worked."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with contextlib.suppress(Exception):  # a lost device does not even answer this
        if cupy is not None:
            return int(cupy.cuda.runtime.getDevice())
        if torch is not None:
            return int(torch.cuda.current_device())
    return 0
