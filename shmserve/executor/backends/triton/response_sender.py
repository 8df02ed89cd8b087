"""`request.get_response_sender()`: how models of the Triton dialect send by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from shmserve.errors import DeadlineExceeded, Internal, ProtocolViolation, ShmserveError
from shmserve.executor.backend import Request, Response
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.inference_response import InferenceResponse

RESPONSE_COMPLETE_FINAL = 1
_LOOK_S = 0.05  # how often a waiting executor looks for a cancellation
# As Triton words them: models and their tests compare these
_FLAGS = "Unable to send response. Unsupported flag provided."
_NOTHING = "Inference Response object must be provided when the response flags is set to zero."
_CLOSED = "Unable to send response. Response sender has been closed."
_SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."
_EMPTY = (
    "Unable to send response. Non-decoupled model cannot send complete final before sending a "
    "response."
)


# Checks a model's response (of a stream: True) and turns it into one of ours
Convert = Callable[[Request, object, bool], Response]


class InferenceResponseSender:
    """Sends the responses to one request; for any thread. Models get these from requests."""

    __slots__ = ("__weakref__", "_request", "_sink")

    def __init__(self, *parts: Any, **_options: object) -> None:
        """For the server, not for models: a request and the sink of its responses."""
        if len(parts) != 2 or not isinstance(parts[1], StreamSink | SingleSink):
            raise TypeError("InferenceResponseSender: No constructor defined!")
        self._request: Request = parts[0]
        self._sink: StreamSink | SingleSink = parts[1]

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. With TRITONSERVER_RESPONSE_COMPLETE_FINAL it is the last one; then
        the response may be left out. Waits while the client is behind; what is sent for a
        cancelled request is dropped.

        Raises:
            TypeError: something else than a response.
            TritonModelException: other flags, nothing to send, or it has been closed; of a model
                that is not decoupled also a second response, or the final flag before the first.
        """
        if response is not None and not isinstance(response, InferenceResponse):
            kind = type(response).__name__
            raise TypeError(f"send(): response must be an InferenceResponse, not {kind}")
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(_FLAGS)
        if response is None and not flags:
            raise TritonModelException(_NOTHING)
        self._sink.send(response, bool(flags))

    def is_cancelled(self) -> bool:
        """Whether nobody wants further responses. The final flag is still to be sent."""
        return self._request.cancelled

    def __del__(self) -> None:
        sink = getattr(self, "_sink", None)
        if sink is not None:
            sink.abandoned()


class StreamSink:
    """Of a decoupled model: every response goes on its way at once."""

    __slots__ = ("_closed", "_convert", "_request")

    def __init__(self, request: Request, convert: Convert) -> None:
        self._request = request
        self._convert = convert
        self._closed = False

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        responses = self._request.responses
        assert responses is not None
        if self._closed:
            raise TritonModelException(_CLOSED)
        converted = None
        if response is not None:
            converted = self._convert(self._request, response, True)
        try:
            responses.send(converted, final)
        except ProtocolViolation:
            raise TritonModelException(_CLOSED) from None

    def close(self) -> None:
        """`execute` has failed: the server ends the stream, and the model is told so."""
        self._closed = True

    def abandoned(self) -> None:
        responses = self._request.responses
        if responses is not None:
            responses.abandoned()


class SingleSink:
    """Of an ordinary model: its first response is the answer, whatever follows it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._response: InferenceResponse | None = None
        self._answered = False
        self._closed = False

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        with self._lock:
            if response is not None and self._answered:
                raise TritonModelException(_SECOND)
            if response is None and not self._answered:
                raise TritonModelException(_EMPTY)
            if self._closed:
                raise TritonModelException(_CLOSED)
            self._closed = final
            if response is not None:
                self._answered = True
                self._response = response
                self._done.set()

    def close(self) -> InferenceResponse | None:
        """`execute` has raised: nothing more can be sent. What was, if anything."""
        with self._lock:
            self._closed = True
            return self._response

    def take(self, returned: object) -> object:
        """What is the answer where `execute` has returned one as well."""
        with self._lock:
            if self._response is not None:
                return self._response
            self._answered = self._closed = True
            return returned

    def abandoned(self) -> None:
        # Takes no lock: it may run in the midst of anything.
        self._done.set()

    @property
    def has_response(self) -> bool:
        """Whether one has been sent already."""
        return self._response is not None

    def wait(self, request: Request) -> InferenceResponse | ShmserveError:
        """The response, or why there is none."""
        while not self._done.wait(_LOOK_S):
            late = request.deadline_ns and time.monotonic_ns() >= request.deadline_ns
            if late or request.cancelled:
                return DeadlineExceeded("the model sent no response in time")
        return self._response or Internal(
            "the model let go of the request without sending its response"
        )
