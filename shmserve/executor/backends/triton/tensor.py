"""Tensor (`pb_utils.Tensor`): a named array in the Triton dialect."""

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
    """Contents of a tensor made by the server: an array on a device, or an input (`source`), whose
    array is read when the model first asks for it."""

    array: Any
    source: InputTensor | None = None
    writable: bool = True
    on_device: bool = False


class Tensor:
    """Tensor with a name. Never copies the given array.

    The array of an input is a read-only view of shared memory. BYTES are parsed when first asked
    for. DLPack cannot say "read-only": a model must not write into the result of `to_dlpack` of an
    input. With the parameter `writable_inputs`, inputs are copies, and the model may write into
    them. A tensor in GPU memory has no numpy array, only DLPack.
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
        """Return the tensor of a request's input (for the server, not for models).

        Args:
            source: the input.
            writable: True if the model gets a copy to write into.
            on_device: True if an input in GPU memory stays there.
        """
        stays = on_device and source.device != CPU
        return cls(source.name, _Contents(None, source, writable, stays))

    @classmethod
    def _on_array(cls, name: str, array: Any) -> Tensor:
        """Return a tensor on a numpy or CuPy array."""
        return cls(name, _contents(name, array, not isinstance(array, np.ndarray)))

    @staticmethod
    def from_dlpack(name: str, tensor: object) -> Tensor:
        """Return a tensor on the memory of a DLPack capsule, or of an object with `__dlpack__`, in
        host or GPU memory.

        Raises:
            TritonModelException: the memory cannot be taken, or is not contiguous.
        """
        # numpy would refuse to export a read-only array, such as an input's
        if isinstance(tensor, np.ndarray):
            return Tensor(name, tensor)
        if isinstance(tensor, Tensor):
            return Tensor._on_array(name, tensor.array())
        try:
            array = dlpack.take(tensor)
            if not array.flags.c_contiguous:
                raise ValueError(
                    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are"
                    " stored in C-Order are supported."
                )
            return Tensor._on_array(name, array)
        except (TypeError, ValueError) as ex:
            raise TritonModelException(str(ex)) from ex

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """Return the array itself; for BYTES an object array of `bytes`.

        Raises:
            TritonModelException: a BF16 tensor (as in Triton), or a tensor in GPU memory.
        """
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
        """Return the numpy or CuPy array, BF16 as `ml_dtypes.bfloat16` (for the server, not for
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
        """Return the datatype's number in the schema, e.g. 11 for TYPE_FP32."""
        if self._source is not None:
            return DataType[DATATYPES[self._source.datatype].config_name]
        data_type = numpy_to_triton_type(self.array().dtype)
        assert data_type is not None  # checked by the constructor
        return data_type

    def is_cpu(self) -> bool:
        """Return True if the tensor lies in host memory."""
        return not self._on_device

    def to_dlpack(self) -> object:
        """Return a DLPack capsule on the tensor's memory, for use on the device's default stream.

        Raises:
            TritonModelException: DLPack has no such element type.
        """
        if self.triton_dtype() == DataType["TYPE_STRING"]:
            raise TritonModelException("DLPack does not have support for string tensors.")
        try:
            return dlpack.export(self.array(), self)
        except TypeError as ex:
            raise TritonModelException(f"Tensor '{self._name}': {ex}") from ex

    # As in Triton, `stream` is the only argument: a consumer that wants a copy is refused, or
    # copies itself
    def __dlpack__(self, stream: int | None = None) -> object:
        capsule = self.to_dlpack()
        if self._on_device:
            dlpack.let_wait(stream, self.array().device.id)
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.device_of(self.array()) if self._on_device else dlpack.CPU


def _contents(name: str, array: Any, on_device: bool = False) -> _Contents:
    """Check a name and an array, and return contents."""
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
    """Check that all are tensors (for the server, not for models).

    Raises:
        TypeError: an element has another type.
        TritonModelException: an element is None.
    """
    for tensor in tensors:
        if tensor is None:
            raise TritonModelException(f"{what} must be a list of Tensor, and has a None")
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what} must be a list of Tensor, and has {type(tensor).__name__}")
