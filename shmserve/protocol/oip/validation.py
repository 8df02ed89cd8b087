"""Check of a request against its model: names, datatypes, shapes, sizes. No tensor bytes are read.

The wording follows Triton's where clients or their tests look at it.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod

from msgspec import Struct

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, TooLarge, Unimplemented
from shmserve.protocol import bounds
from shmserve.protocol.control.data_messages import OutputPlace, RegionRef
from shmserve.protocol.oip.answer import no_json_form
from shmserve.protocol.oip.json_request import MAX_INT64
from shmserve.protocol.oip.model_signature import InputSignature, ModelSignature
from shmserve.protocol.oip.request import InferInput, InferOutput, InferRequest, RegionWindow
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec

UNKNOWN_ID = "<id_unknown>"
_MOST_NAMES, _LONGEST_NAME = 16, 64  # limits of the tensor names that an error lists
Find = Callable[[ModelSpec, RegionWindow], RegionRef]  # raises the errors of `Regions.find`


class CheckedInput(Struct, frozen=True):
    """An input that fits its model. `nbytes`: size in bytes, or -1 if only the data shows the size
    (BYTES as JSON). `at`: place of the input in client memory, if any."""

    source: InferInput
    signature: InputSignature
    count: int
    nbytes: int
    at: RegionRef | None = None


def slot_bytes(inputs: Iterable[CheckedInput]) -> int:
    """Return the bytes of inputs outside client memory, counting only inputs of known size."""
    return sum([item.nbytes for item in inputs if item.at is None and item.nbytes > 0])


def refuse_decoupled(signature: ModelSignature, where: str) -> None:
    """Refuse decoupled models, which cannot be asked for a single answer. `where`: kind of request,
    for the message. Raise Unimplemented if the model is decoupled."""
    if signature.spec.decoupled:
        raise Unimplemented(f"{where} doesn't support models with decoupled transaction policy")


def check_inputs(
    signature: ModelSignature, request: InferRequest, limits: Settings, find: Find | None
) -> list[CheckedInput]:
    """Check every input. Return the inputs in the request's order.

    Args:
        find: function that looks up regions, or None to leave regions unresolved.

    Raises:
        InvalidArgument: an input is missing, unknown or of the wrong type, shape or size.
        NotFound: a shared-memory region that is not registered.
        TooLarge: a tensor larger than `max_tensor_bytes`.
    """
    try:
        if len(request.inputs) < len(signature.required):
            raise InvalidArgument(_wrong_number(signature, request))
        checked = [_input(signature, source, limits) for source in request.inputs]
        if not signature.required <= {source.name for source in request.inputs}:
            raise InvalidArgument(_wrong_number(signature, request))
        if signature.spec.max_batch_size > 0:
            _check_batch(signature, request.inputs)
    except InvalidArgument as ex:
        fault = _first_fault(signature, request, limits) or ex
        raise type(fault)(f"[request id: {request.id or UNKNOWN_ID}] {fault.message}") from None
    return checked if find is None else locate_inputs(signature.spec, checked, find)


def _first_fault(
    signature: ModelSignature, request: InferRequest, limits: Settings
) -> InvalidArgument | None:
    """Return the fault that Triton names if several inputs are wrong. Triton makes each check on
    all inputs before the next check, and the last input comes first."""
    inputs = request.inputs[::-1]
    try:
        for source in request.inputs:
            if source.datatype not in DATATYPES and source.name in signature.inputs:
                _check_type(signature, source, signature.inputs[source.name])
        if not len(signature.required) <= len(inputs) <= len(signature.inputs):
            raise InvalidArgument(_wrong_number(signature, request))
        if signature.spec.max_batch_size > 0:
            for source in inputs:
                _known(signature, source)
                if not source.shape:
                    raise InvalidArgument(
                        f"input '{source.name}' has no shape but model requires batch dimension for"
                        f" '{signature.spec.name}'"
                    )
            _check_batch(signature, inputs)
        for source in inputs:
            known = _known(signature, source)
            _check_type(signature, source, known)
            _check_shape(signature, source, known)
        for source in inputs:
            _input(signature, source, limits)
    except InvalidArgument as ex:
        return ex
    return None


def locate_inputs(spec: ModelSpec, checked: list[CheckedInput], find: Find) -> list[CheckedInput]:
    """Return the inputs with `at` set for inputs in client memory, as `find` sees the regions now.
    Raise NotFound for a shared-memory region that is not registered."""
    return [
        item
        if item.source.region is None
        else CheckedInput(
            item.source, item.signature, item.count, item.nbytes, find(spec, item.source.region)
        )
        for item in checked
    ]


def check_outputs(
    signature: ModelSignature, request: InferRequest, find: Find
) -> tuple[tuple[InferOutput, ...], tuple[OutputPlace, ...]]:
    """Return the requested outputs in the client's order, or all outputs if the client named none.

    The second value has the places of outputs that go into client memory.

    Raise InvalidArgument for an unknown output, an output without the requested form, or a
    classification of more than `bounds.MAX_CLASSES`. Raise NotFound for a shared-memory region that
    is not registered.
    """
    default = request.binary_output
    requested = request.outputs or signature.all_outputs
    for output in requested:
        spec = signature.outputs.get(output.name)
        if spec is None:
            raise InvalidArgument(
                f"[request id: {request.id or UNKNOWN_ID}] unexpected inference output"
                f" '{output.name}' for model '{signature.spec.name}'"
                f"{_own_names('outputs', signature.outputs)}"
            )
        if output.region is not None:
            continue
        if output.classification:
            if not DATATYPES[spec.datatype].classifiable:
                raise InvalidArgument(
                    "class result not available for output due to unsupported type"
                    f" '{spec.datatype}': output '{output.name}'"
                )
            if output.classification > bounds.MAX_CLASSES:
                raise InvalidArgument(
                    f"output '{output.name}': classification of {output.classification} is more"
                    f" than {bounds.MAX_CLASSES}"
                )
        elif default if output.binary is None else output.binary:
            continue
        elif not DATATYPES[spec.datatype].json_ok:
            raise InvalidArgument(no_json_form("sending", spec.datatype, f"output {output.name}"))
    return requested, locate_outputs(signature.spec, requested, find)


def locate_outputs(
    spec: ModelSpec, wanted: tuple[InferOutput, ...], find: Find
) -> tuple[OutputPlace, ...]:
    """Return the places of outputs that go into client memory, as `find` sees the regions now.
    Raise NotFound for a shared-memory region that is not registered."""
    return tuple(
        [OutputPlace(o.name, find(spec, o.region)) for o in wanted if o.region is not None]
    )


def _input(signature: ModelSignature, source: InferInput, limits: Settings) -> CheckedInput:
    """Check an input: the model, the shape and the request must agree on its size."""
    spec = signature.inputs.get(source.name) or _known(signature, source)
    model = signature.spec.name
    datatype = spec.datatype
    if source.datatype != datatype.name:
        _check_type(signature, source, spec)
    if source.shape == spec.shape:
        count = spec.count
    else:
        _check_shape(signature, source, spec)
        count = prod(source.shape)
        if count <= MAX_INT64 < count * datatype.itemsize:
            raise InvalidArgument(
                f"byte size overflow for input '{source.name}': {count} elements of"
                f" {datatype.itemsize} bytes"
            )
        if count > bounds.MAX_ELEMENTS:
            raise InvalidArgument(
                f"the shape of input '{source.name}' causes total element count to exceed maximum"
                f" size of {bounds.MAX_ELEMENTS}"
            )
    itemsize = datatype.itemsize
    nbytes = source.region.nbytes if source.region is not None else source.binary_size
    if nbytes is None:
        if not datatype.json_ok:
            raise InvalidArgument(no_json_form("receiving", datatype.name, f"input {source.name}"))
        # Every element takes at least one character, so the JSON limit bounds these tensors.
        return CheckedInput(source, spec, count, count * itemsize if itemsize else -1)
    if itemsize and nbytes != count * itemsize:
        raise InvalidArgument(
            f"input byte size mismatch for input '{source.name}' for model '{model}'."
            f" Expected {count * itemsize}, got {nbytes}"
        )
    if nbytes > limits.max_tensor_bytes:
        raise TooLarge(
            f"input '{source.name}' has a byte_size ({nbytes} bytes) that exceeds the maximum"
            f" allowed value of {limits.max_tensor_bytes} bytes (setting max_tensor_bytes)"
        )
    return CheckedInput(source, spec, count, nbytes)


def _known(signature: ModelSignature, source: InferInput) -> InputSignature:
    spec = signature.inputs.get(source.name)
    if spec is None:
        raise InvalidArgument(
            f"unexpected inference input '{source.name}' for model '{signature.spec.name}'"
            f"{_own_names('inputs', signature.inputs)}"
        )
    return spec


def _check_type(signature: ModelSignature, source: InferInput, spec: InputSignature) -> None:
    model, expected = signature.spec.name, spec.datatype.name
    if source.datatype not in DATATYPES:
        raise InvalidArgument(
            f"invalid datatype '{source.datatype}' for input {source.name}: model '{model}'"
            f" expects '{expected}'"
        )
    if source.datatype != expected:
        raise InvalidArgument(
            f"inference input '{source.name}' data-type is '{source.datatype}', but model"
            f" '{model}' expects '{expected}'"
        )


def _check_shape(signature: ModelSignature, source: InferInput, spec: InputSignature) -> None:
    shape, expected = source.shape, spec.shape
    if len(shape) == len(expected):
        for got, want in zip(shape, expected, strict=True):
            if want != got and want != -1:
                break
        else:
            return
    note = ""
    if signature.spec.max_batch_size > 0:
        note = (
            ". NOTE: Setting a non-zero max_batch_size in the model config requires a batch"
            " dimension to be prepended to each input shape"
        )
    raise InvalidArgument(
        f"unexpected shape for input '{source.name}' for model '{signature.spec.name}'."
        f" Expected {_shown(expected)}, got {_shown(shape)}{note}"
    )


def _check_batch(signature: ModelSignature, inputs: Sequence[InferInput]) -> None:
    batch = inputs[0].shape[0] if inputs else 0
    for source in inputs:
        if source.shape[0] != batch:
            raise InvalidArgument(
                f"input '{source.name}' batch size does not match other inputs for"
                f" '{signature.spec.name}'"
            )
    if not batch and inputs:
        raise InvalidArgument(
            f"inference request batch-size must be >= 1 for '{signature.spec.name}': input"
            f" '{inputs[-1].name}' has no row"
        )
    if batch > signature.spec.max_batch_size:
        raise InvalidArgument(
            f"inference request batch-size must be <= {signature.spec.max_batch_size} for"
            f" '{signature.spec.name}', got {batch}"
        )


def _wrong_number(signature: ModelSignature, request: InferRequest) -> str:
    got = [source.name for source in request.inputs]
    missing = [name for name in signature.inputs if name in signature.required and name not in got]
    least, most = len(signature.required), len(signature.inputs)
    expected = (
        f"expected {most} inputs"
        if least == most
        else f"expected number of inputs between {least} and {most}"
    )
    return (
        f"{expected} but got {len(got)} inputs for model '{signature.spec.name}'. Got input(s)"
        f" {_shortened(got)}, but missing required input(s) {_shortened(missing)}. Please provide"
        " all required input(s)."
    )


def _own_names(kind: str, names: Iterable[str]) -> str:
    """Return the model's own tensor names for an error message, as far as the list is short."""
    own = list(names)
    return f", whose {kind} are {_shortened(own)}" if own else ""


def _shortened(names: list[str]) -> str:
    shown = [name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…" for name in names]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return "[" + ",".join(f"'{name}'" for name in shown[:_MOST_NAMES]) + "]" + more


def _shown(shape: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"
