"""DLPack capsules by hand: tensors handed between frameworks without a copy.

numpy and CuPy support DLPack too, but not (or not in every version) for BF16, and numpy refuses
read-only arrays in the unversioned form that Triton's models expect. So the structures are laid
out here with ctypes, after the DLPack 0.8 header. An exported capsule is a numpy capsule with
changed contents. Its destructor and deleter are C code, because capsules also die while an
exception propagates, when no Python code can run.

Order of work on a GPU, after the protocol: a tensor taken here is complete for all later work on
the device's default stream. A consumer with another stream calls `let_wait`.

Ownership: a capsule is named "dltensor" until a consumer takes the tensor out. The consumer
renames the capsule to "used_dltensor" and calls the tensor's deleter once when done. An unused
capsule calls the deleter itself.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from shmserve.cuda import runtime
from shmserve.executor.backends.array_views import array_at, device_array_at
from shmserve.tensor.dtypes import DATATYPES, from_numpy

CPU = (1, 0)
CUDA = 2  # kDLCUDA
_CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost: the CPU can read both
_MANAGED = 13  # kDLCUDAManaged, on no particular device
_LEGACY_STREAM = 1  # number of the default stream in the protocol

_NAME = ctypes.create_string_buffer(b"dltensor")
_USED = ctypes.create_string_buffer(b"used_dltensor")  # static, as capsules keep the pointer
# (type code, bits) of every datatype but BYTES
_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (d.dlpack, 8 * d.itemsize): d.numpy for d in DATATYPES.values() if d.itemsize
}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_api = ctypes.pythonapi
# Separate PYFUNCTYPE prototypes, because other libraries may set the signatures of the shared
# pythonapi functions
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_IsValid", _api)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_GetPointer", _api)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetName", _api)
)


def device_of(array: Any) -> tuple[int, int]:
    """Return the device of a numpy or CuPy array, in DLPack's numbers."""
    return CPU if isinstance(array, np.ndarray) else (CUDA, array.device.id)


def export(array: Any, owner: object = None) -> object:
    """Return a capsule on the memory of a numpy or CuPy array. Array and owner live until the
    tensor is deleted.

    The unversioned form cannot say "read-only": a consumer must not write to an input's tensor.

    Raises:
        TypeError: DLPack has no such element type.
    """
    kind = from_numpy(array.dtype)
    if kind is None or not kind.itemsize:
        raise TypeError(f"DLPack has no element type for {array.dtype}")
    if any(stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    device = device_of(array)
    address = array.ctypes.data if device == CPU else array.data.ptr
    dtype = np.dtype(f"u{kind.itemsize}") if kind.extension else array.dtype
    capsule = array_at(address, array.shape, dtype, (array, owner), array.strides).__dlpack__()
    tensor = _Managed.from_address(_pointer(capsule, ctypes.addressof(_NAME))).tensor
    tensor.data, tensor.code = address, kind.dlpack
    tensor.device_type, tensor.device_id = device
    return capsule


def let_wait(stream: int | None, device: int) -> None:
    """Wait for the work on a device's default stream before a consumer uses another stream.

    `stream`: as the consumer passes it to `__dlpack__`. None and 1 mean the default stream itself,
    -1 means not to wait.
    """
    if stream not in (None, -1, 0, _LEGACY_STREAM):
        cuda = runtime.cupy().cuda
        with cuda.Device(device):
            cuda.Stream.null.synchronize()


def is_capsule(value: object) -> bool:
    """Return True for a PyCapsule, used or not."""
    return type(value).__name__ == "PyCapsule"


class _Taken:
    """Tensor taken out of a capsule; calls the deleter when the last array on it is gone."""

    def __init__(self, managed: _Managed, address: int) -> None:
        self._deleter = managed.deleter
        self._address = address

    def __del__(self) -> None:
        if self._deleter:
            _Deleter(self._deleter)(self._address)


def take(source: Any) -> Any:
    """Take the tensor out of a capsule, or of an object with `__dlpack__`. Return a numpy array on
    the tensor's memory, or a CuPy array for GPU memory.

    Raises:
        TypeError: neither a capsule nor an exporter, or an element type without a datatype.
        ValueError: the capsule was used before, or the tensor lies on another kind of device.
        ConfigError: the tensor lies in GPU memory, and CuPy cannot be used here.
    """
    if not is_capsule(source):
        source = _ask(source)
    if not _is_valid(source, ctypes.addressof(_NAME)):
        raise ValueError("the DLPack capsule was used before, or is of another version")
    address = _pointer(source, ctypes.addressof(_NAME))
    managed = _Managed.from_address(address)
    tensor = managed.tensor
    _check_device(tensor.device_type)
    dtype = _dtype(tensor)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
    _set_name(source, ctypes.addressof(_USED))
    taken = _Taken(managed, address)
    data = (tensor.data or 0) + tensor.byte_offset
    if tensor.device_type in _CPU_DEVICES:
        return array_at(data, shape, dtype, taken, strides)
    device = -1 if tensor.device_type == _MANAGED else tensor.device_id  # -1: unknown
    return device_array_at(data, shape, dtype, taken, device, strides)


def _ask(exporter: Any) -> Any:
    if not hasattr(exporter, "__dlpack__"):
        raise TypeError(f"a {type(exporter).__name__} is neither a DLPack capsule nor gives one")
    device = getattr(exporter, "__dlpack_device__", None)
    kind, number = (int(part) for part in (device() if device is not None else CPU))
    _check_device(kind)
    if kind in _CPU_DEVICES:
        return exporter.__dlpack__()
    with runtime.cupy().cuda.Device(number):
        return exporter.__dlpack__(stream=_LEGACY_STREAM)


def _check_device(kind: int) -> None:
    if kind not in (*_CPU_DEVICES, CUDA, _MANAGED):
        raise ValueError("the DLPack tensor is neither in host memory nor in that of a CUDA device")


def _dtype(tensor: _Tensor) -> np.dtype[Any]:
    dtype = _DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise TypeError(
            f"no datatype for DLPack elements of code {tensor.code}, "
            f"{tensor.bits} bits, {tensor.lanes} lanes"
        )
    return dtype
