"""`request.get_response_sender()`: how models of the Triton dialect send by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from shmserve.errors import DeadlineExceeded, Internal, ProtocolViolation, ShmserveError
from shmserve.executor.backend import Request, Response
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.executor.backends.triton.inference_response import InferenceResponse

RESPONSE_COMPLETE_FINAL = 1
_LOOK_S = 0.05  # how often a waiting executor looks for a cancellation
_CLOSED = "the response sender is closed: the final flag has been sent"


# Checks a model's response (of a stream: True) and turns it into one of ours
Convert = Callable[[Request, object, bool], Response]


class InferenceResponseSender:
    """Sends the responses to one request; for any thread. Models get these from requests."""

    __slots__ = ("__weakref__", "_request", "_sink")

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise TritonModelException("get a response sender from a request")

    @classmethod
    def to(cls, request: Request, sink: StreamSink | SingleSink) -> InferenceResponseSender:
        """The sender of a request (for the server, not for models)."""
        sender = cls.__new__(cls)
        sender._request = request
        sender._sink = sink
        return sender

    _request: Request
    _sink: StreamSink | SingleSink

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response. With TRITONSERVER_RESPONSE_COMPLETE_FINAL it is the last one; then
        the response may be left out. Waits while the client is behind; what is sent for a
        cancelled request is dropped.
        """
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"a response has no flags {flags}")
        if response is None and not flags:
            raise TritonModelException("send needs a response, or the final flag")
        if response is not None and not isinstance(response, InferenceResponse):
            kind = type(response).__name__
            raise TritonModelException(f"send takes an InferenceResponse, got {kind}")
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

    __slots__ = ("_convert", "_request")

    def __init__(self, request: Request, convert: Convert) -> None:
        self._request = request
        self._convert = convert

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        responses = self._request.responses
        assert responses is not None
        converted = None
        if response is not None:
            converted = self._convert(self._request, response, True)
        try:
            responses.send(converted, final)
        except ProtocolViolation:
            raise TritonModelException(_CLOSED) from None

    def abandoned(self) -> None:
        responses = self._request.responses
        if responses is not None:
            responses.abandoned()


class SingleSink:
    """Of an ordinary model: one response, which the executor waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._response: InferenceResponse | None = None
        self._closed = False
        self._given_up = False

    def send(self, response: InferenceResponse | None, final: bool) -> None:
        with self._lock:
            if self._given_up:
                return
            if self._closed:
                raise TritonModelException(_CLOSED)
            if response is not None and self._response is not None:
                raise TritonModelException("only decoupled models send more than one response")
            self._response = response or self._response
            if final and self._response is None:
                raise TritonModelException("the final flag without a response: only for decoupled")
            self._closed = final
        if final:
            self._done.set()

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
                with self._lock:
                    self._given_up = True
                return DeadlineExceeded("the model sent no final response in time")
        if self._response is None:
            return Internal("the model let go of the request without sending its response")
        return self._response
