"""What a model takes and gives: the static description every process shares."""

from __future__ import annotations

from msgspec import UNSET, Struct

from shmserve.tensor.config_document import ConfigDocument


class TensorSpec(Struct, frozen=True, omit_defaults=True):
    """One input or output of a model.

    `shape` is the full shape of the protocol: -1 marks a variable dimension, and
    if the model batches (`ModelSpec.max_batch_size` > 0) the first dimension is
    the batch (-1). `labels` are the class names of an output, by index
    (classification extension). `scalar_batch` and the like belong elsewhere.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()


def fits(described: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a shape is one that a description (-1: any size) allows."""
    return len(described) == len(shape) and all(
        want in (-1, dim) for want, dim in zip(described, shape, strict=True)
    )


class EnsembleStep(Struct, frozen=True, omit_defaults=True):
    """One model of an ensemble. `version`: empty: the newest that is ready.

    `inputs` and `outputs`: the model's tensors by name -> the ensemble's. Once its model is known:
    `streams`: it may answer more than once. `behind`: the step that streams for each of whose
    answers it runs; -1: it runs once. `in_turn`: its runs follow each other, in that order.
    """

    model: str
    version: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    streams: bool = False
    behind: int = -1
    in_turn: bool = False


class ModelSpec(Struct, frozen=True, omit_defaults=True):
    """One version of one model, as published in the registry.

    `config` is the configuration that clients are shown. `rerun` tells
    whether a request whose executor died may be run again on another instance
    (config.pbtxt parameter ``rerun``: "true" or "false"). `steps`: an ensemble has them, and no
    instances of its own.
    """

    name: str
    version: str
    platform: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decoupled: bool = False
    rerun: bool = False
    parameters: dict[str, str] = {}
    config: ConfigDocument = ConfigDocument()
    steps: tuple[EnsembleStep, ...] = ()

    @property
    def caches_answers(self) -> bool:
        """Whether answers may be kept for requests that are the same."""
        cache = self.config.response_cache
        return cache is not UNSET and bool(cache.get("enable"))

    @property
    def max_inflight_requests(self) -> int:
        """How many answers of a step that streams may be on their way; 0: as many as is usual."""
        scheduling = self.config.ensemble_scheduling
        return 0 if scheduling is UNSET else int(scheduling.get("max_inflight_requests", 0))

    def takes_the_same(self, other: ModelSpec) -> bool:
        """Whether a request that was checked against the other spec suits this one."""
        return self is other or (
            self.inputs == other.inputs
            and self.outputs == other.outputs
            and self.max_batch_size == other.max_batch_size
            and self.decoupled == other.decoupled
        )

    def input(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.inputs if spec.name == name), None)

    def output(self, name: str) -> TensorSpec | None:
        return next((spec for spec in self.outputs if spec.name == name), None)
