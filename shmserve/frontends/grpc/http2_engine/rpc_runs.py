"""Rpcs of HTTP/2 calls, each a greenlet of the loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import grpc
from greenlet import GreenletExit

from shmserve.config import Settings
from shmserve.errors import ShmserveError
from shmserve.frontends.grpc.error_statuses import details_of, status_of
from shmserve.frontends.grpc.handlers import MAX_MESSAGE_BYTES
from shmserve.frontends.grpc.http2_engine.call_head import OK, response_head, status_fields
from shmserve.frontends.grpc.http2_engine.http2_call import Aborted, Http2Call
from shmserve.frontends.grpc.http2_engine.message_compression import deflate
from shmserve.frontends.grpc.rpc_methods import HeldAnswer
from shmserve.frontends.http2 import Buffer, Fields
from shmserve.frontends.http2.grpc_framing import GrpcMessage, prefix
from shmserve.waiting import beside_if_large

_log = logging.getLogger("shmserve.grpc")

_JOINED_BYTES = 32 << 10  # up to here a copy costs less than another buffer
_UNKNOWN = (grpc.StatusCode.UNKNOWN, "internal server error")


class AnswerTooLarge(Exception):
    """An answer that may not be sent."""


class RpcRuns:
    """Runs rpcs and encodes their answers.

    Attributes:
        compression: the setting `grpc_compression`.
        plain: the headers of an answer that is not compressed.
    """

    def __init__(self, settings: Settings) -> None:
        self._most = MAX_MESSAGE_BYTES
        self.compression = settings.grpc_compression
        self.plain = response_head("identity")
        self._compressed = response_head(settings.grpc_compression)

    def head(self, call: Http2Call) -> bytes:
        """The headers of a call's answer."""
        return self._compressed if self._compresses(call) else self.plain

    def unary(self, call: Http2Call, message: GrpcMessage | None) -> None:
        """Run an rpc of one message and one answer. `message`: None if there is none."""
        try:
            if not call.active:
                return
            read = _nothing if message is None else partial(call.read, message)
            answer: bytes | HeldAnswer = call.head.method.behave(read, call)
            if isinstance(answer, HeldAnswer):
                data, held = self._encode_held(answer), answer
            else:
                data, held = self._encode(call, answer), None
            trailers = _succeeded(call) if call.trailing else OK
        except BaseException as ex:
            call.owner.send(call, (), _failed(call, ex))
        else:
            call.owner.send(call, data, trailers, held)
        finally:
            call.drop_message()

    def stream(self, call: Http2Call) -> None:
        """Run an rpc of any number of messages and answers."""
        if not call.active:
            return
        answers = call.head.method.behave(call.requests(), call)
        try:
            for answer in answers:
                if not call.send(self._encode(call, answer)):
                    return
        except BaseException as ex:
            call.owner.send(call, (), _failed(call, ex))
        else:
            call.owner.send(call, (), _succeeded(call) if call.trailing else OK)
        finally:
            answers.close()
            call.drop_message()

    def _compresses(self, call: Http2Call) -> bool:
        return self.compression != "none" and self.compression in call.head.accepted

    def _encode_held(self, answer: HeldAnswer) -> Sequence[Buffer]:
        if answer.nbytes > self._most:
            answer.close()
            raise self._too_large(answer.nbytes)
        return (prefix(answer.nbytes), *answer.parts)

    def _too_large(self, size: int) -> AnswerTooLarge:
        return AnswerTooLarge(f"an answer of {size} bytes is larger than {self._most} bytes")

    def _encode(self, call: Http2Call, answer: bytes) -> Sequence[Buffer]:
        size = len(answer)
        if size > self._most:
            raise self._too_large(size)
        if self.compression != "none" and self._compresses(call):
            made = beside_if_large(size, deflate, answer, self.compression)
            if made is not answer:
                return (prefix(len(made), compressed=True), made)
        if size <= _JOINED_BYTES:
            return (prefix(size) + answer,)
        return (prefix(size), answer)


def _nothing() -> None:
    """Read the message of a call that has none."""


def _succeeded(call: Http2Call) -> Fields:
    return status_fields(grpc.StatusCode.OK, "", call.trailing)


def _failed(call: Http2Call, ex: BaseException) -> Fields:
    if isinstance(ex, Aborted) and call.status is not None:
        status = call.status
    elif isinstance(ex, AnswerTooLarge):
        status = (grpc.StatusCode.RESOURCE_EXHAUSTED, str(ex))
    elif isinstance(ex, grpc.RpcError | GreenletExit):  # the client has gone; the loop ends
        status = (grpc.StatusCode.CANCELLED, "the call has ended")
    elif isinstance(ex, ShmserveError):
        status = (status_of(ex), details_of(ex))
    else:
        _log.error("unexpected error in a call", exc_info=ex)
        status = _UNKNOWN
    return status_fields(*status, call.trailing)
