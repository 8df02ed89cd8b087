"""Inputs and outputs of a model: the static description that all processes share."""

from __future__ import annotations

from typing import Protocol

from msgspec import UNSET, Struct

from shmserve.tensor.config_document import ConfigDocument

Shape = tuple[int, ...]  # of a tensor; -1 in a specification: any size


class TensorSpec(Struct, frozen=True, omit_defaults=True):
    """An input or output of a model.

    `shape` is the full shape of the protocol, where -1 marks a variable dimension. If the model
    batches (`ModelSpec.max_batch_size` > 0), the first dimension is the batch (-1). `labels` are
    the class names of an output, by index (classification extension).
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    labels: tuple[str, ...] = ()


def fits(described: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return True if a description (-1: any size) allows the shape."""
    return len(described) == len(shape) and all(
        want in (-1, dim) for want, dim in zip(described, shape, strict=True)
    )


class EnsembleStep(Struct, frozen=True, omit_defaults=True):
    """A model of an ensemble. An empty version means the newest ready version.

    `streams`, `behind` and `in_turn` are set once the model is known.

    Attributes:
        inputs: by name of the model's input, the ensemble's tensor.
        outputs: by name of the model's output, the ensemble's tensor.
        streams: the model may answer more than once.
        behind: number of the streaming step that starts a run of this step with each answer; -1:
            this step runs once.
        in_turn: the runs follow each other in the order of these answers.
    """

    model: str
    version: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    streams: bool = False
    behind: int = -1
    in_turn: bool = False


class ModelSpec(Struct, frozen=True, omit_defaults=True):
    """A version of a model, as published in the registry.

    Attributes:
        config: the configuration that clients see.
        rerun: a request may run again on another instance if its executor died (config.pbtxt
            parameter ``rerun``: "true" or "false").
        steps: steps of an ensemble, which has no instances.
        chosen_batch: the backend has chosen `max_batch_size`.
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
    chosen_batch: bool = False

    @property
    def batch_note(self) -> str:
        """Advice for operators if the backend has chosen `max_batch_size`, else ""."""
        size = self.max_batch_size
        return (
            f"max_batch_size {size} is the default for models whose first dimensions are all"
            " variable; max_batch_size in config.pbtxt allows other batches"
            if self.chosen_batch
            else ""
        )

    @property
    def caches_answers(self) -> bool:
        """True if answers may be kept and given again to identical requests."""
        cache = self.config.response_cache
        return cache is not UNSET and bool(cache.get("enable"))

    @property
    def max_inflight_requests(self) -> int:
        """Limit of a streaming step's answers that are on their way; 0: the usual limit."""
        scheduling = self.config.ensemble_scheduling
        return 0 if scheduling is UNSET else int(scheduling.get("max_inflight_requests", 0))

    def takes_the_same(self, other: ModelSpec) -> bool:
        """Return True if a request that was checked against the other spec fits this spec, too."""
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


class NamedTensor(Protocol):
    """A tensor's bytes with name, datatype and shape."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def view(self) -> memoryview: ...
