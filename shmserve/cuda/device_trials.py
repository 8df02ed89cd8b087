"""Trials of CUDA on this host: ``python -m shmserve.cuda.device_trials PART``.

`shmserve doctor` runs each part in a separate process with a deadline, because a driver can hang
or crash a process. A part prints one JSON value. Libraries are imported only when a part runs.
"""

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from shmserve.cuda.ipc import bytes_behind

_BYTES = 8 << 20
_PORTABLE, _READ_ONLY = 1, 8  # cudaHostRegisterPortable, cudaHostRegisterReadOnly
_LAZY_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess


class DeviceFacts(Struct, frozen=True):
    """Results of the trials on one device. For each trial the error, empty after success.

    Attributes:
        kernel: compiling and running a kernel.
        matrices: multiplying matrices with cuBLAS.
        pin_writable: registering shared memory of this process and copying from it.
        pin_foreign: registering shared memory of another process and copying from it.
        peers: ordinals of other devices whose memory can be reached.
    """

    name: str
    nbytes: int
    capability: str
    kernel: str = ""
    matrices: str = ""
    pin_writable: str = ""
    pin_foreign: str = ""
    peers: tuple[int, ...] = ()


class CudaFacts(Struct, frozen=True):
    """Versions of CuPy and the driver in CUDA's form (12080 is 12.8; 0: no driver), and all
    devices in the order of this process."""

    cupy: str = ""
    runtime: int = 0
    driver: int = 0
    error: str = ""
    devices: tuple[DeviceFacts, ...] = ()


class LibraryFacts(Struct, frozen=True):
    """Facts about torch or onnxruntime. `cuda`: the library's own description of CUDA support.
    `usable`: True if the library can compute on devices."""

    version: str
    cuda: str
    usable: bool


def devices() -> CudaFacts:
    """Run the trials on every device."""
    try:
        import cupy
    except Exception as ex:
        return CudaFacts(error=f"it cannot be imported: {_line(ex)}")
    cuda = cupy.cuda.runtime
    versions = cupy.__version__, cuda.runtimeGetVersion(), cuda.driverGetVersion()
    try:
        count = cuda.getDeviceCount()
        tried = tuple(_device(cupy, ordinal, count) for ordinal in range(count))
    except Exception as ex:
        return CudaFacts(*versions, error=_line(ex))
    return CudaFacts(*versions, devices=tried)


def _device(cupy: Any, ordinal: int, count: int) -> DeviceFacts:
    cuda = cupy.cuda.runtime
    cuda.setDevice(ordinal)
    properties = cuda.getDeviceProperties(ordinal)
    own = foreign = _PORTABLE, mmap.PROT_READ | mmap.PROT_WRITE
    if cuda.deviceGetAttribute(cuda.cudaDevAttrHostRegisterReadOnlySupported, ordinal):
        foreign = _PORTABLE | _READ_ONLY, mmap.PROT_READ
    return DeviceFacts(
        properties["name"].decode(),
        properties["totalGlobalMem"],
        f"{properties['major']}.{properties['minor']}",
        _tried(partial(_kernel, cupy)),
        _tried(partial(_matrices, cupy)),
        _tried(partial(_pinned, cuda, *own)),
        _tried(partial(_pinned, cuda, *foreign)),
        tuple(k for k in range(count) if k != ordinal and cuda.deviceCanAccessPeer(ordinal, k)),
    )


def _kernel(cupy: Any) -> None:
    total = (cupy.arange(4, dtype=cupy.int32) + cupy.arange(4, dtype=cupy.int32)).get()
    _compare(total.tolist(), [0, 2, 4, 6])


def _matrices(cupy: Any) -> None:
    square = cupy.arange(4, dtype=cupy.float32).reshape(2, 2)
    _compare((square @ square).get().tolist(), [[2, 3], [6, 11]])


