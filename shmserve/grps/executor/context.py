"""`GrpsContext`: a request as a project's code sees it, besides the input."""

from __future__ import annotations

from typing import Any

from shmserve._generated import grps_pb2
from shmserve.grps.executor import message_answers as answers
from shmserve.grps.executor.flask_request import HttpRequest
from shmserve.grps.executor.flask_response import response_of
from shmserve.grps.executor.message_answers import Answers
from shmserve.grps.protocol import model_parameters

_SUCCESS = grps_pb2.Status(code=200, msg="OK", status=grps_pb2.Status.SUCCESS)


def mark_success(message: Any) -> None:
    """Set the status of a message to success, unless the status is failure."""
    if message.status.status != grps_pb2.Status.FAILURE:
        message.status.MergeFrom(_SUCCESS)


class GrpsContext:
    """The context of a request. Without arguments, as in tests of projects, there is no client."""

    def __init__(
        self,
        answers: Answers | None = None,
        http_request: HttpRequest | None = None,
        streaming: bool = False,
        stream_type: str = model_parameters.STREAM_TYPE,
        deadline_ns: int = 0,
    ) -> None:
        self.deadline_ns = deadline_ns  # time limit of the answer (CLOCK_MONOTONIC); 0: no limit
        self._answers = answers
        self._http_request = http_request
        self._http_response: Any = None
        self._streaming = streaming
        self._stream_type = stream_type
        self._data: dict[Any, Any] = {}
        self._has_err = False
        self._err_msg = ""
        self._converter: Any = None
        self._inferer: Any = None

    # ------------------------------------------------------------ user data

    def put_user_data(self, key: Any, value: Any) -> None:
        """Keep a value for the rest of the request."""
        self._data[key] = value

    def get_user_data(self, key: Any) -> Any:
        """Return the kept value, or None."""
        return self._data.get(key)

    # ------------------------------------------------------------ streaming

    def if_streaming(self) -> bool:
        """Return True if the client wants a stream that has not ended yet."""
        return self._streaming and self._answers is not None and not self._answers.ended

    def stream_respond(self, msg: Any, final: bool = False) -> None:
        """Send a message to the client now, if the client wants a stream.

        Raises:
            ValueError: the message is not a GrpsMessage.
        """
        if not isinstance(msg, grps_pb2.GrpsMessage):
            raise ValueError(f"a stream consists of GrpsMessage, not {type(msg).__name__}")
        mark_success(msg)
        if self._answers is None or not self.if_streaming():
            return
        if self._http_request is None:
            self._answers.send(answers.message(msg.SerializeToString()), final)
        else:  # the answer to a raw HTTP request is raw, too
            body = msg.bin_data or msg.str_data.encode()
            self._answers.send_part(body, self._stream_type, final)

    def stream_respond_with_postprocess(self, inp: Any, final: bool = False) -> None:
        """Convert an output of the inferer with the converter, and send the message.

        Raises:
            ValueError: the model has no converter.
        """
        if self._converter is None:
            raise ValueError("stream_respond_with_postprocess needs a converter")
        self.stream_respond(self._converter.postprocess(inp, self), final)

    def customized_http_stream_respond(self, msg: str | bytes, final: bool = False) -> None:
        """Send a part of the body of a custom HTTP answer now.

        Raises:
            ValueError: the part is neither text nor bytes, or the request is not custom HTTP.
        """
        if not isinstance(msg, str | bytes):
            raise ValueError(f"a part of a stream is str or bytes, not {type(msg).__name__}")
        if self._http_request is None:
            raise ValueError("customized_http_stream_respond needs a custom HTTP request")
        if self._answers is not None and self.if_streaming():
            body = msg.encode() if isinstance(msg, str) else msg
            self._answers.send_part(body, self._stream_type, final)

    def if_disconnected(self) -> bool:
        """Return True if the client has gone."""
        return self._answers is not None and self._answers.cancelled

    # --------------------------------------------------------------- errors

    def set_has_err(self, has_err: bool) -> None:
        """Mark the request as failed: later steps are left out."""
        self._has_err = has_err

    def has_err(self) -> bool:
        return self._has_err

    def set_err_msg(self, err_msg: str) -> None:
        """Mark the request as failed, with a text for the client."""
        self._has_err = True
        self._err_msg = err_msg

    def get_err_msg(self) -> str:
        return self._err_msg

    # ---------------------------------------------------------- custom HTTP

    def get_http_request(self) -> HttpRequest | None:
        """Return the request to a custom HTTP path, or None for other requests."""
        return self._http_request

    def set_http_response(self, http_response: Any) -> None:
        """Answer a custom HTTP request: str, bytes, (body, status, headers) or a Flask response.

        Raises:
            ValueError: the response is of another type.
        """
        self._http_response = response_of(http_response)

    def get_http_response(self) -> Any:
        """Return the response that was set (`CustomResponse`, or Flask's own), or None. Changes to
        the response take effect until the request ends."""
        return self._http_response

    # ------------------------------------------------- for the server alone

    @property
    def converter(self) -> Any:
        return self._converter

    def set_converter(self, converter: Any) -> None:
        self._converter = converter

    @property
    def inferer(self) -> Any:
        return self._inferer

    def set_inferer(self, inferer: Any) -> None:
        self._inferer = inferer
