"""Answers of a model that takes messages, as outputs of the data plane.

Any thread of a model may call these functions.
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
    """Return bytes as an output."""
    array = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    return Output(name, "UINT8", array)


def message(data: bytes | memoryview) -> Response:
    """Return a serialized message as a response."""
    return Response(outputs=(output(model_parameters.MESSAGE, data),))


def http(head: HttpAnswer | None, body: bytes | memoryview) -> Response:
    """Return an HTTP answer, or a further part of an answer (without `head`), as a response."""
    outputs = [output(custom_http.BODY, body)]
    if head is not None:
        outputs.insert(0, output(custom_http.HEAD, custom_http.encode(head)))
    return Response(outputs=tuple(outputs))


class Answers:
    """The answers to one request, in order. After the last answer, nothing is sent."""

    def __init__(self, request: Request, responses: Responses) -> None:
        self._request = request
        self._responses = responses
        self._lock = threading.Lock()
        self.started = False
        self.ended = False

    @property
    def cancelled(self) -> bool:
        """Return True once no client waits for the answers."""
        return self._request.cancelled

    def send(self, response: Response, final: bool = False) -> None:
        """Send an answer. Wait while the client is behind."""
        with self._lock:
            if self.ended:
                log.warning("an answer after the last one is dropped")
            else:
                self._send(response, final)

    def send_part(self, body: bytes, content_type: str, final: bool = False) -> None:
        """Send a part of an HTTP answer; the first part includes the head."""
        with self._lock:
            if self.ended:
                log.warning("a part of an answer after the last one is dropped")
                return
            head = None if self.started else HttpAnswer(200, (("Content-Type", content_type),))
            self._send(http(head, body), final)

    def fail(self, error: ShmserveError) -> None:
        """End with an error, which follows the answers that were sent."""
        with self._lock:
            if self.ended:
                log.warning("an error after the last answer is dropped: %s", error.message)
            else:
                self._send(Response(error=error), True)

    def end(self) -> None:
        """End without a further answer."""
        with self._lock:
            if not self.ended:
                self._send(None, True)

    def _send(self, response: Response | None, final: bool) -> None:
        self.started = True
        self.ended = final
        self._responses.send(response, final)
