"""Tensors of calls to other models: inputs to be copied into slots, and outputs on loan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import NoReturn

import numpy as np
from msgspec import Struct

from shmserve.config import Settings
from shmserve.executor.calling import CalledTensor, ModelCall
from shmserve.executor.devices import is_on_device
from shmserve.executor.tensors.inputs import from_bytes
from shmserve.protocol.oip import validation
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.request import (
    InferInput,
    InferOutput,
    InferRequest,
    RegionWindow,
    check_parameters,
    refuse_duplicates,
)
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES, object_array
from shmserve.tensor.spec import ModelSpec, NamedTensor


class CallInput:
    """An input of a call; `nbytes` is the number of bytes in a slot."""

    def __init__(self, tensor: CalledTensor) -> None:
        self.name = tensor.name
        self.datatype = tensor.datatype
        self.shape = tuple(tensor.array.shape)
        self._array = tensor.array
        self._elements: list[bytes] | None = None
        if DATATYPES[tensor.datatype].itemsize:
            self.nbytes = int(tensor.array.nbytes)
        else:
            self._elements = bytes_codec.to_bytes(tensor.array.ravel().tolist())
            self.nbytes = bytes_codec.encoded_size(self._elements)

    def fill(self, view: memoryview) -> None:
        """Copy the input into a slot."""
        if self._elements is not None:
            bytes_codec.write(self._elements, view)
        elif self.nbytes:
            array = self._array.get() if is_on_device(self._array) else self._array
            np.copyto(np.frombuffer(view, array.dtype).reshape(self.shape), array)


def check_call(
    call: ModelCall, signature: ModelSignature, inputs: Sequence[CallInput], settings: Settings
) -> None:
    """Check a call against the called model, as a client's request is checked.

    Raises:
        InvalidArgument: an input or output is missing, unknown, given twice, or does not fit; a
            parameter is reserved, or of a form that the protocol forbids.
        Unimplemented: a decoupled model is asked for one answer.
    """
    if not call.stream:
        validation.refuse_decoupled(signature, "a call that wants one answer")
    for what, names in ("input", [t.name for t in inputs]), ("output", list(call.outputs)):
        refuse_duplicates(what, names)
    check_parameters(dict(call.parameters))
    request = InferRequest(
        tuple(
            InferInput(t.name, t.shape, t.datatype, f"input '{t.name}'", binary_size=t.nbytes)
            for t in inputs
        ),
        tuple(InferOutput(name, binary=True) for name in call.outputs),
        call.id,
        binary_output=True,
    )
    validation.check_inputs(signature, request, settings, _no_region)
    validation.check_outputs(signature, request, _no_region)


def _no_region(spec: ModelSpec, window: RegionWindow) -> NoReturn:
    raise AssertionError("unreachable: inputs and outputs of a call lie in slots")


class Loan(Struct, eq=False):
    """The lease on the outputs of one answer. Once the last reference to a loan is gone, the
    outputs are to be given back.

    The finalizer may interrupt any code, so it only hands the action to `later`.
    """

    _give_back: Callable[[], None]
    _later: Callable[[Callable[[], None]], None]

    def __del__(self) -> None:
        self._later(self._give_back)


def borrowed(output: NamedTensor, model: str, loan: Loan) -> CalledTensor:
    """Return an output of a call as a read-only array in the called executor's memory. The array
    keeps the loan. BYTES elements are copied instead."""
    name, shape, kind = output.name, output.shape, DATATYPES[output.datatype]
    if not kind.itemsize:
        elements = bytes_codec.decode(output.view, prod(shape), name, model, "output")
        return CalledTensor(name, kind.name, object_array(elements, shape))
    base = from_bytes(output.view, kind.numpy)
    weakref.finalize(base, _returned, loan).atexit = False
    return CalledTensor(name, kind.name, base.reshape(shape))


def _returned(_: Loan) -> None:
    """Do nothing. The finalizer of an array drops the array's reference to the loan."""