def _pinned(cuda: Any, flags: int, protection: int) -> None:
    """Register a shared mapping, as executors do, and copy from it."""
    fd = os.memfd_create("shmserve-doctor", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _BYTES)
        os.pwrite(fd, b"pinned", _BYTES - 6)
        shared = np.frombuffer(mmap.mmap(fd, _BYTES, prot=protection), np.uint8)
    finally:
        os.close(fd)
    address = shared.__array_interface__["data"][0]
    cuda.hostRegister(address, _BYTES, flags)
    memory = cuda.malloc(6)
    cuda.memcpy(memory, address + _BYTES - 6, 6, cuda.memcpyHostToDevice)
    _compare(_read(cuda, memory, 6), b"pinned")
    cuda.hostUnregister(address)


def export() -> None:
    """Print IPC handles of memory on every device; keep the memory until standard input ends."""
    import cupy

    cuda = cupy.cuda.runtime
    handles = []
    for ordinal in range(cuda.getDeviceCount()):
        cuda.setDevice(ordinal)
        memory = cuda.malloc(_BYTES)
        text = ctypes.create_string_buffer(_text(ordinal))
        cuda.memcpy(memory, ctypes.addressof(text), len(text), cuda.memcpyHostToDevice)
        cuda.deviceSynchronize()
        handles.append(bytes(cuda.ipcGetMemHandle(memory)).hex())
    _print(handles)
    sys.stdin.buffer.read()


def open_handles() -> list[str]:
    """Open the IPC handles of standard input. Return an error for each, empty after success."""
    import cupy

    cuda = cupy.cuda.runtime
    handles = msgspec.json.decode(sys.stdin.buffer.read(), type=list[str])
    return [_tried(partial(_opened, cuda, *numbered)) for numbered in enumerate(handles)]


def _opened(cuda: Any, ordinal: int, handle: str) -> None:
    cuda.setDevice(ordinal)
    memory = cuda.ipcOpenMemHandle(bytes.fromhex(handle), _LAZY_PEER_ACCESS)
    expected = _text(ordinal)
    _compare(_read(cuda, memory, len(expected)), expected)
    nbytes = bytes_behind(memory)
    if nbytes < _BYTES:
        raise ValueError(f"the driver says that {_BYTES} bytes of another process are {nbytes}")
    cuda.ipcCloseMemHandle(memory)


def torch() -> LibraryFacts:
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU only"
    return LibraryFacts(str(torch.__version__), cuda, torch.cuda.is_available())


def onnxruntime() -> LibraryFacts:
    """Return the version and the execution providers of ONNX Runtime."""
    import onnxruntime

    providers = onnxruntime.get_available_providers()
    usable = "CUDAExecutionProvider" in providers
    return LibraryFacts(onnxruntime.__version__, ", ".join(providers), usable)


PARTS: dict[str, Callable[[], Any]] = {
    "devices": devices,
    "export": export,
    "open": open_handles,
    "torch": torch,
    "onnxruntime": onnxruntime,
}


def _text(ordinal: int) -> bytes:
    return f"memory of device {ordinal}".encode()


def _read(cuda: Any, memory: int, nbytes: int) -> bytes:
    target = ctypes.create_string_buffer(nbytes)
    cuda.memcpy(ctypes.addressof(target), memory, nbytes, cuda.memcpyDeviceToHost)
    return target.raw


def _compare(values: object, expected: object) -> None:
    if values != expected:
        raise ValueError("other values came back than were written")


def _tried(trial: Callable[[], None]) -> str:
    try:
        trial()
    except Exception as ex:
        return _line(ex)
    return ""


def _line(ex: Exception) -> str:
    text = " ".join(str(ex).split())[:300]
    is_plain = type(ex).__name__ in ("CUDARuntimeError", "ValueError")
    return text if is_plain else f"{type(ex).__name__}: {text}"


def _print(value: Any) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    result = PARTS[sys.argv[1]]()
    if result is not None:
        _print(result)
    os._exit(0)  # threads and exit handlers of a driver must not keep the process alive
