"""Array hints: tensors of a model from hints such as `NDArray[np.float32]`."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from shmserve.errors import ConfigError, Internal, InvalidArgument
from shmserve.executor.backends.hinted.signatures import (
    HintedSignature,
    plain,
    set_batching,
    without_none,
)
from shmserve.executor.backends.triton.auto_complete import AutoCompleteConfig
from shmserve.model import Batching, Shape
from shmserve.tensor.dtypes import Datatype, from_numpy, object_array

DEFAULT_MAX_BATCH_SIZE = 32
OUTPUT = "output"  # name of an output whose hint gives no name
_ARRAY = "NDArray[np.float32]"


class HintedTensor(Struct, frozen=True):
    """An input or output. `dims`: without the batch. `text`: elements are `str` for the model."""

    name: str
    datatype: Datatype
    dims: tuple[int, ...]
    batched: bool
    text: bool = False


class ArrayCall:
    """Way between tensors of requests and the arguments and answer of a function on arrays.
    Raise ConfigError for hints that cannot be served."""

    def __init__(self, signature: HintedSignature) -> None:
        self._signature = signature
        self._inputs = [
            _tensor(a.name, without_none(a.hint), f"argument '{a.name}'")
            for a in signature.arguments
        ]
        self._outputs, self._named = _outputs(signature.answer)
        if not self._inputs:
            raise ConfigError(f"the function has no argument: write one such as x: {_ARRAY}")
        batched = {tensor.name for tensor in self._inputs + self._outputs if tensor.batched}
        self._batched = bool(batched) and not signature.streams
        for tensor in self._inputs + self._outputs:
            if batched and not tensor.batched:
                raise ConfigError(
                    f"'{tensor.name}' has no batch, and '{min(batched)}' has: write"
                    f' Shape("batch", ...) for all arrays or for none'
                )
        if signature.batching and not self._batched:
            raise ConfigError('batched needs Shape("batch", ...) for all arrays, and one answer')

    def complete(self, config: AutoCompleteConfig) -> AutoCompleteConfig:
        """Add tensors and batching to the model's configuration. Raise ValueError if the
        configuration contradicts the hints."""
        config.set_model_transaction_policy({"decoupled": self._signature.streams})
        document = config.as_dict()
        if self._batched:
            set_batching(document, self._signature.batching or Batching(DEFAULT_MAX_BATCH_SIZE, 0))
        elif document.get("max_batch_size"):
            raise ValueError(
                f"max_batch_size is {document['max_batch_size']} in the configuration, and no hint"
                ' has Shape("batch", ...)'
            )
        for tensor, argument in zip(self._inputs, self._signature.arguments, strict=True):
            optional = {"optional": True} if argument.optional else {}
            config.add_input(self._entry(tensor) | optional)
        for tensor in self._outputs:
            config.add_output(self._entry(tensor))
        return config

    def _entry(self, tensor: HintedTensor) -> dict[str, Any]:
        lead = (-1,) if tensor.batched and not self._batched else ()
        if tensor.batched and self._batched and not tensor.dims:
            raise ConfigError(f"""'{tensor.name}': write Shape("batch", 1) for one value a row""")
        kind = tensor.datatype.config_name
        return {"name": tensor.name, "data_type": kind, "dims": [*lead, *tensor.dims]}

    def arguments(self, request: Any) -> dict[str, Any]:
        """Return the arguments of the function for a request of the native dialect."""
        sent = request.inputs
        given = {}
        for tensor, argument in zip(self._inputs, self._signature.arguments, strict=True):
            if tensor.name in sent:
                array = request.input(tensor.name)
                given[tensor.name] = _text(array, tensor.name) if tensor.text else array
            elif argument.optional:
                given[tensor.name] = argument.default
        return given

    def answer(self, result: Any) -> dict[str, Any]:
        """Return the outputs of an answer by name. Raise Internal for another number of outputs
        than the hint has."""
        if isinstance(result, Mapping):
            return dict(result)
        values = result if self._named else (result,)
        if not isinstance(values, tuple) or len(values) != len(self._outputs):
            found = f"{len(values)} of them" if isinstance(values, tuple) else type(values).__name__
            raise Internal(f"the answer must be {len(self._outputs)} arrays, got {found}")
        return {t.name: v for t, v in zip(self._outputs, values, strict=True)}


def has_array(hint: Any, above: tuple[Any, ...] = ()) -> bool:
    """Return True if a hint is, or contains, an array. `above`: classes that contain the hint, as a
    class may contain itself."""
    hint = plain(hint)
    if hint is np.ndarray or typing.get_origin(hint) is np.ndarray:
        return True
    if typing.is_typeddict(hint) or hasattr(hint, "_fields"):
        fields = {} if hint in above else typing.get_type_hints(hint, include_extras=True)
        return any(has_array(field, (*above, hint)) for field in fields.values())
    return any(has_array(part, above) for part in typing.get_args(hint))


def _outputs(answer: Any) -> tuple[list[HintedTensor], bool]:
    """Return the outputs of an answer's hint, and whether the answer is a tuple or mapping."""
    where = "the answer"
    if typing.is_typeddict(answer) or hasattr(answer, "_fields"):
        fields = typing.get_type_hints(answer, include_extras=True)
        return [_tensor(name, hint, f"{where}'s '{name}'") for name, hint in fields.items()], True
    members = typing.get_args(answer)
    if typing.get_origin(answer) is tuple and ... not in members:
        named = ((f"{OUTPUT}_{number}", hint) for number, hint in enumerate(members))
        return [_tensor(name, hint, f"{where}'s {name}") for name, hint in named], True
    if answer is dict or typing.get_origin(answer) is dict:
        raise ConfigError(f"{where} is a dict without names: write a TypedDict with a key each")
    return [_tensor(OUTPUT, answer, where)], False


