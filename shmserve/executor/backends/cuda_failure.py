"""Errors of CUDA that a model let through: CuPy's and torch's."""

from __future__ import annotations

import contextlib
import sys
import traceback

from shmserve.cuda import runtime
from shmserve.errors import Internal, ShmserveError

_TORCH = "CUDA error: "  # what torch begins its text with; further lines give advice


def from_cuda(ex: BaseException, purpose: str) -> ShmserveError | None:
    """The error to tell; None: it is none of CUDA's.

    After one for want of memory the arrays of the model's failed call are gone, and what
    CuPy and torch keep for later is the device's again.
    """
    if runtime.is_out_of_memory(ex):
        error = runtime.error_of(ex, _device(), purpose)
        traceback.clear_frames(ex.__traceback__)
        _free_unused()
        return error
    if runtime.is_cuda_error(ex):
        return runtime.error_of(ex, _device(), purpose)
    text = str(ex) if isinstance(ex, RuntimeError) else ""
    if text.startswith(_TORCH):
        told = text.removeprefix(_TORCH).partition("\n")[0]
        return Internal(f"CUDA device {_device()} failed: {told}")
    return None


def _device() -> int:
    """The ordinal of the calling thread's device, which is the one the model worked on."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with contextlib.suppress(Exception):  # of a lost device, not even this can be asked
        if cupy is not None:
            return int(cupy.cuda.runtime.getDevice())
        if torch is not None:
            return int(torch.cuda.current_device())
    return 0


def _free_unused() -> None:
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with contextlib.suppress(Exception):  # the next request tells if the device is lost
        if cupy is not None:
            cupy.get_default_memory_pool().free_all_blocks()
        if torch is not None:
            torch.cuda.empty_cache()
