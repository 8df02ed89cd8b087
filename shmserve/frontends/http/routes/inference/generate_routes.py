"""POST /v2/models/{m}[/versions/{v}]/generate and generate_stream."""

from collections.abc import Iterator

from falcon import Request, Response

from shmserve.config import Settings
from shmserve.core.caller import UNKNOWN_CALLER
from shmserve.core.scheduling.sequence_names import sequence_owner
from shmserve.dispatch.outcome import Outcome, RunOptions
from shmserve.errors import InvalidArgument, NotFound, ShmserveError
from shmserve.frontends import request_ids
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.http.request_caller import caller_of
from shmserve.frontends.http.route_table import MODEL_PATHS, Routes, checked_version
from shmserve.frontends.http.routes.inference.body_reader import held, open_body
from shmserve.frontends.http.routes.inference.infer_body import InferBody, client_of
from shmserve.frontends.http.server.response import send_chunks
from shmserve.frontends.inference import Inference
from shmserve.frontends.oip.forwarded_fields import compiled
from shmserve.frontends.oip.generate import encode_error, encode_outcome, is_answer, parse_generate
from shmserve.protocol.control.data_messages import Parameter, RegionRef
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve.protocol.oip.request import RegionWindow
from shmserve.protocol.oip.validation import check_inputs, slot_bytes
from shmserve.tensor.spec import ModelSpec
from shmserve.waiting import beside_if_large


class GenerateBody(InferBody):
    """A generate request: the body is JSON alone, and no tensor lies in client memory."""

    __slots__ = ()

    def find(self, spec: ModelSpec, window: RegionWindow) -> RegionRef:
        raise NotFound("generate has no shared-memory regions")

    def check(self, signature: ModelSignature) -> RunOptions:
        settings = self._settings
        text = open_body(self.environ, settings).read_rest(
            settings.max_json_bytes, "max_json_bytes"
        )
        self.request = request = beside_if_large(len(text), parse_generate, signature, text)
        self._inputs = check_inputs(signature, request, settings, self.find)
        self.nbytes = slot_bytes(self._inputs)
        self._signature, self._reader = signature, held(b"")
        return self.options(request.id, self.with_headers(request.parameters))

    def options(self, request_id: str, parameters: dict[str, Parameter]) -> RunOptions:
        """Return the options of the request."""
        on_wait, number = client_of(self.environ)
        shared = self._settings.shared_sequences
        return RunOptions(
            request_id,
            parameters=parameters,
            on_wait=on_wait,
            caller_number=number,
            sequence_owner=sequence_owner(caller_of(self.environ), shared)
            if "sequence_id" in parameters
            else UNKNOWN_CALLER,
        )


class GenerateRoutes:
    """Responders of the generate extension, for all models. `body`: kind of the requests.
    `errors_are_events`: a stream that begins with an error is a stream, with the error's status."""

    body: type[GenerateBody] = GenerateBody
    errors_are_events = True

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._forward = compiled(settings.http_header_forward_pattern)

    def _open(self, req: Request, name: str, version: str) -> Inference[GenerateBody]:
        body = self.body(req.env, self._settings, forward=self._forward)
        entry = self._dispatcher.ready_model(name, checked_version(version))
        return Inference(self._dispatcher, entry, body)

    def on_post(self, req: Request, resp: Response, name: str, version: str = "") -> None:
        """Answer with exactly one JSON object."""
        with self._open(req, name, version) as inference:
            data = b""
            for outcome in _answers(inference):
                if data:
                    raise InvalidArgument(_exactly_one("more than one"))
                data = self.encoded(inference, outcome)
            if not data:
                raise InvalidArgument(_exactly_one("none"))
        resp.data = data
        copy_request_id(req, resp)

    def on_post_stream(self, req: Request, resp: Response, name: str, version: str = "") -> None:
        """Answer with any number of server-sent events."""
        inference = self._open(req, name, version)
        try:
            answers = _answers(inference)
            first, event = next(answers, None), b""
            # an event like any other, with the error's status
            if first is not None and first.error is not None and self.errors_are_events:
                resp.status = first.error.http_status
                event = _event(encode_error(first.error.message))
            elif first is not None:
                event = _event(self.encoded(inference, first))
        except BaseException as ex:  # the client gets an error, not a stream
            inference.failed(ex)
            inference.close()
            raise
        resp.content_type = "text/event-stream; charset=utf-8"
        resp.set_header("Cache-Control", "no-cache")
        copy_request_id(req, resp)
        send_chunks(resp, event, self._events(inference, answers), inference.close)

    def encoded(self, inference: Inference[GenerateBody], outcome: Outcome) -> bytes:
        """Return the JSON of an answer, or raise the answer's error."""
        size = sum(len(tensor.view) for tensor in outcome.outputs)
        given, receipt = inference.source.request.id, inference.receipt
        return beside_if_large(size, encode_outcome, inference.signature, given, outcome, receipt)

    def _events(
        self, inference: Inference[GenerateBody], answers: Iterator[Outcome]
    ) -> Iterator[bytes]:
        """Yield each answer as an event as soon as it is there. Nothing runs ahead of a client that
        does not read."""
        while True:
            try:
                outcome = next(answers, None)
            except ShmserveError as ex:  # the error is the last event of the stream
                yield _event(encode_error(ex.message))
                return
            if outcome is None:
                return
            try:
                event = _event(self.encoded(inference, outcome))
            except ShmserveError as ex:  # only this answer failed, the stream goes on
                event = _event(encode_error(ex.message))
            yield event


def add_routes(routes: Routes, dispatcher: DispatchApi, settings: Settings) -> None:
    """Add all routes of this module."""
    resource = GenerateRoutes(dispatcher, settings)
    for path in MODEL_PATHS:
        routes.add("inference", f"{path}/generate", resource)
        routes.add("inference", f"{path}/generate_stream", resource, suffix="stream")


def copy_request_id(req: Request, resp: Response) -> None:
    """Copy the request's id to the answer, if the client sent an id."""
    if request_ids.IN_ENVIRON in req.env:
        given = req.env[request_ids.IN_ENVIRON]
        resp.set_header(request_ids.HEADER, request_ids.request_id(given))


def _answers(inference: Inference[GenerateBody]) -> Iterator[Outcome]:
    """Return the outcomes to send. Views are valid until the next outcome is requested."""
    return filter(is_answer, inference.stream())


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _exactly_one(got: str) -> str:
    return (
        f"generate expects model to produce exactly 1 response, this one gave {got}:"
        " use generate_stream"
    )
