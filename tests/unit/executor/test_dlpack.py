"""DLPack by hand: capsules of ours and of numpy, lifetimes, refusals."""

from __future__ import annotations

import ctypes
import gc
import struct
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve.executor.backends import dlpack
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.tensor import Tensor


class Lender:
    """An object with the two DLPack methods, as frameworks have."""

    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int] = (1, 0)) -> None:
        self.array = array
        self.device = device

    def __dlpack__(self, **_options: object) -> object:
        return dlpack.export(self.array)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 4)])
@pytest.mark.parametrize("dtype", ["?", "u1", "i8", "f2", "f8", ml_dtypes.bfloat16])
def test_round_trip(shape: tuple[int, ...], dtype: Any) -> None:
    array = np.ones(shape, dtype)
    array.flags.writeable = False
    got = dlpack.take(dlpack.export(array))
    assert (got.shape, got.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(got, array)
    if array.size:
        assert got.ctypes.data == array.ctypes.data


def test_strided_and_reversed_arrays() -> None:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    for array in (base.T, base[::2, 1::3], base[::-1], base[:, ::-2]):
        got = dlpack.take(dlpack.export(array))
        np.testing.assert_array_equal(got, array)
        assert np.shares_memory(got, base)


def test_strides_that_are_no_multiples_are_copied() -> None:
    record = np.zeros(3, np.dtype([("a", "u1"), ("b", "<f4")]))
    record["b"] = [1, 2, 3]
    np.testing.assert_array_equal(dlpack.take(dlpack.export(record["b"])), [1, 2, 3])


def test_a_capsule_holds_its_tensor() -> None:
    tensor = Tensor("T", np.arange(3.0))
    before = sys.getrefcount(tensor)
    capsule = tensor.to_dlpack()
    assert sys.getrefcount(tensor) == before + 1
    del capsule
    assert sys.getrefcount(tensor) == before


def test_numpy_reads_our_capsules() -> None:
    array = np.arange(6.0).reshape(2, 3)
    got = np.from_dlpack(Lender(array))  # type: ignore[arg-type]
    np.testing.assert_array_equal(got, array)
    assert np.shares_memory(got, array)


def test_we_read_numpys_capsules() -> None:
    array = np.arange(6.0).reshape(2, 3)
    for source in (array, array.__dlpack__(), array.T):
        got = dlpack.take(source)
        assert np.shares_memory(got, array)
    np.testing.assert_array_equal(got, array.T)


@pytest.mark.parametrize(
    ("dtype", "export"), [(ml_dtypes.bfloat16, dlpack.export), (float, np.ndarray.__dlpack__)]
)
def test_the_array_lives_as_long_as_a_view(dtype: Any, export: Any) -> None:
    class Memory(np.ndarray[Any, Any]):
        pass

    array = np.arange(4, dtype=dtype).view(Memory)
    alive = weakref.ref(array)
    view = dlpack.take(export(array))[1:]
    del array
    gc.collect()
    assert alive() is not None
    assert view.tolist() == [1, 2, 3]
    del view
    gc.collect()
    assert alive() is None


def test_a_capsule_nobody_took_gives_back() -> None:
    array = np.zeros(3)
    alive, capsules = weakref.ref(array), [dlpack.export(array)]
    del array
    assert alive() is not None
    capsules.clear()
    assert alive() is None


def test_a_capsule_that_dies_by_an_exception_gives_back_and_hides_nothing() -> None:
    array = np.zeros(3)
    alive = weakref.ref(array)
    with pytest.raises(ZeroDivisionError):
        print(dlpack.export(array), 1 / 0)
    del array
    assert alive() is None


def test_a_capsule_is_taken_once() -> None:
    capsule = dlpack.export(np.zeros(3))
    dlpack.take(capsule)
    with pytest.raises(ValueError, match="used before"):
        dlpack.take(capsule)


def test_the_structure_others_see() -> None:
    """Field by field, as C code would read the structure."""
    array = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    capsule = dlpack.export(array)
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    raw = ctypes.string_at(get(capsule, b"dltensor"), 64)
    data, device, dimensions, *element, offset, deleter = struct.unpack("<Qi4xiBB18xQ8xQ", raw)
    assert (data, device, dimensions) == (array.ctypes.data, 1, 2)  # the CPU
    assert (element, offset) == ([4, 16], 0)  # bfloat, bits
    assert deleter


def test_refusals() -> None:
    for act, given, words in (
        (dlpack.export, np.array([b"a"], object), "no element type for object"),
        (dlpack.export, np.zeros(1, ">f4"), "no element type"),
        (dlpack.take, [1, 2], "neither a DLPack capsule"),
        (dlpack.take, np.zeros(2, np.complex64), "no datatype for DLPack elements"),
    ):
        with pytest.raises(TypeError, match=words):
            act(given)
    with pytest.raises(ValueError, match="neither in host memory nor in that of a CUDA device"):
        dlpack.take(Lender(np.zeros(1), (4, 0)))


def test_tensor_uses_it() -> None:
    array = np.arange(3.0)
    tensor = Tensor("A", array)
    assert np.shares_memory(Tensor.from_dlpack("B", tensor.to_dlpack()).as_numpy(), array)
    assert np.shares_memory(Tensor.from_dlpack("B", tensor).as_numpy(), array)
    assert np.shares_memory(np.from_dlpack(tensor), array)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        np.from_dlpack(tensor, copy=True)  # type: ignore[arg-type]
    array.flags.writeable = False
    assert np.shares_memory(Tensor.from_dlpack("B", array).as_numpy(), array)
    with pytest.raises(TritonModelException, match="not have support for string"):
        Tensor("A", np.array([b"a"], object)).to_dlpack()
    with pytest.raises(TritonModelException, match="neither a DLPack capsule"):
        Tensor.from_dlpack("B", 5)
    with pytest.raises(TritonModelException, match="not contiguous"):
        Tensor.from_dlpack("B", dlpack.export(np.zeros((2, 3)).T))
