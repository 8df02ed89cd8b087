"""What every request to a model is checked against, worked out once per model version."""

from __future__ import annotations

from msgspec import Struct

from shmserve.protocol.oip.request import InferOutput
from shmserve.tensor.dtypes import DATATYPES, Datatype, element_count
from shmserve.tensor.spec import ModelSpec

_UNCLASSIFIABLE = frozenset({"BYTES", "BOOL", "FP16", "BF16"})


class InputPlan(Struct, frozen=True):
    """One input of a model. `count` is -1 if the shape is variable."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    count: int


class OutputPlan(Struct, frozen=True):
    """One output of a model."""

    name: str
    datatype: str
    json_ok: bool
    classifiable: bool
    labels: tuple[str, ...]


class ModelPlan(Struct, frozen=True):
    """A model version as the checks see it."""

    spec: ModelSpec
    inputs: dict[str, InputPlan]
    required: frozenset[str]
    outputs: dict[str, OutputPlan]
    all_outputs: tuple[InferOutput, ...]  # what a request without "outputs" asks for


def make_plan(spec: ModelSpec) -> ModelPlan:
    """The plan of a model version."""
    inputs = {
        tensor.name: InputPlan(
            tensor.name,
            DATATYPES[tensor.datatype],
            tensor.shape,
            element_count(tensor.shape) if min(tensor.shape, default=0) >= 0 else -1,
        )
        for tensor in spec.inputs
    }
    outputs = {
        tensor.name: OutputPlan(
            tensor.name,
            tensor.datatype,
            DATATYPES[tensor.datatype].json_ok,
            tensor.datatype not in _UNCLASSIFIABLE,
            tensor.labels,
        )
        for tensor in spec.outputs
    }
    required = frozenset(tensor.name for tensor in spec.inputs if not tensor.optional)
    wanted = tuple(InferOutput(name) for name in outputs)
    return ModelPlan(spec, inputs, required, outputs, wanted)


_plans: dict[tuple[str, str], ModelPlan] = {}


def plan_of(spec: ModelSpec) -> ModelPlan:
    """The plan of a model version, made anew only when its spec is another object."""
    key = (spec.name, spec.version)
    plan = _plans.get(key)
    if plan is None or plan.spec is not spec:
        plan = _plans[key] = make_plan(spec)
    return plan
