"""`model_warmup` of config.pbtxt, checked: sample requests that run before a model is ready."""

from math import prod
from typing import Any, Literal

from msgspec import Struct

from shmserve.errors import ConfigError
from shmserve.protocol.triton_config.config_parts import data_type, is_plain_file_name
from shmserve.tensor.dtypes import DATATYPES

# A larger size is a typing error: a sample is made in memory.
MAX_SAMPLE_BYTES = 1 << 30
MAX_RUNS = 10_000


class WarmupInput(Struct, frozen=True):
    """An input of a sample. `file` is relative to the model's folder `warmup`."""

    name: str
    datatype: str
    shape: tuple[int, ...]  # with the batch dimension, if the model has a batch
    source: Literal["zero", "random", "file"]
    file: str = ""


class WarmupSample(Struct, frozen=True):
    """A request to run `count` times."""

    name: str
    inputs: tuple[WarmupInput, ...]
    count: int = 1


def warmup_samples(
    message: Any, model: str, max_batch_size: int, partial: bool
) -> tuple[WarmupSample, ...]:
    """Return the samples of a configuration. `partial`: the model may still complete the
    configuration. Raise ConfigError for a wrong sample; the text names the sample and the fault."""
    samples = []
    for index, entry in enumerate(message.model_warmup):
        where = f"model '{model}': model_warmup '{entry.name or index}'"
        limit = max(1, max_batch_size)
        batch_unknown = partial and not max_batch_size
        if entry.batch_size > limit and not batch_unknown:
            raise ConfigError(f"{where}: batch_size {entry.batch_size} is more than {limit}")
        if entry.count > MAX_RUNS:
            raise ConfigError(f"{where}: count {entry.count} is more than {MAX_RUNS}")
        batch = (entry.batch_size or 1,) if max_batch_size else ()
        inputs = tuple(
            _input(name, tensor, batch, f"{where}: input '{name}'")
            for name, tensor in sorted(entry.inputs.items())
        )
        if not inputs:
            raise ConfigError(f"{where}: it has no inputs")
        samples.append(WarmupSample(entry.name or str(index), inputs, entry.count or 1))
    return tuple(samples)


def _input(name: str, tensor: Any, batch: tuple[int, ...], where: str) -> WarmupInput:
    datatype = data_type(tensor.data_type, where)
    if any(dim < 1 for dim in tensor.dims):
        raise ConfigError(f"{where}: dims of a sample must be positive")
    shape = (*batch, *tensor.dims)
    if prod(shape) * max(1, DATATYPES[datatype].itemsize) > MAX_SAMPLE_BYTES:
        raise ConfigError(f"{where}: a sample has at most {MAX_SAMPLE_BYTES} bytes")
    choice = tensor.WhichOneof("input_data_type")
    if choice == "input_data_file":
        parts = tensor.input_data_file.split("/")
        if not all(is_plain_file_name(part) for part in parts):
            raise ConfigError(
                f"{where}: input_data_file '{tensor.input_data_file}' is not a file inside "
                "the model's folder 'warmup'"
            )
        return WarmupInput(name, datatype, shape, "file", tensor.input_data_file)
    if choice is None or not getattr(tensor, choice):
        raise ConfigError(f"{where}: one of zero_data, random_data, input_data_file is needed")
    return WarmupInput(name, datatype, shape, "zero" if choice == "zero_data" else "random")
