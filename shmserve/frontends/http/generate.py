"""POST /v2/models/{m}[/versions/{v}]/generate and generate_stream."""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

import falcon

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, NotFound, ShmserveError
from shmserve.frontends.http.infer import receive, watch
from shmserve.frontends.http.routes.body_reader import held, open_intake
from shmserve.frontends.http.routes.paths import checked_version
from shmserve.frontends.oip.generate import (
    encode_error,
    encode_outcome,
    is_answer,
    parse_generate,
)
from shmserve.frontends.oip.seam import Call, Dispatcher, Outcome
from shmserve.protocol.control.data_messages import RegionRef
from shmserve.protocol.oip.model_signature import ModelPlan, plan_of
from shmserve.protocol.oip.request import RegionWindow
from shmserve.protocol.oip.validation import check_inputs
from shmserve.tensor.spec import ModelSpec


class _Generation:
    """A request under way: its call and its answers."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: Settings,
        env: dict[str, Any],
        name: str,
        version: str,
    ) -> None:
        started = monotonic_ns()
        entry = dispatcher.ready_model(name, checked_version(version) if version else "")
        try:
            self._plan: ModelPlan = plan_of(entry.spec)
            text = open_intake(env, settings).read_rest(settings.max_json_bytes)
            request = parse_generate(self._plan, text, settings)
            inputs = check_inputs(self._plan, request, settings, _no_regions)
        except BaseException as ex:
            dispatcher.refused(entry, ex)
            raise
        self._id = request.id
        self._call: Call = dispatcher.call(entry)
        try:
            receive(self._plan, self._call, inputs, held(b""), settings)
        except BaseException as ex:
            self.failed(ex)
            self.close()
            raise
        self._call.receipt.receive_ns = monotonic_ns() - started
        self._outcomes = self._call.stream(request.id, (), request.parameters, watch(env))

    def answers(self) -> Iterator[Outcome]:
        """Outcomes that have something to tell; a view is valid until the next is asked for."""
        return (outcome for outcome in self._outcomes if is_answer(outcome))

    def encoded(self, outcome: Outcome) -> bytes:
        """An answer's JSON; raises its error."""
        return encode_outcome(self._plan, self._id, outcome, self._call.receipt)

    def failed(self, error: BaseException) -> None:
        """Nobody gets the answers: count it, for its reason."""
        self._call.failed(error)

    def close(self) -> None:
        """Give everything back; what has not come is cancelled."""
        self._call.close()


class GenerateResource:
    """Exactly one answer, as a JSON object."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings

    def on_post(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        generation = _Generation(self._dispatcher, self._settings, req.env, name, version)
        try:
            data = b""
            for outcome in generation.answers():
                if data:
                    raise InvalidArgument(_exactly_one("more than one"))
                data = generation.encoded(outcome)
            if not data:
                raise InvalidArgument(_exactly_one("none"))
        except BaseException as ex:
            generation.failed(ex)
            raise
        finally:
            generation.close()
        resp.data = data


class GenerateStreamResource:
    """Any number of answers, as server-sent events."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings

    def on_post(
        self, req: falcon.Request, resp: falcon.Response, name: str, version: str = ""
    ) -> None:
        generation = _Generation(self._dispatcher, self._settings, req.env, name, version)
        try:
            answers = generation.answers()
            first = next(answers, None)  # what fails before it has the status of its error
            event = _event(generation.encoded(first)) if first is not None else b""
        except BaseException as ex:
            generation.failed(ex)
            generation.close()
            raise
        resp.content_type = "text/event-stream; charset=utf-8"
        resp.set_header("Cache-Control", "no-cache")
        resp.stream = _Events(generation, answers, event)


class _Events:
    """The body of a stream: sends each answer when it is there, waits while nobody reads."""

    def __init__(self, generation: _Generation, answers: Iterator[Outcome], first: bytes) -> None:
        self._generation = generation
        self._answers = answers
        self._first = first

    def __iter__(self) -> Iterator[bytes]:
        if self._first:
            yield self._first
        while True:
            try:
                outcome = next(self._answers, None)
            except ShmserveError as ex:  # the stream is over, and says why
                yield _event(encode_error(ex.message))
                return
            if outcome is None:
                return
            try:
                event = _event(self._generation.encoded(outcome))
            except ShmserveError as ex:  # of this answer alone
                event = _event(encode_error(ex.message))
            yield event

    def close(self) -> None:
        """The last byte is out, or the client is gone."""
        self._generation.close()


def _event(data: bytes) -> bytes:
    return b"data: %b\n\n" % data


def _exactly_one(got: str) -> str:
    return (
        f"generate expects model to produce exactly 1 response, this one gave {got}:"
        " use generate_stream"
    )


def _no_regions(spec: ModelSpec, window: RegionWindow) -> RegionRef:
    raise NotFound("generate has no shared-memory regions")
