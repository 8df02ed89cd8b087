"""Each function returns a tuple: the status, then the results."""

import ctypes
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import Any

import cupy

_runtime = cupy.cuda.runtime
CUDA_IPC_HANDLE_SIZE = 64


class cudaError_t(IntEnum):
    cudaSuccess = 0

    @classmethod
    def _missing_(cls, value: object) -> Any:
        """Accept other statuses by number."""
        made = int.__new__(cls, value)
        made._name_, made._value_ = f"cudaError{value}", value
        return made


class cudaDeviceAttr(IntEnum):
    cudaDevAttrUnifiedAddressing = 41


class cudaMemcpyKind(IntEnum):
    cudaMemcpyDefault = 4


class cudaIpcMemHandle_t:
    """Handle whose bytes callers read at the address from `getPtr`."""

    def __init__(self, content: bytes) -> None:
        self._bytes = ctypes.create_string_buffer(content, CUDA_IPC_HANDLE_SIZE)

    def getPtr(self) -> int:
        return ctypes.addressof(self._bytes)


def _told(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Statuses instead of exceptions."""

    @wraps(function)
    def call(*arguments: Any) -> tuple[Any, ...]:
        try:
            result = function(*arguments)
        except _runtime.CUDARuntimeError as ex:
            return (cudaError_t(ex.status),)
        return (cudaError_t.cudaSuccess,) if result is None else (cudaError_t.cudaSuccess, result)

    return call


def cudaGetErrorString(error: Any) -> tuple[Any, bytes]:
    return cudaError_t.cudaSuccess, error.name.encode()


@_told
def cudaDeviceGetAttribute(attribute: cudaDeviceAttr, device: int) -> int:
    return 1


@_told
def cudaIpcGetMemHandle(address: int) -> cudaIpcMemHandle_t:
    return cudaIpcMemHandle_t(_runtime.ipcGetMemHandle(address))


@_told
def cudaMemcpyAsync(target: Any, source: Any, nbytes: int, kind: int, stream: int) -> None:
    places = [p if isinstance(p, int) else ctypes.addressof(p) for p in (target, source)]
    _runtime.memcpyAsync(*places, nbytes, int(kind), stream)


@_told
def cudaStreamCreate() -> int:
    return int(_runtime.streamCreateWithFlags(_runtime.streamDefault))


cudaGetDevice = _told(_runtime.getDevice)
cudaSetDevice = _told(_runtime.setDevice)
cudaMalloc = _told(_runtime.malloc)
cudaFree = _told(_runtime.free)
cudaStreamDestroy = _told(_runtime.streamDestroy)
cudaStreamSynchronize = _told(_runtime.streamSynchronize)
