"""An outcome as the client asked for it: JSON part and binary parts."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Struct

from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.dispatch.receipt import Receipt
from shmserve.frontends.oip.classification import top_classes
from shmserve.protocol.oip.answer import (
    BinarySize,
    InferAnswer,
    InferAnswerOutput,
    answer_parameters,
    encode,
    json_data,
)
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.request import InferOutput, InferRequest
from shmserve.tensor import bytes_codec
from shmserve.waiting import beside_if_large


class InferResult(Struct, frozen=True):
    """A response's body. `buffers` are views of shared memory, in the order of the JSON part."""

    head: bytes
    buffers: list[memoryview | bytes]
    binary_bytes: int


def make_result(
    signature: ModelSignature,
    request: InferRequest,
    wanted: Sequence[InferOutput],
    outcome: Outcome,
    receipt: Receipt,
) -> InferResult:
    """Put the answer together; what is converted to JSON counts as copied.

    Outputs come in the order of `wanted`. One that the model did not give is left out.

    Raises:
        InvalidArgument: an output has no JSON form but was wanted as JSON.
    """
    spec = signature.spec
    given = {tensor.name: tensor for tensor in outcome.outputs}
    outputs: list[InferAnswerOutput] = []
    buffers: list[memoryview | bytes] = []
    total = copied = 0
    for want in wanted:
        tensor = given.get(want.name)
        if tensor is None:
            continue
        name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
        if want.region is not None:  # it is there already
            outputs.append(InferAnswerOutput(name, datatype, shape))
            continue
        data: memoryview | bytes = tensor.view
        if want.classification:
            size = len(tensor.view)
            datatype, shape, data = beside_if_large(size, classify, signature, want, tensor)
        if request.binary_output if want.binary is None else want.binary:
            size = len(data)
            outputs.append(InferAnswerOutput(name, datatype, shape, BinarySize(size)))
            if size:
                buffers.append(data)
                total += size
        else:
            size = len(data)
            elements = beside_if_large(size, json_data, data, datatype, shape, name, spec.name)
            copied += len(tensor.view)
            outputs.append(InferAnswerOutput(name, datatype, shape, data=elements))
    parameters = answer_parameters(outcome.parameters) if outcome.parameters else UNSET
    answer = InferAnswer(spec.name, spec.version, outputs, request.id or UNSET, parameters)
    receipt.copied_out += copied
    head = beside_if_large(copied, encode, answer) if copied else encode(answer)
    return InferResult(head, buffers, total)


def classify(
    signature: ModelSignature, want: InferOutput, tensor: OutputTensor
) -> tuple[str, tuple[int, ...], bytes]:
    """Datatype, shape and bytes of what an output that was to be classified becomes."""
    known = signature.outputs.get(want.name)
    elements, shape = top_classes(
        tensor.view,
        tensor.datatype,
        tensor.shape,
        want.classification,
        known.labels if known is not None else (),
        signature.spec.max_batch_size > 0,
    )
    return "BYTES", shape, bytes_codec.encode(elements)
