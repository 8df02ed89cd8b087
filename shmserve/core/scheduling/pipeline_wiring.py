"""How the models of a pipeline fit together: which output becomes which input.

By name where every input that must be there has an output of its name; else by position.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shmserve.errors import ConfigError, Internal
from shmserve.tensor.spec import ModelSpec, TensorSpec, fits


class Joint(Struct, frozen=True):
    """One output of a model that is an input of the next one."""

    output: str
    input: TensorSpec


def join(pipeline: str, giver: ModelSpec, taker: ModelSpec) -> tuple[Joint, ...]:
    """What passes from one model to the next.

    Raises:
        ConfigError: they do not fit; says where.
    """
    what = f"pipeline '{pipeline}': '{giver.name}' does not lead to '{taker.name}'"
    pairs = _pairs(giver.outputs, taker.inputs)
    if pairs is None:
        raise ConfigError(
            f"{what}: outputs {_names(giver.outputs)} are neither by name nor by number "
            f"inputs {_names(taker.inputs)}"
        )
    for source, target in pairs:
        if source.datatype != target.datatype:
            raise ConfigError(
                f"{what}: output '{source.name}' is {source.datatype} and input "
                f"'{target.name}' is {target.datatype}"
            )
        if not _may_fit(source.shape, target.shape):
            raise ConfigError(
                f"{what}: output '{source.name}' has shape {list(source.shape)} and input "
                f"'{target.name}' {list(target.shape)}"
            )
    return tuple(Joint(source.name, target) for source, target in pairs)


def _pairs(
    outputs: Sequence[TensorSpec], inputs: Sequence[TensorSpec]
) -> list[tuple[TensorSpec, TensorSpec]] | None:
    by_name = {output.name: output for output in outputs}
    named = [(by_name[taken.name], taken) for taken in inputs if taken.name in by_name]
    if named and all(taken.optional or taken.name in by_name for taken in inputs):
        return named
    needed = [taken for taken in inputs if not taken.optional]
    if outputs and len(outputs) == len(needed):
        return list(zip(outputs, needed, strict=True))
    return None


def _may_fit(source: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return len(source) == len(target) and all(
        -1 in (size, other) or size == other for size, other in zip(source, target, strict=True)
    )


def check(pipeline: str, joint: Joint, taker: ModelSpec, shape: tuple[int, ...]) -> None:
    """Whether what a model gave is what the next one takes.

    Raises:
        Internal: it is not; says which models and which shapes.
    """
    wanted = joint.input.shape
    if not fits(wanted, shape) or 0 < taker.max_batch_size < (shape[0] if shape else 0):
        most = f" and at most {taker.max_batch_size} in a batch" if taker.max_batch_size else ""
        raise Internal(
            f"pipeline '{pipeline}': output '{joint.output}' has shape {list(shape)}, but "
            f"input '{joint.input.name}' of '{taker.name}' takes {list(wanted)}{most}"
        )


def _names(tensors: Sequence[TensorSpec]) -> str:
    return "[" + ", ".join(f"'{tensor.name}'" for tensor in tensors) + "]"
