"""`pb_utils.Tensor`: a named array as models of the Triton dialect know it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.executor.backend import CPU, InputTensor
from shmserve.executor.backends import dlpack
from shmserve.executor.backends.triton.data_types import DataType, numpy_to_triton_type
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.devices import is_on_device
from shmserve.tensor.dtypes import DATATYPES, from_numpy


class _Contents(Struct, frozen=True):
    """What the server makes a tensor of: an input, whose array is read when the model asks for it
    first, or an array on a device."""

    array: Any
    source: InputTensor | None = None
    writable: bool = True
    on_device: bool = False


class Tensor:
    """A tensor with a name; never copies what it is given.

    An input's array is a read-only view of shared memory (BYTES: parsed when first asked
    for). DLPack cannot say "read-only": do not write into what `to_dlpack` of an input gives.
    A model that wants to has the parameter `writable_inputs`, which makes them copies.
    One in a GPU's memory has no numpy array, only DLPack.
    """

    __slots__ = ("_array", "_name", "_on_device", "_source", "_writable")

    def __init__(self, name: str, array: np.ndarray[Any, Any] | _Contents) -> None:
        contents = array if isinstance(array, _Contents) else _contents(name, array)
        self._name = name
        self._array = contents.array
        self._source = contents.source
        self._writable = contents.writable
        self._on_device = contents.on_device

    @classmethod
    def of_input(
        cls, source: InputTensor, writable: bool = False, on_device: bool = False
    ) -> Tensor:
        """The tensor of a request's input (for the server, not for models). `on_device`: one
        that lies in a GPU's memory stays there."""
        stays = on_device and source.device != CPU
        return cls(source.name, _Contents(None, source, writable, stays))

    @classmethod
    def _given(cls, name: str, array: Any) -> Tensor:
        """A tensor on a numpy or CuPy array."""
        return cls(name, _contents(name, array, not isinstance(array, np.ndarray)))

    @staticmethod
    def from_dlpack(name: str, tensor: object) -> Tensor:
        """A tensor on the memory of a DLPack capsule, or of an object with `__dlpack__`: the
        host's or a GPU's."""
        # numpy would refuse to export a read-only array, such as an input's
        if isinstance(tensor, np.ndarray):
            return Tensor(name, tensor)
        if isinstance(tensor, Tensor):
            return Tensor._given(name, tensor.array())
        try:
            array = dlpack.take(tensor)
            if not array.flags.c_contiguous:
                raise ValueError(
                    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are"
                    " stored in C-Order are supported."
                )
            return Tensor._given(name, array)
        except (TypeError, ValueError) as ex:
            raise TritonModelException(str(ex)) from ex

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """The array itself; BYTES: an object array of `bytes`. BF16 has none, as in Triton, nor
        has what lies in a GPU's memory."""
        if self._on_device:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        array: np.ndarray[Any, Any] = self.array()
        kind = from_numpy(array.dtype)
        if kind is not None and kind.extension:
            raise TritonModelException(
                f"tensor dtype is {kind.name} and cannot be converted to numpy: use to_dlpack"
            )
        return array

    def array(self) -> Any:
        """The numpy or CuPy array, BF16 as `ml_dtypes.bfloat16` (for the server, not for
        models)."""
        if self._array is None:
            source = self._source
            assert source is not None
            if self._on_device:
                get = source.private_on_device if self._writable else source.on_device
            else:
                get = source.private if self._writable else source.numpy
            self._array = get()
        return self._array

    def shape(self) -> list[int]:
        return list(self._source.shape if self._source is not None else self.array().shape)

    def triton_dtype(self) -> DataType:
        """The datatype's number in the schema, e.g. 11, which is TYPE_FP32."""
        if self._source is not None:
            return DataType[DATATYPES[self._source.datatype].config_name]
        data_type = numpy_to_triton_type(self.array().dtype)
        assert data_type is not None  # the constructor has checked it
        return data_type

    def is_cpu(self) -> bool:
        """Whether it lies in host memory."""
        return not self._on_device

    def to_dlpack(self) -> object:
        """A DLPack capsule on the tensor's memory, for use on the device's default stream."""
        if self.triton_dtype() is DataType.TYPE_STRING:
            raise TritonModelException("DLPack does not have support for string tensors.")
        try:
            return dlpack.export(self.array(), self)
        except TypeError as ex:
            raise TritonModelException(f"Tensor '{self._name}': {ex}") from ex

    # As Triton's, it takes nothing but a stream: what wants a copy is refused, or makes it itself
    def __dlpack__(self, stream: int | None = None) -> object:
        capsule = self.to_dlpack()
        if self._on_device:
            dlpack.let_wait(stream, self.array().device.id)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self.array()) if self._on_device else dlpack.CPU


def _contents(name: str, array: Any, on_device: bool = False) -> _Contents:
    """Raises TypeError, or TritonModelException if the array has no datatype."""
    if not isinstance(name, str):
        raise TypeError(f"a Tensor's name must be text, got {type(name).__name__}")
    if not (on_device or isinstance(array, np.ndarray)):
        advice = "; a GPU's arrays go in by Tensor.from_dlpack" if is_on_device(array) else ""
        kind = type(array).__name__
        raise TypeError(f"Tensor '{name}' needs a numpy array, got {kind}{advice}")
    if from_numpy(array.dtype) is None:
        raise TritonModelException(f"Tensor '{name}': no datatype for {array.dtype}")
    return _Contents(array, on_device=on_device)


def check_tensors(what: str, tensors: Iterable[Any]) -> None:
    """Whether all are tensors (for the server, not for models).

    Raises:
        TypeError: one is something else.
        TritonModelException: one is None.
    """
    for tensor in tensors:
        if tensor is None:
            raise TritonModelException(f"{what} must be a list of Tensor, and has a None")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what} must be a list of Tensor, and has {type(tensor).__name__}")
