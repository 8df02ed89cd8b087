"""Answers of ModelStreamInfer: messages of a stream, and errors that leave the stream open."""

from collections.abc import Callable, Iterator

from shmserve.core.registry import ModelEntry
from shmserve.dispatch.outcome import Outcome
from shmserve.errors import ShmserveError
from shmserve.frontends.grpc.inference.model_infer import InferMessage, outputs_of
from shmserve.frontends.inference import Inference
from shmserve.protocol.protobuf.infer_wire import (
    WireInferRequest,
    encode_stream_response,
    response_parts,
)
from shmserve.waiting import beside_if_large

_FINAL = "triton_final_response"


def only_answer(inference: Inference[InferMessage], outcome: Outcome) -> bytes:
    """Return the one answer of an ordinary model, as a ModelStreamInferResponse, and close the
    inference."""
    with inference:
        message = _stream_message(inference, outcome, final=True)
        inference.answered()
        return message


def all_answers(
    inference: Inference[InferMessage], strict: bool, on_sent: Callable[[], None] | None = None
) -> Iterator[bytes]:
    """Yield all answers of a model as ModelStreamInferResponses. Errors of the model are answers,
    too, or raised if `strict`. Closing the iterator cancels answers that have not arrived.
    `on_sent`: as in `RunOptions`."""
    source = inference.source
    try:
        for outcome in inference.stream(on_sent):
            if outcome.error is not None:
                if strict:
                    raise outcome.error
                yield encode_error(source.wire, outcome.error, inference.entry, outcome.final)
            elif outcome.outputs or not outcome.final or source.empty_final:
                yield _stream_message(inference, outcome, outcome.final)
    except Exception as ex:
        inference.failed(ex)
        raise
    finally:
        inference.close()


def encode_error(
    wire: WireInferRequest | None, error: ShmserveError, entry: ModelEntry | None, final: bool
) -> bytes:
    """Return an error within a stream: a ModelStreamInferResponse with model and id of the failed
    request."""
    if wire is None:
        return encode_stream_response(error.message, None)
    name, version = (entry.spec.name, entry.spec.version) if entry else (wire.model_name, "")
    parts = response_parts(name, version, wire.id, {_FINAL: final}, (), ())
    return encode_stream_response(error.message, parts)


def _stream_message(inference: Inference[InferMessage], outcome: Outcome, final: bool) -> bytes:
    outputs, raw = outputs_of(inference, outcome)
    size = sum([len(part) for part in raw])
    inference.receipt.copied_out += size
    spec = inference.signature.spec
    # like Triton's response for an end without outputs
    version = spec.version if outputs or not final else ""
    parameters = {**outcome.parameters, _FINAL: final}
    request_id = inference.source.wire.id
    parts = response_parts(spec.name, version, request_id, parameters, outputs, raw)
    return beside_if_large(size, encode_stream_response, "", parts)
