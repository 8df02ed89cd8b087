"""A request against its model: names, datatypes, shapes, sizes. No bytes are touched here.

The wording follows Triton's where clients or their tests look at it.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, TooLarge, Unimplemented
from shmserve.protocol.control.data_messages import OutputPlace, RegionRef
from shmserve.protocol.oip.answer import no_json_form
from shmserve.protocol.oip.model_signature import InputPlan, ModelPlan
from shmserve.protocol.oip.request import (
    MAX_INT64,
    InferInput,
    InferOutput,
    InferRequest,
    RegionWindow,
)
from shmserve.tensor.dtypes import DATATYPES, element_count
from shmserve.tensor.spec import ModelSpec

UNKNOWN_ID = "<id_unknown>"
Find = Callable[[ModelSpec, RegionWindow], RegionRef]  # raises what `Regions.find` does


class CheckedInput(Struct, frozen=True):
    """An input that fits its model. `nbytes` is -1 where only the data tells (BYTES as JSON).

    `at`: where it lies, if that is in client memory.
    """

    source: InferInput
    plan: InputPlan
    count: int
    nbytes: int
    at: RegionRef | None = None


def refuse_decoupled(plan: ModelPlan, where: str) -> None:
    """Models that answer more than once cannot be asked for one answer. `where`: by what.

    Raises:
        Unimplemented: the model is decoupled.
    """
    if plan.spec.decoupled:
        raise Unimplemented(f"{where} doesn't support models with decoupled transaction policy")


def check_inputs(
    plan: ModelPlan, request: InferRequest, limits: Settings, find: Find
) -> list[CheckedInput]:
    """Check every input; the result is in the request's order. `find` looks up regions.

    Raises:
        InvalidArgument: an input is missing, unknown or of the wrong type, shape or size.
        NotFound: a shared-memory region that is not registered.
        TooLarge: a tensor larger than `max_tensor_bytes`.
    """
    try:
        checked = [_input(plan, source, limits) for source in request.inputs]
        if not plan.required <= {source.name for source in request.inputs}:
            raise InvalidArgument(_missing(plan, request))
        if plan.spec.max_batch_size > 0:
            _check_batch(plan, checked)
    except InvalidArgument as ex:
        raise type(ex)(f"[request id: {request.id or UNKNOWN_ID}] {ex.message}") from None
    for index, item in enumerate(checked):
        if item.source.region is not None:
            at = find(plan.spec, item.source.region)
            checked[index] = CheckedInput(item.source, item.plan, item.count, item.nbytes, at)
    return checked


def check_outputs(
    plan: ModelPlan, request: InferRequest, find: Find
) -> tuple[tuple[InferOutput, ...], tuple[OutputPlace, ...]]:
    """The outputs the client wants, in its order; all the model has if it named none.

    Also the places of those that go into client memory.

    Raises:
        InvalidArgument: an unknown output, or one that the wanted form is not there for.
        NotFound: a shared-memory region that is not registered.
    """
    default = request.binary_output
    wanted = request.outputs or plan.all_outputs
    places: tuple[OutputPlace, ...] = ()
    for output in wanted:
        spec = plan.outputs.get(output.name)
        if spec is None:
            raise InvalidArgument(
                f"[request id: {request.id or UNKNOWN_ID}] unexpected inference output"
                f" '{output.name}' for model '{plan.spec.name}'"
            )
        if output.region is not None:
            places += (OutputPlace(output.name, find(plan.spec, output.region)),)
        elif output.classification:
            if not spec.classifiable:
                raise InvalidArgument(
                    f"output '{output.name}' of datatype {spec.datatype} has no classification"
                )
        elif not spec.json_ok and not (default if output.binary is None else output.binary):
            raise InvalidArgument(no_json_form("sending", spec.datatype, f"output {output.name}"))
    return wanted, places


def _input(plan: ModelPlan, source: InferInput, limits: Settings) -> CheckedInput:
    spec = plan.inputs.get(source.name)
    model = plan.spec.name
    if spec is None:
        raise InvalidArgument(f"unexpected inference input '{source.name}' for model '{model}'")
    datatype = spec.datatype
    if source.datatype != datatype.name:
        if source.datatype not in DATATYPES:
            raise InvalidArgument(f"invalid datatype '{source.datatype}' for input {source.name}")
        raise InvalidArgument(
            f"inference input '{source.name}' data-type is '{source.datatype}', but model"
            f" '{model}' expects '{datatype.name}'"
        )
    if source.shape == spec.shape:
        count = spec.count
    else:
        _check_shape(plan, source, spec)
        count = element_count(source.shape)
        if count > limits.max_elements or count > MAX_INT64:
            raise InvalidArgument(
                f"the shape of input '{source.name}' causes total element count to exceed maximum"
                f" size of {min(limits.max_elements, MAX_INT64)} (setting max_elements)"
            )
    return CheckedInput(source, spec, count, _nbytes(model, source, spec, count, limits))


def _nbytes(model: str, source: InferInput, spec: InputPlan, count: int, limits: Settings) -> int:
    """The tensor's size, after comparing what the shape and what the request tell."""
    itemsize = spec.datatype.itemsize
    told = source.region.nbytes if source.region is not None else source.binary_size
    if told is None:
        if not spec.datatype.json_ok:
            raise InvalidArgument(
                no_json_form("receiving", spec.datatype.name, f"input {source.name}")
            )
        # Every element takes a character at least: the JSON limit bounds these tensors.
        return count * itemsize if itemsize else -1
    if itemsize and told != count * itemsize:
        raise InvalidArgument(
            f"input byte size mismatch for input '{source.name}' for model '{model}'."
            f" Expected {count * itemsize}, got {told}"
        )
    if told > limits.max_tensor_bytes:
        raise TooLarge(
            f"input '{source.name}' has {told} bytes, at most {limits.max_tensor_bytes} are"
            " allowed (setting max_tensor_bytes)"
        )
    return told