def _tensor(name: str, hint: Any, where: str) -> HintedTensor:
    shape: Shape | None = None
    hint = plain(hint)
    while typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
        shape = next((note for note in notes if isinstance(note, Shape)), shape)
        hint = plain(hint)
    if hint is np.ndarray:
        raise ConfigError(f"{where} is an array of unknown elements: write {_ARRAY}")
    if typing.get_origin(hint) is not np.ndarray:
        shown = getattr(hint, "__name__", str(hint))
        raise ConfigError(f"{where} is {shown} beside arrays: write {_ARRAY}, or no array at all")
    dims_hint, dtype_hint = typing.get_args(hint)
    element = (*typing.get_args(dtype_hint), None)[0]
    datatype = _datatype(element)
    if datatype is None:
        shown = getattr(element, "__name__", str(element))
        raise ConfigError(f"{where} has elements of no one type ({shown}): write {_ARRAY}")
    dims = shape.dims if shape is not None else tuple(_dims(dims_hint))
    if not dims:
        kind = f"NDArray[np.{element.__name__}]"
        raise ConfigError(
            f"{where} has no number of dimensions: write Annotated[{kind}, Shape(-1, 3)]"
            " (from typing and shmserve.model), with a size, a name or -1 for each dimension"
        )
    batched = shape is not None and shape.batched
    sizes = tuple(dim if isinstance(dim, int) else -1 for dim in dims[batched:])
    return HintedTensor(name, datatype, sizes, batched, element is np.str_)


def _datatype(element: Any) -> Datatype | None:
    """Return the datatype of a numpy type, or None for an abstract or unknown type."""
    try:
        dtype = np.dtype(element)
    except (TypeError, Warning):
        return None
    return from_numpy(dtype) if isinstance(element, type) and dtype.type is element else None


def _dims(hint: Any) -> Iterator[int]:
    """Yield the dimensions of numpy's own shape hint: `tuple[int, Literal[3]]`."""
    members = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    for member in () if ... in members else members:
        literal = typing.get_args(member) if typing.get_origin(member) is typing.Literal else ()
        yield literal[0] if len(literal) == 1 and isinstance(literal[0], int) else -1


def _text(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    try:
        return object_array([element.decode() for element in array.reshape(-1)], array.shape)
    except UnicodeDecodeError:
        raise InvalidArgument(f"input '{name}' has an element that is not UTF-8") from None
