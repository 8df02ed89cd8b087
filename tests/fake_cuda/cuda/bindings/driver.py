"""Each function returns a tuple: the status, then the results."""

from enum import IntEnum


class CUresult(IntEnum):
    CUDA_SUCCESS = 0


def cuGetErrorString(error: CUresult) -> tuple[CUresult, bytes]:
    return CUresult.CUDA_SUCCESS, b"no error"


def cuDeviceGet(ordinal: int) -> tuple[CUresult, int]:
    return CUresult.CUDA_SUCCESS, ordinal


def cuDevicePrimaryCtxGetState(device: int) -> tuple[CUresult, int, int]:
    """Return flags 0, and active."""
    return CUresult.CUDA_SUCCESS, 0, 1
