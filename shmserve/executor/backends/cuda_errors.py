"""Errors of CUDA that a model let through: CuPy's and torch's."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback

from shmserve.cuda import runtime
from shmserve.errors import Internal, ShmserveError

# torch's text begins so, and further lines give advice; TorchScript's operators have no
# exceptions but RuntimeError, and their text stands at the end of TorchScript's own traceback
_TORCH = re.compile(r"(?:\A|\n[\w.]+: )CUDA (?:(out of memory)|error: (.*))")


def from_cuda(ex: BaseException, purpose: str) -> ShmserveError | None:
    """The error to tell; None: it is none of CUDA's.

    After one for want of memory the arrays of the model's failed call are gone, and what
    CuPy and torch keep for later is the device's again.
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
    """The ordinal of the calling thread's device, which is the one the model worked on."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with contextlib.suppress(Exception):  # of a lost device, not even this can be asked
        if cupy is not None:
            return int(cupy.cuda.runtime.getDevice())
        if torch is not None:
            return int(torch.cuda.current_device())
    return 0