def _check_shape(plan: ModelPlan, source: InferInput, spec: InputPlan) -> None:
    shape, expected = source.shape, spec.shape
    if not shape and plan.spec.max_batch_size > 0:
        raise InvalidArgument(
            f"input '{source.name}' has no shape but model requires batch dimension for"
            f" '{plan.spec.name}'"
        )
    if len(shape) == len(expected):
        for got, want in zip(shape, expected, strict=True):
            if want != got and want != -1:
                break
        else:
            return
    note = ""
    if plan.spec.max_batch_size > 0:
        note = (
            ". NOTE: Setting a non-zero max_batch_size in the model config requires a batch"
            " dimension to be prepended to each input shape"
        )
    raise InvalidArgument(
        f"unexpected shape for input '{source.name}' for model '{plan.spec.name}'."
        f" Expected {_shown(expected)}, got {_shown(shape)}{note}"
    )


def _check_batch(plan: ModelPlan, checked: list[CheckedInput]) -> None:
    batch = checked[0].source.shape[0] if checked else 0
    for item in checked:
        if item.source.shape[0] != batch:
            raise InvalidArgument(
                f"input '{item.source.name}' batch size does not match other inputs for"
                f" '{plan.spec.name}'"
            )
    if batch > plan.spec.max_batch_size:
        raise InvalidArgument(
            f"inference request batch-size must be <= {plan.spec.max_batch_size} for"
            f" '{plan.spec.name}'"
        )


def _missing(plan: ModelPlan, request: InferRequest) -> str:
    got = [source.name for source in request.inputs]
    missing = [name for name in plan.inputs if name in plan.required and name not in got]
    least, most = len(plan.required), len(plan.inputs)
    expected = (
        f"expected {most} inputs"
        if least == most
        else f"expected number of inputs between {least} and {most}"
    )
    return (
        f"{expected} but got {len(got)} inputs for model '{plan.spec.name}'. Got input(s)"
        f" {_names(got)}, but missing required input(s) {_names(missing)}. Please provide all"
        " required input(s)."
    )


def _names(names: list[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _shown(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
