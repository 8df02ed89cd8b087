"""DLPack of the fake: numpy's own tensors, with the device changed."""

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

_CPU, CUDA = 1, 2  # DLDeviceType
_UINT, _BFLOAT = 1, 4  # DLDataTypeCode
_TENSOR_AT = {b"dltensor": 0, b"dltensor_versioned": 32}  # in the managed tensor
_api = ctypes.pythonapi
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Tensor(ctypes.Structure):
    """The head of DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
    )


class _OnHost:
    """Object that numpy can import: a capsule whose tensor is declared as host memory."""

    def __init__(self, capsule: object) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: object) -> object:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU, 0


def _tensor(capsule: object) -> _Tensor:
    for name, offset in _TENSOR_AT.items():
        if _api.PyCapsule_IsValid(capsule, name):
            return _Tensor.from_address(_api.PyCapsule_GetPointer(capsule, name) + offset)
    raise ValueError("A DLPack tensor object cannot be consumed multiple times")


def export(array: np.ndarray, device: int, max_version: tuple[int, int] | None) -> object:
    """Return a capsule that keeps `array`, declared as device memory; versioned if both sides
    support versions."""
    bfloat = array.dtype == ml_dtypes.bfloat16
    known = array.view(np.uint16) if bfloat else array
    capsule = known.__dlpack__(max_version=max_version)
    tensor = _tensor(capsule)
    tensor.device_type, tensor.device_id = CUDA, device
    if bfloat:
        tensor.code = _BFLOAT
    return capsule


def take(capsule: Any) -> tuple[np.ndarray, int]:
    """Return an array that owns the tensor, whose content must not be read, and the device."""
    tensor = _tensor(capsule)
    if tensor.device_type != CUDA:
        raise RuntimeError("CuPy is built against CUDA, different from the backend of the tensor")
    device, bfloat = tensor.device_id, tensor.code == _BFLOAT
    tensor.device_type, tensor.device_id = _CPU, 0
    if bfloat:
        tensor.code = _UINT
    found = np.from_dlpack(_OnHost(capsule))
    return (found.view(ml_dtypes.bfloat16) if bfloat else found), device
