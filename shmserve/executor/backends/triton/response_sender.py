"""Response sender (`request.get_response_sender()`): lets models send responses themselves."""

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
_LOOK_S = 0.05  # interval of checks for cancellation, in seconds
# Triton's texts: models and their tests compare them
_FLAGS = "Unable to send response. Unsupported flag provided."
_NOTHING = "Inference Response object must be provided when the response flags is set to zero."
_CLOSED = "Unable to send response. Response sender has been closed."
_SECOND = "Unable to send response. Non-decoupled model cannot send more than one response."
_EMPTY = (
    "Unable to send response. Non-decoupled model cannot send complete final before sending a "
    "response."
)


# Checks a model's response and turns it into the server's; True: response of a stream
Convert = Callable[[Request, object, bool], Response]


class InferenceResponseSender:
    """Sends the responses to one request; for any thread. Models get the sender from the
    request."""

    __slots__ = ("__weakref__", "_request", "_sink")

    def __init__(self, *parts: Any, **_options: object) -> None:
        """Make a sender from a request and the sink of its responses (for the server, not for
        models)."""
        if len(parts) != 2 or not isinstance(parts[1], StreamSink | SingleSink):
            raise TypeError("InferenceResponseSender: No constructor defined!")
        self._request: Request = parts[0]
        self._sink: StreamSink | SingleSink = parts[1]

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response.

        With TRITONSERVER_RESPONSE_COMPLETE_FINAL the response is the last one, and may be left
        out. Waits while the client is behind. Responses to a cancelled request are dropped.

        Raises:
            TypeError: `response` is no response.
            TritonModelException: unknown flags, neither response nor flag, or the sender is
                closed. For a model that is not decoupled, also a second response, or the final
                flag before the first response.
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
        """Return True if further responses are unwanted. The model must still send the final
        flag."""
        return self._request.cancelled

    def __del__(self) -> None:
        sink = getattr(self, "_sink", None)
        if sink is not None:
            sink.abandoned()


class StreamSink:
    """Sink of a decoupled model: sends every response at once."""

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
        """Refuse further responses, because `execute` has failed and the server ends the stream."""
        self._closed = True

    def abandoned(self) -> None:
        responses = self._request.responses
        if responses is not None:
            responses.abandoned()


class SingleSink:
    """Sink of a model that is not decoupled: the first response is the answer."""

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
        """Refuse further responses, because `execute` has raised. Return the response sent before,
        if any."""
        with self._lock:
            self._closed = True
            return self._response

    def take(self, returned: object) -> object:
        """Return the answer after `execute` has returned a response: a sent response comes
        first."""
        with self._lock:
            if self._response is not None:
                return self._response
            self._answered = self._closed = True
            return returned

    def abandoned(self) -> None:
        # Takes no lock, because a finalizer may run at any point.
        self._done.set()

    @property
    def has_response(self) -> bool:
        """True if a response has been sent."""
        return self._response is not None

    def wait(self, request: Request) -> InferenceResponse | ShmserveError:
        """Wait for the response. Return the response, or the error if none was sent."""
        while not self._done.wait(_LOOK_S):
            late = request.deadline_ns and time.monotonic_ns() >= request.deadline_ns
            if late or request.cancelled:
                return DeadlineExceeded("the model sent no response in time")
        return self._response or Internal(
            "the model let go of the request without sending its response"
        )
