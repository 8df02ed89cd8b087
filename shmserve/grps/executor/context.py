"""`GrpsContext`: one request, as a project's code sees it beside its input."""

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
    """Give a message the status of success, unless it says that it is a failure."""
    if message.status.status != grps_pb2.Status.FAILURE:
        message.status.MergeFrom(_SUCCESS)


class GrpsContext:
    """Without arguments, as tests of projects make it, it belongs to no client."""

    def __init__(
        self,
        answers: Answers | None = None,
        http_request: HttpRequest | None = None,
        streaming: bool = False,
        stream_type: str = model_parameters.STREAM_TYPE,
        deadline_ns: int = 0,
    ) -> None:
        self.deadline_ns = deadline_ns  # from then on nobody waits for the answer; 0: never
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
        """Keep something for the rest of the request."""
        self._data[key] = value

    def get_user_data(self, key: Any) -> Any:
        """What was kept, or None."""
        return self._data.get(key)

    # ------------------------------------------------------------ streaming

    def if_streaming(self) -> bool:
        """Whether the client wants a stream and it has not ended yet."""
        return self._streaming and self._answers is not None and not self._answers.ended

    def stream_respond(self, msg: Any, final: bool = False) -> None:
        """Send a message to the client now; does nothing if it wants no stream.

        Raises:
            ValueError: it is no GrpsMessage.
        """
        if not isinstance(msg, grps_pb2.GrpsMessage):
            raise ValueError(f"a stream consists of GrpsMessage, not {type(msg).__name__}")
        mark_success(msg)
        if self._answers is None or not self.if_streaming():
            return
        if self._http_request is None:
            self._answers.send(answers.message(msg.SerializeToString()), final)
        else:  # the request was raw HTTP, and so is the answer
            body = msg.bin_data or msg.str_data.encode()
            self._answers.send_part(body, self._stream_type, final)

    def stream_respond_with_postprocess(self, inp: Any, final: bool = False) -> None:
        """Send what the converter makes of it.

        Raises:
            ValueError: the model has no converter.
        """
        if self._converter is None:
            raise ValueError("stream_respond_with_postprocess needs a converter")
        self.stream_respond(self._converter.postprocess(inp, self), final)

    def customized_http_stream_respond(self, msg: str | bytes, final: bool = False) -> None:
        """Send a part of the body of a custom HTTP answer now.

        Raises:
            ValueError: it is neither text nor bytes, or the request is not custom HTTP.
        """
        if not isinstance(msg, str | bytes):
            raise ValueError(f"a part of a stream is str or bytes, not {type(msg).__name__}")
        if self._http_request is None:
            raise ValueError("customized_http_stream_respond needs a custom HTTP request")
        if self._answers is not None and self.if_streaming():
            body = msg.encode() if isinstance(msg, str) else msg
            self._answers.send_part(body, self._stream_type, final)

    def if_disconnected(self) -> bool:
        """Whether the client has gone."""
        return self._answers is not None and self._answers.cancelled

    # --------------------------------------------------------------- errors

    def set_has_err(self, has_err: bool) -> None:
        """Say that the request has failed: what would follow is left out."""
        self._has_err = has_err

    def has_err(self) -> bool:
        return self._has_err

    def set_err_msg(self, err_msg: str) -> None:
        """Say that the request has failed, and why."""
        self._has_err = True
        self._err_msg = err_msg

    def get_err_msg(self) -> str:
        return self._err_msg

    # ---------------------------------------------------------- custom HTTP

    def get_http_request(self) -> HttpRequest | None:
        """The request of a custom HTTP path, else None."""
        return self._http_request

    def set_http_response(self, http_response: Any) -> None:
        """Answer a custom HTTP request: str, bytes, (body, status, headers) or a Flask response.

        Raises:
            ValueError: it is none of these.
        """
        self._http_response = response_of(http_response)

    def get_http_response(self) -> Any:
        """The response that was set (`CustomResponse`, or Flask's own), or None. What is changed of
        it until the request ends is sent."""
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
