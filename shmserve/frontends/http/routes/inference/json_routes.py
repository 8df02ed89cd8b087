"""POST /models/{m}: requests of models that take plain values (`protocol.oip.json_calls`).

The frontend does not look into JSON: the body goes straight into a slot, and the executor reads it.
"""

from falcon import Request, Response

from shmserve.config import Settings
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.errors import NotFound, TooLarge
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http.route_table import Routes
from shmserve.frontends.http.routes.inference.body_heap import RAW_COST
from shmserve.frontends.http.routes.inference.body_reader import held, open_body
from shmserve.frontends.http.routes.inference.form_parts import (
    FORM_COST,
    form_parts,
    is_form_type,
)
from shmserve.frontends.http.routes.inference.generate_routes import (
    GenerateBody,
    GenerateRoutes,
    copy_request_id,
)
from shmserve.frontends.http.server.response import BufferBody
from shmserve.frontends.inference import Inference
from shmserve.protocol.oip.json_calls import (
    JSON_TENSOR,
    SCHEMA_PARAMETER,
    decode_schemas,
    encode_form,
    takes_json,
)
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.tensor.bytes_codec import LENGTH_BYTES
from shmserve.waiting import beside_if_large

PATH = "/models/{name}"


class JsonBody(GenerateBody):
    """A request whose body is JSON or a form."""

    __slots__ = ()

    def check(self, signature: ModelSignature) -> RunOptions:
        name = signature.spec.name
        if not takes_json(signature.spec):
            path = f"/v2/models/{name}"
            flat = "generate_stream" if signature.spec.decoupled else "generate"
            raise NotFound(
                f"model '{name}' takes tensors: its paths are {path}/infer and, for an object of"
                f" plain JSON, {path}/{flat}"
            )
        settings = self._settings
        reader = open_body(self.environ, settings)
        content_type = self.environ.get("CONTENT_TYPE", "")
        if is_form_type(content_type):
            text = reader.read_rest(settings.max_tensor_bytes, "max_tensor_bytes", FORM_COST)
            reader = held(beside_if_large(len(text), _form, text, content_type))
        elif reader.remaining is None:
            limit = settings.max_json_bytes
            reader = held(reader.read_rest(limit, "max_json_bytes", RAW_COST))
        elif reader.remaining > settings.max_json_bytes:
            raise TooLarge(
                f"the body of {reader.remaining} bytes is larger than {settings.max_json_bytes}"
                " bytes (setting max_json_bytes)"
            )
        self._signature, self._reader = signature, reader
        self.nbytes = LENGTH_BYTES + (reader.remaining or 0)
        return self.options("", self.with_headers({}))

    def fill(self, call: InferenceCall) -> None:
        size = self._reader.remaining or 0
        reservation = call.reserve(LENGTH_BYTES + size)
        view = reservation.view
        view[:LENGTH_BYTES] = size.to_bytes(LENGTH_BYTES, "little")
        call.receipt.copy_in(self._reader.fill(view[LENGTH_BYTES:]) if size else 0)
        shape = (1,) * len(self._signature.spec.inputs[0].shape)
        call.add_input(JSON_TENSOR, "BYTES", shape, reservation)


class JsonRoutes(GenerateRoutes):
    """Responder for all models that take plain values."""

    body = JsonBody
    errors_are_events = False

    def on_post(self, req: Request, resp: Response, name: str, version: str = "") -> None:
        """Answer with JSON or bytes, or with server-sent events if the model streams."""
        entry = self._dispatcher.ready_model(name, version)
        if entry.spec.decoupled:
            self.on_post_stream(req, resp, name)
            return
        inference = self._open(req, name, version)
        try:
            text = _text(inference.run())
            inference.answered()
            parameters = inference.signature.spec.parameters
            resp.set_stream(BufferBody([text], inference.close), len(text))
            if media := decode_schemas(parameters.get(SCHEMA_PARAMETER, "")).media:
                resp.content_type = media
            copy_request_id(req, resp)
        except BaseException as ex:
            inference.failed(ex)
            inference.close()
            raise

    def encoded(self, inference: Inference[GenerateBody], outcome: Outcome) -> bytes:
        if outcome.error is not None:
            raise outcome.error
        text = bytes(_text(outcome))
        inference.receipt.copy_out(len(text))
        return text


def add_routes(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add the route of this module."""
    routes.add("inference", PATH, JsonRoutes(dispatcher, settings))


def _text(outcome: Outcome) -> memoryview:
    """Return the JSON of an answer, in the slot."""
    (tensor,) = outcome.outputs
    return tensor.view[LENGTH_BYTES:]


def _form(text: bytes, content_type: str) -> bytes:
    return encode_form(form_parts(text, content_type))
