"""Inputs of measured requests: arrays made from a model's metadata, or read from files."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shmserve.client.tensors import ClientTensor
from shmserve.errors import ConfigError
from shmserve.tensor import dtypes

Array = np.ndarray[Any, Any]

_SEED = 1
_MOST_BYTES = 1 << 30


def made_inputs(
    metadata: Sequence[Mapping[str, Any]], files: Sequence[str], batch: int | None, size: int
) -> dict[str, Array]:
    """Return input arrays by name. Generated floats are in [0, 1), integers 0 or 1, texts 8 bytes
    long. Every run generates equal values.

    Args:
        metadata: inputs of the model, with `name`, `datatype` and `shape`.
        files: NAME=FILE.npy for inputs to read from files.
        batch: number of rows, if the model's first dimension is the batch; None: no batch
            dimension.
        size: size of other variable dimensions.

    Raises:
        ConfigError: a file cannot be used, the model has no such input, or an input is too large.
    """
    given = dict(_read(text) for text in files)
    names = [str(tensor["name"]) for tensor in metadata]
    for name in given.keys() - set(names):
        raise ConfigError(
            f"--input: the model has no input '{name}'; its inputs are {', '.join(names)}"
        )
    generator = np.random.default_rng(_SEED)
    return {
        name: given[name] if name in given else _made(tensor, batch, size, generator)
        for name, tensor in zip(names, metadata, strict=True)
    }


def encoded(inputs: Mapping[str, Array]) -> list[ClientTensor]:
    """Return inputs with their encodings. Raise ConfigError if an array is no tensor."""
    try:
        return [ClientTensor(name, array) for name, array in inputs.items()]
    except ValueError as ex:
        raise ConfigError(f"--{ex}") from None


def _read(text: str) -> tuple[str, Array]:
    name, separator, path = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--input: '{text}' is not NAME=FILE.npy")
    try:
        return name, np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError) as ex:
        raise ConfigError(f"--input {name}: {path} is no .npy file: {ex}") from None


def _made(
    tensor: Mapping[str, Any], batch: int | None, size: int, generator: np.random.Generator
) -> Array:
    shape = [size if dim < 0 else int(dim) for dim in tensor["shape"]]
    if batch is not None and shape:
        shape[0] = batch
    datatype = dtypes.DATATYPES[str(tensor["datatype"])]
    count = 1
    for dim in shape:
        count *= dim
    if count * (datatype.itemsize or 12) > _MOST_BYTES:
        raise ConfigError(f"input '{tensor['name']}' would be larger than 1 GiB; give --input")
    if not datatype.itemsize:
        return np.full(shape, b"shmserve", object)
    if datatype.numpy.kind in "iub":
        return generator.integers(0, 2, shape).astype(datatype.numpy)
    return generator.random(shape).astype(datatype.numpy)
