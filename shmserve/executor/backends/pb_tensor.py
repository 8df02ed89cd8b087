"""`pb_utils.Tensor`: a named array as models of the Triton dialect know it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from shmserve.executor.backend import InputTensor
from shmserve.executor.backends import dlpack
from shmserve.executor.backends.pb_errors import TritonModelException
from shmserve.executor.backends.pb_types import DataType, numpy_to_triton_type
from shmserve.tensor.dtypes import DATATYPES, from_numpy

_BF16 = np.dtype(ml_dtypes.bfloat16)


class Tensor:
    """A tensor with a name; never copies what it is given.

    An input's array is a read-only view of shared memory (BYTES: parsed when first asked
    for). DLPack cannot say "read-only": do not write into what `to_dlpack` of an input gives.
    A model that wants to has the parameter `writable_inputs`, which makes them copies.
    """

    __slots__ = ("_array", "_name", "_source", "_writable")

    def __init__(self, name: str, array: np.ndarray[Any, Any]) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a Tensor's name must be text, got {type(name).__name__}")
        if not isinstance(array, np.ndarray):
            raise TypeError(f"Tensor '{name}' needs a numpy array, got {type(array).__name__}")
        if from_numpy(array.dtype) is None:
            raise TritonModelException(f"Tensor '{name}': no datatype for {array.dtype}")
        self._name = name
        self._array: np.ndarray[Any, Any] | None = array
        self._source: InputTensor | None = None
        self._writable = True

    @classmethod
    def of_input(cls, source: InputTensor, writable: bool = False) -> Tensor:
        """The tensor of a request's input (for the server, not for models)."""
        tensor = cls.__new__(cls)
        tensor._name = source.name
        tensor._array = None
        tensor._source = source
        tensor._writable = writable
        return tensor

    @staticmethod
    def from_dlpack(name: str, tensor: object) -> Tensor:
        """A tensor on the memory of a DLPack capsule, or of an object with `__dlpack__`."""
        # numpy would refuse to export a read-only array, such as an input's
        if isinstance(tensor, np.ndarray):
            return Tensor(name, tensor)
        if isinstance(tensor, Tensor):
            return Tensor(name, tensor.array())
        try:
            array = dlpack.take(tensor)
            if not array.flags.c_contiguous:
                raise ValueError(
                    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are"
                    " stored in C-Order are supported."
                )
            return Tensor(name, array)
        except (TypeError, ValueError) as ex:
            raise TritonModelException(str(ex)) from ex

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """The array itself; BYTES: an object array of `bytes`. BF16 has none, as in Triton."""
        array = self.array()
        if array.dtype == _BF16:
            raise TritonModelException(
                "tensor dtype is BF16 and cannot be converted to numpy: use to_dlpack"
            )
        return array

    def array(self) -> np.ndarray[Any, Any]:
        """The array, BF16 as `ml_dtypes.bfloat16` (for the server, not for models)."""
        if self._array is None:
            assert self._source is not None
            self._array = self._source.private() if self._writable else self._source.numpy()
        return self._array

    def shape(self) -> list[int]:
        return list(self._source.shape if self._source is not None else self.array().shape)

    def triton_dtype(self) -> DataType:
        """The datatype's number in the schema, e.g. 11, which is TYPE_FP32."""
        if self._source is not None:
            return DataType[DATATYPES[self._source.datatype].config_name]
        return numpy_to_triton_type(self.array().dtype)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> object:
        """A DLPack capsule on the tensor's memory."""
        if self.triton_dtype() is DataType.TYPE_STRING:
            raise TritonModelException("DLPack does not have support for string tensors.")
        try:
            return dlpack.export(self.array())
        except TypeError as ex:
            raise TritonModelException(f"Tensor '{self._name}': {ex}") from ex

    def __dlpack__(self, **_options: object) -> object:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU
