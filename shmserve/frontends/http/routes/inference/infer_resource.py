"""POST /v2/models/{m}[/versions/{v}]/infer: an inference is run, and from slots to the socket."""

from __future__ import annotations

from time import monotonic_ns

import falcon
import msgspec
from msgspec import UNSET, Struct

from shmserve.config import Settings
from shmserve.dispatch.outcome import Outcome
from shmserve.dispatch.receipt import Receipt
from shmserve.frontends import request_ids
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import compression
from shmserve.frontends.http.path_values import checked_version
from shmserve.frontends.http.routes.inference.infer_body import InferBody, KnownRequests
from shmserve.frontends.http.server.response import BufferBody
from shmserve.frontends.inference import Inference
from shmserve.frontends.oip.classification import classify
from shmserve.frontends.oip.forwarded_fields import compiled
from shmserve.frontends.oip.shared_memory import SharedMemory
from shmserve.protocol.oip.answer import (
    BinarySize,
    InferAnswer,
    InferAnswerOutput,
    answer_parameters,
    encode,
    json_data,
)
from shmserve.waiting import beside, beside_if_large

HEADER_LENGTH = "Inference-Header-Content-Length"
_STAGES = ("receive", "queue", "compute", "send")
_encode_receipt = msgspec.json.Encoder().encode


class InferResource:
    """Runs models."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, regions: SharedMemory) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._regions = regions
        self._forward = compiled(settings.http_header_forward_pattern)
        self._known = KnownRequests(settings)

    def on_post(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        environ = req.env
        source = InferBody(environ, self._settings, self._regions, self._forward, self._known)
        entry = self._dispatcher.ready_model(name, checked_version(version) if version else "")
        inference = Inference(self._dispatcher, entry, source)
        try:
            outcome = inference.run()
            answered = monotonic_ns()
            result = make_result(inference, outcome)
            accept = environ.get("HTTP_ACCEPT_ENCODING")
            chosen = compression.choose(accept) if accept else ""
            copied, held = result.copied, False
            if result.binary_bytes:
                resp.content_type = "application/octet-stream"
                resp.set_header(HEADER_LENGTH, str(len(result.head)))
            if chosen:
                copied += result.binary_bytes
                resp.data = beside(compression.compress, [result.head, *result.buffers], chosen)
                resp.set_header("Content-Encoding", chosen)
            elif result.buffers:
                held = True
                body = BufferBody([result.head, *result.buffers], inference.close)
                resp.set_stream(body, len(result.head) + result.binary_bytes)
            else:
                resp.data = result.head
            inference.account.answered(copied, monotonic_ns() - answered)
            given = environ.get(request_ids.IN_ENVIRON)
            if given is not None:
                resp.set_header(request_ids.HEADER, request_ids.request_id(given))
            if environ.get("HTTP_SHMSERVE_RECEIPT") == "1":
                set_receipt(resp, inference.receipt)
        except BaseException as ex:
            inference.failed(ex)
            inference.close()
            raise
        if not held:
            inference.close()


def set_receipt(resp: falcon.Response, receipt: Receipt) -> None:
    """Tell the client what its request cost."""
    costs = receipt.as_dict()
    resp.set_header("shmserve-receipt", _encode_receipt(costs).decode())
    times = costs["ns"]
    resp.set_header(
        "Server-Timing", ", ".join(f"{stage};dur={times[stage] / 1e6:.3f}" for stage in _STAGES)
    )


class InferResult(Struct, frozen=True):
    """A response's body.

    Attributes:
        buffers: views of shared memory, in the order of the JSON part.
        copied: bytes of tensors that were converted to JSON.
    """

    head: bytes
    buffers: list[memoryview | bytes]
    binary_bytes: int
    copied: int


def make_result(inference: Inference[InferBody], outcome: Outcome) -> InferResult:
    """Make the response's body, with the requested outputs in the order of the request. An output
    that the model did not give is left out.

    Raises:
        InvalidArgument: an output has no JSON form but was requested as JSON.
    """
    signature, request = inference.signature, inference.source.request
    spec = signature.spec
    given = {tensor.name: tensor for tensor in outcome.outputs}
    outputs: list[InferAnswerOutput] = []
    buffers: list[memoryview | bytes] = []
    total = copied = 0
    for want in inference.source.wanted:
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
        size = len(data)
        if request.binary_output if want.binary is None else want.binary:
            outputs.append(InferAnswerOutput(name, datatype, shape, BinarySize(size)))
            if size:
                buffers.append(data)
                total += size
        else:
            elements = beside_if_large(size, json_data, data, datatype, shape, name, spec.name)
            copied += len(tensor.view)
            outputs.append(InferAnswerOutput(name, datatype, shape, data=elements))
    parameters = answer_parameters(outcome.parameters) if outcome.parameters else UNSET
    answer = InferAnswer(spec.name, spec.version, outputs, request.id or UNSET, parameters)
    head = beside_if_large(copied, encode, answer) if copied else encode(answer)
    return InferResult(head, buffers, total, copied)
