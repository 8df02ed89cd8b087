"""POST /v2/models/{m}[/versions/{v}]/infer: runs an inference, and sends slots to the socket."""

from time import monotonic_ns

import falcon
import msgspec
from msgspec import UNSET

from shmserve.config import Settings
from shmserve.dispatch.outcome import Outcome
from shmserve.dispatch.receipt import Receipt
from shmserve.frontends import request_ids
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http import compression
from shmserve.frontends.http.route_table import checked_version
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
_Result = tuple[bytes, list[memoryview | bytes], int, int]
_encode_receipt = msgspec.json.Encoder().encode


class InferResource:
    """Resource of inference requests."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, regions: SharedMemory) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._regions = regions
        self._forward = compiled(settings.http_header_forward_pattern)
        self._cache = KnownRequests(settings)

    def on_post(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        environ = req.env
        source = InferBody(environ, self._settings, self._regions, self._forward, self._cache)
        entry = self._dispatcher.ready_model(name, checked_version(version) if version else "")
        inference = Inference(self._dispatcher, entry, source)
        try:
            outcome = inference.run()
            answered = monotonic_ns()
            head, buffers, nbytes, copied = make_result(inference, outcome)
            accept = environ.get("HTTP_ACCEPT_ENCODING")
            coding = compression.choose(accept) if accept else ""
            keeps_buffers = False
            if nbytes:
                resp.content_type = "application/octet-stream"
                resp.set_header(HEADER_LENGTH, str(len(head)))
            if coding:
                copied += nbytes
                resp.data = beside(compression.compress, [head, *buffers], coding)
                resp.set_header("Content-Encoding", coding)
            elif buffers:
                keeps_buffers = True
                body = BufferBody([head, *buffers], inference.close)
                resp.set_stream(body, len(head) + nbytes)
            else:
                resp.data = head
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
        if not keeps_buffers:
            inference.close()


def set_receipt(resp: falcon.Response, receipt: Receipt) -> None:
    """Add the costs of the request to the answer's header, for the client."""
    costs = receipt.as_dict()
    resp.set_header("shmserve-receipt", _encode_receipt(costs).decode())
    times = costs["ns"]
    resp.set_header(
        "Server-Timing", ", ".join(f"{stage};dur={times[stage] / 1e6:.3f}" for stage in _STAGES)
    )


def make_result(inference: Inference[InferBody], outcome: Outcome) -> _Result:
    """Return the response's body, with the requested outputs in the order of the request. An
    output that the model did not give is left out.

    Returns:
        The JSON part; buffers in the order of the JSON part; their size in bytes; and the bytes of
        tensors that were converted to JSON.

    Raises:
        InvalidArgument: an output has no JSON form but was requested as JSON.
    """
    signature, request = inference.signature, inference.source.request
    spec = signature.spec
    given = {tensor.name: tensor for tensor in outcome.outputs}
    outputs: list[InferAnswerOutput] = []
    buffers: list[memoryview | bytes] = []
    total = copied = 0
    for requested in inference.source.wanted:
        tensor = given.get(requested.name)
        if tensor is None:
            continue
        name, datatype, shape = tensor.name, tensor.datatype, tensor.shape
        if requested.region is not None:  # the output is in the region already
            outputs.append(InferAnswerOutput(name, datatype, shape))
            continue
        data: memoryview | bytes = tensor.view
        if requested.classification:
            size = len(tensor.view)
            datatype, shape, data = beside_if_large(size, classify, signature, requested, tensor)
        size = len(data)
        if request.binary_output if requested.binary is None else requested.binary:
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
    return head, buffers, total, copied
