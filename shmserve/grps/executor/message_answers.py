"""Answers of a model that takes messages: what it says, as outputs of the data plane.

Everything here may be called from any thread of a model.
"""

from __future__ import annotations

import logging
import threading

import numpy as np

from shmserve.errors import ShmserveError
from shmserve.executor.backend import Output, Request, Response, Responses
from shmserve.grps.protocol import custom_http, model_parameters
from shmserve.grps.protocol.custom_http import HttpAnswer

log = logging.getLogger(__name__)


def output(name: str, data: bytes | memoryview) -> Output:
    """Bytes as an output."""
    array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    return Output(name, "UINT8", array)


def message(data: bytes | memoryview) -> Response:
    """A serialized message as a response."""
    return Response(outputs=(output(model_parameters.MESSAGE, data),))


def http(head: HttpAnswer | None, body: bytes | memoryview) -> Response:
    """An HTTP answer, or a further part of one, as a response."""
    outputs = [output(custom_http.BODY, body)]
    if head is not None:
        outputs.insert(0, output(custom_http.HEAD, custom_http.encode(head)))
    return Response(outputs=tuple(outputs))


class Answers:
    """The answers to one request, in order; after the last one nothing is sent."""

    def __init__(self, request: Request, responses: Responses) -> None:
        self._request = request
        self._responses = responses
        self._lock = threading.Lock()
        self.started = False
        self.ended = False

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for them any more."""
        return self._request.cancelled

    def send(self, response: Response, final: bool = False) -> None:
        """Send one; waits while the client is behind."""
        with self._lock:
            if self.ended:
                log.warning("an answer after the last one is dropped")
            else:
                self._send(response, final)

    def send_part(self, body: bytes, content_type: str, final: bool = False) -> None:
        """Send a part of an HTTP answer; the first one brings the head."""
        with self._lock:
            if self.ended:
                log.warning("a part of an answer after the last one is dropped")
                return
            head = None if self.started else HttpAnswer(200, (("Content-Type", content_type),))
            self._send(http(head, body), final)

    def fail(self, error: ShmserveError) -> None:
        """End with an error; it follows what was sent."""
        with self._lock:
            if self.ended:
                log.warning("an error after the last answer cannot be told: %s", error.message)
            else:
                self._send(Response(error=error), True)

    def end(self) -> None:
        """Nothing more comes."""
        with self._lock:
            if not self.ended:
                self._send(None, True)

    def _send(self, response: Response | None, final: bool) -> None:
        self.started = True
        self.ended = final
        self._responses.send(response, final)
