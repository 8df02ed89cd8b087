"""Rpcs of HTTP/2 calls, each in a thread of its pool or as a greenlet of the loop."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import grpc

from shmserve.config import Settings
from shmserve.frontends.grpc.http2_engine.call_head import OK, response_head, status_fields
from shmserve.frontends.grpc.http2_engine.http2_call import Aborted, Http2Call
from shmserve.frontends.grpc.http2_engine.message_compression import deflate
from shmserve.frontends.grpc.rpc_methods import HeldAnswer, RpcMessage
from shmserve.frontends.http2 import Buffer, Fields
from shmserve.frontends.http2.grpc_framing import GrpcMessage, prefix
from shmserve.waiting import beside_if_large

_log = logging.getLogger("shmserve.grpc")

_JOINED_BYTES = 32 << 10  # up to here a copy costs less than another buffer
_UNKNOWN = (grpc.StatusCode.UNKNOWN, "internal server error")


class AnswerTooLarge(Exception):
    """An answer that may not be sent."""


class RpcRuns:
    """Runs rpcs and encodes their answers."""

    def __init__(self, settings: Settings) -> None:
        self._most = settings.grpc_max_message_bytes
        self._compression = settings.grpc_compression
        self._plain = response_head("identity")
        self._compressed = response_head(settings.grpc_compression)

    def head(self, call: Http2Call) -> bytes:
        """The headers of a call's answer."""
        if self._compression == "none":
            return self._plain
        return self._compressed if self._compresses(call) else self._plain

    def unary(self, call: Http2Call, message: GrpcMessage | None) -> None:
        """Run an rpc of one message and one answer. `message`: None if there is none."""
        try:
            if not call.is_active():
                return
            if message is not None and call.on_loop and message.parts is None:
                small: RpcMessage = bytes(message.data)
                only = iter((small,))
            else:
                only = _only(call, message)
            answer: bytes | HeldAnswer = call.head.method.behave(only, call)
            if isinstance(answer, HeldAnswer):
                data, held = self._encode_held(answer), answer
            else:
                data, held = self._encode(call, answer), None
        except BaseException as ex:
            call.owner.send_soon(call, (), _failed(call, ex))
        else:
            call.owner.send_soon(call, data, _succeeded(call), held)
        finally:
            if call.tensors is not None or not call.on_loop:
                call.drop_message()

    def stream(self, call: Http2Call) -> None:
        """Run an rpc of any number of messages and answers."""
        if not call.is_active():
            return
        answers = call.head.method.behave(call.requests(), call)
        try:
            for answer in answers:
                call.owner.send_soon(call, self._encode(call, answer), None)
                if not call.await_taken():
                    return
        except BaseException as ex:
            call.owner.send_soon(call, (), _failed(call, ex))
        else:
            call.owner.send_soon(call, (), _succeeded(call))
        finally:
            answers.close()
            call.drop_message()

    def _compresses(self, call: Http2Call) -> bool:
        return self._compression != "none" and self._compression in call.head.accepted

    def _encode_held(self, answer: HeldAnswer) -> Sequence[Buffer]:
        try:
            self._check_size(answer.nbytes)
        except AnswerTooLarge:
            answer.close()
            raise
        return (prefix(answer.nbytes), *answer.parts)

    def _check_size(self, size: int) -> None:
        if size > self._most:
            raise AnswerTooLarge(f"an answer of {size} bytes is larger than {self._most} bytes")

    def _encode(self, call: Http2Call, answer: bytes) -> Sequence[Buffer]:
        size = len(answer)
        if size > self._most:
            self._check_size(size)
        if self._compression != "none" and self._compresses(call):
            made = beside_if_large(size, deflate, answer, self._compression)
            if made is not answer:
                return (prefix(len(made), compressed=True), made)
        if size <= _JOINED_BYTES:
            return (prefix(size) + answer,)
        return (prefix(size), answer)


def _only(call: Http2Call, message: GrpcMessage | None) -> Iterator[RpcMessage]:
    if message is not None:
        yield call.read(message)


def _succeeded(call: Http2Call) -> Fields:
    if call.trailing:
        return status_fields(grpc.StatusCode.OK, "", call.trailing)
    return OK


def _failed(call: Http2Call, ex: BaseException) -> Fields:
    if isinstance(ex, Aborted) and call.status is not None:
        status = call.status
    elif isinstance(ex, AnswerTooLarge):
        status = (grpc.StatusCode.RESOURCE_EXHAUSTED, str(ex))
    elif isinstance(ex, grpc.RpcError):
        status = (grpc.StatusCode.CANCELLED, "the call has ended")
    else:
        _log.error("unexpected error in a call", exc_info=ex)
        status = _UNKNOWN
    return status_fields(*status, call.trailing)
