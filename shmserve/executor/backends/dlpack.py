"""DLPack capsules by hand: tensors handed between frameworks without a copy.

numpy speaks DLPack too, but not for BF16, and it refuses read-only arrays in the
unversioned form that Triton's models expect. So the structures are laid out here
(ctypes), after the DLPack 0.8 header.

Ownership: a capsule is named "dltensor" until somebody takes the tensor out; the taker
renames it to "used_dltensor" and calls the tensor's deleter once when done. A capsule
that nobody took calls the deleter itself.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

from shmserve.executor.backends.foreign import array_at
from shmserve.tensor.dtypes import DATATYPES

CPU_DEVICES = (1, 3)  # kDLCPU, kDLCUDAHost: both can be read here
CPU = (1, 0)

_NAME = ctypes.create_string_buffer(b"dltensor")  # capsules keep the pointer, so it must stay
_USED = ctypes.create_string_buffer(b"used_dltensor")
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4
_BF16 = np.dtype(ml_dtypes.bfloat16)

# (type code, bits) of every datatype but BYTES
_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (_BFLOAT if d.numpy == _BF16 else _CODES[d.numpy.kind], 8 * d.itemsize): d.numpy
    for d in DATATYPES.values()
    if d.itemsize
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
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_api = ctypes.pythonapi
# PYFUNCTYPE prototypes of our own, not attributes of the shared pythonapi functions, whose
# signatures other libraries may set too
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCapsule_New", _api)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_IsValid", _api)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_GetPointer", _api)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetName", _api)
)
# For a capsule that is being destroyed: as a plain pointer, since its count is zero already
_dying_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCapsule_IsValid", _api)
)
_dying_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(
    ("PyCapsule_GetPointer", _api)
)

# Address of a _Managed of ours -> everything that must outlive it
_lent: dict[int, tuple[object, ...]] = {}


def _delete(address: int) -> None:
    _lent.pop(address, None)


def _destroy_capsule(capsule: int) -> None:
    if _dying_is_valid(capsule, ctypes.addressof(_NAME)):
        _lent.pop(_dying_pointer(capsule, ctypes.addressof(_NAME)), None)


# The callbacks C code calls; module-level names, because they must never be collected
_delete_callback = _Deleter(_delete)
_destroy_callback = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_destroy_capsule)
_DELETE = ctypes.cast(_delete_callback, ctypes.c_void_p)
_DESTROY = ctypes.cast(_destroy_callback, ctypes.c_void_p)


def export(array: np.ndarray[Any, Any]) -> object:
    """A capsule on an array's own memory; the array lives until the tensor is deleted.

    The form has no way to say "read-only": whoever takes an input's tensor must not
    write to it.

    Raises:
        TypeError: DLPack has no such element type.
    """
    code = _BFLOAT if array.dtype == _BF16 else _CODES.get(array.dtype.kind)
    if code is None or not array.dtype.isnative or array.itemsize > 8:
        raise TypeError(f"DLPack has no element type for {array.dtype}")
    if any(stride % array.itemsize for stride in array.strides):
        array = np.ascontiguousarray(array)
    numbers = ctypes.c_int64 * array.ndim
    shape = numbers(*array.shape)
    strides = numbers(*(stride // array.itemsize for stride in array.strides))
    tensor = _Tensor(
        data=array.ctypes.data,
        device_type=CPU[0],
        device_id=CPU[1],
        ndim=array.ndim,
        code=code,
        bits=8 * array.itemsize,
        lanes=1,
        shape=shape,
        strides=strides,
        byte_offset=0,
    )
    managed = _Managed(tensor, None, _DELETE.value)
    address = ctypes.addressof(managed)
    _lent[address] = (managed, shape, strides, array)
    return _new(address, ctypes.addressof(_NAME), _DESTROY.value)


def is_capsule(value: object) -> bool:
    """Whether it is a PyCapsule, taken or not."""
    return type(value).__name__ == "PyCapsule"


class _Taken:
    """A tensor taken out of a capsule; gives it back when the last array on it is gone."""

    def __init__(self, managed: _Managed, address: int) -> None:
        self._deleter = managed.deleter
        self._address = address

    def __del__(self) -> None:
        if self._deleter:
            _Deleter(self._deleter)(self._address)


def take(source: Any) -> np.ndarray[Any, Any]:
    """The tensor of a capsule, or of an object with `__dlpack__`, as an array on its memory.

    Raises:
        TypeError: neither a capsule nor an exporter, or an element type without a datatype.
        ValueError: the capsule was used before, or the tensor is not in host memory.
    """
    if not is_capsule(source):
        source = _ask(source)
    if not _is_valid(source, ctypes.addressof(_NAME)):
        raise ValueError("the DLPack capsule was used before, or is of another version")
    address = _pointer(source, ctypes.addressof(_NAME))
    managed = _Managed.from_address(address)
    tensor = managed.tensor
    if tensor.device_type not in CPU_DEVICES:
        raise ValueError("the DLPack tensor is not in host memory")
    dtype = _dtype(tensor)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = None
    if tensor.strides:
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
    _set_name(source, ctypes.addressof(_USED))
    taken = _Taken(managed, address)
    return array_at((tensor.data or 0) + tensor.byte_offset, shape, dtype, taken, strides)


def _ask(exporter: Any) -> Any:
    if not hasattr(exporter, "__dlpack__"):
        raise TypeError(f"a {type(exporter).__name__} is neither a DLPack capsule nor gives one")
    device = getattr(exporter, "__dlpack_device__", None)
    if device is not None and int(device()[0]) not in CPU_DEVICES:
        raise ValueError("the DLPack tensor is not in host memory")
    return exporter.__dlpack__()


def _dtype(tensor: _Tensor) -> np.dtype[Any]:
    found = _DTYPES.get((tensor.code, tensor.bits))
    if found is None or tensor.lanes != 1:
        raise TypeError(
            f"no datatype for DLPack elements of code {tensor.code}, "
            f"{tensor.bits} bits, {tensor.lanes} lanes"
        )
    return found
