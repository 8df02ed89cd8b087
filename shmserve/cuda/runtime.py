"""CuPy module, imported on first use, and the meaning of CUDA errors."""

import contextlib
import sys
from typing import Any

from shmserve.errors import ConfigError, DeviceMemoryExhausted, Internal, ShmserveError

EXTRA = (
    "CUDA devices need the extra 'gpu': pip install 'shmserve[gpu]', or for the client alone"
    " 'shmserve-client[gpu]'"
)

# After these errors, every CUDA call of the process fails (CUDA Runtime API, cudaError_t: "the
# context cannot be used", "leaves the process in an inconsistent state")
_LOST = frozenset({46, 214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999})
_OUT_OF_MEMORY = 2


def cupy() -> Any:
    """Return the cupy module. Raise ConfigError if CuPy is missing, or cannot be loaded."""
    try:
        import cupy as module
    except ModuleNotFoundError as ex:
        if ex.name != "cupy":
            raise ConfigError(f"CuPy cannot be imported: it needs {ex.name}") from None
        raise ConfigError(EXTRA) from None
    except ImportError:
        raise ConfigError("CuPy cannot be imported: `shmserve doctor` tells why") from None
    return module


def is_cuda_error(ex: BaseException) -> bool:
    """Return True for CuPy's exceptions that report an error of CUDA's runtime or driver."""
    return type(ex).__name__ in ("CUDARuntimeError", "CUDADriverError")


def is_out_of_memory(ex: BaseException) -> bool:
    if type(ex).__name__ == "OutOfMemoryError":
        return True
    return is_cuda_error(ex) and getattr(ex, "status", 0) == _OUT_OF_MEMORY


def is_lost(ex: BaseException) -> bool:
    """Return True if the device is unusable in this process from now on."""
    return is_cuda_error(ex) and getattr(ex, "status", 0) in _LOST


def text_of(ex: BaseException) -> str:
    """Return CUDA's name and text of an error, which contain no address and no path."""
    return str(ex) if is_cuda_error(ex) else type(ex).__name__


def error_of(ex: BaseException, ordinal: int, purpose: str = "request") -> ShmserveError:
    """Return the error for the client for an exception of CuPy."""
    if is_out_of_memory(ex):
        return no_memory(ordinal, purpose)
    return Internal(f"CUDA device {ordinal} failed: {text_of(ex)}")


def free_unused() -> None:
    """Release the memory that CuPy and torch keep cached on the calling thread's device. Neither
    library can release the other's memory."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with contextlib.suppress(Exception):  # the next call tells if the device is lost
        if cupy is not None:
            cupy.get_default_memory_pool().free_all_blocks()
        if torch is not None:
            torch.cuda.empty_cache()


def no_memory(ordinal: int, purpose: str) -> ShmserveError:
    return DeviceMemoryExhausted(f"CUDA device {ordinal} has no memory left for this {purpose}")
