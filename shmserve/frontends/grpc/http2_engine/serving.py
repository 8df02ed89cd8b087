"""Shared state of all connections of the engine, and the runs of their rpcs."""

import logging
import socket
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import grpc
from greenlet import GreenletExit

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, ResourceExhausted
from shmserve.frontends.connections.open_connections import OpenConnections
from shmserve.frontends.grpc.call_pools import AwaitedRequests
from shmserve.frontends.grpc.error_statuses import details_of, status_of
from shmserve.frontends.grpc.handlers import MAX_MESSAGE_BYTES, NO_MESSAGE, RpcServices
from shmserve.frontends.grpc.http2_engine.call_head import OK, status_fields
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.frontends.grpc.http2_engine.http2_call import Aborted, Http2Call
from shmserve.frontends.grpc.http2_engine.message_compression import deflate
from shmserve.frontends.grpc.rpc_methods import HeldAnswer
from shmserve.frontends.http2 import Buffer, Fields, Limits
from shmserve.frontends.http2.grpc_framing import GrpcMessage, prefix
from shmserve.frontends.oip.origins import Origins
from shmserve.observe.logs import ACCESS_GRPC
from shmserve.waiting import beside_if_large

_log = logging.getLogger("shmserve.grpc")
_access = logging.getLogger(ACCESS_GRPC)

_JOINED_BYTES = 32 << 10  # up to this size a copy costs less than another buffer


class RpcRuns:
    """Runs rpcs, each a greenlet: bytes in, bytes out, errors as statuses."""

    def __init__(self, settings: Settings) -> None:
        self._access_log = settings.access_log
        self._send_timeout_s = settings.send_timeout_s
        self._min_bytes_per_s = settings.min_bytes_per_s

    def unary(self, call: Http2Call, message: GrpcMessage | None) -> None:
        """Run an rpc with one message and one answer. `message`: None if none came."""
        if not call.active:
            call.drop_message()
            return
        method, began, outcome = call.head.method, monotonic(), "failed"
        try:
            if not call.admitted:
                method.rules.admit(method, call)
            if message is None:
                raise InvalidArgument(NO_MESSAGE)
            answer = method.run(message.parts or call.read(message), call)
            held = answer if isinstance(answer, HeldAnswer) else None
            size = len(answer) if held is None else held.nbytes
            if method.large:
                limit_s = self._send_timeout_s + size / self._min_bytes_per_s
                method.rules.overdue.expect_taken(call, limit_s)
            # The rpc has checked the size of a held answer
            data = self._encode(call, answer) if held is None else (prefix(size), *held.parts)
            trailers = _succeeded(call) if call.trailing else OK
            outcome = f"OK {size}"
        except BaseException as ex:
            call.answer((), _failed(call, ex))
        else:
            call.answer(data, trailers, held)
        finally:
            call.drop_message()
            if self._access_log:
                _log_call(call, outcome, began)

    def stream(self, call: Http2Call) -> None:
        """Run an rpc with any number of messages and answers."""
        if not call.active:
            return
        began, outcome, nbytes, count = monotonic(), "failed", 0, 0
        answers = self._answers(call)
        try:
            for answer in answers:
                nbytes, count = nbytes + len(answer), count + 1
                if not call.send(self._encode(call, answer)):
                    return
            outcome = "OK"
        except BaseException as ex:
            call.answer((), _failed(call, ex))
        else:
            call.answer((), _succeeded(call) if call.trailing else OK)
        finally:
            answers.close()
            call.drop_message()
            if self._access_log:
                _log_call(call, f"{outcome} {nbytes} in {count}", began)

    def _answers(self, call: Http2Call) -> Generator[bytes]:
        """Yield a stream's answers. Cancel the call if an answer is not taken in time."""
        method, overdue = call.head.method, call.head.method.rules.overdue
        method.rules.admit(method, call)
        requests = AwaitedRequests(call.requests(), call, method.pool.silent, method.idle_s)
        for answer in method.run(requests, call):
            overdue.expect(call, self._send_timeout_s + len(answer) / self._min_bytes_per_s)
            try:
                yield answer
            finally:
                overdue.met(call)

    def _encode(self, call: Http2Call, answer: bytes) -> Sequence[Buffer]:
        size = len(answer)
        if size > MAX_MESSAGE_BYTES:
            raise ResourceExhausted(
                f"an answer of {size} bytes is larger than {MAX_MESSAGE_BYTES} bytes"
            )
        if call.head.answers:
            compressed = beside_if_large(size, deflate, answer, call.head.answers)
            if compressed is not answer:
                return (prefix(len(compressed), compressed=True), compressed)
        if size <= _JOINED_BYTES:
            return (prefix(size) + answer,)
        return (prefix(size), answer)


def _log_call(call: Http2Call, outcome: str, began: float) -> None:
    took_ms = (monotonic() - began) * 1e3
    _access.info('%s "%s" %s %.0fms', call.peer(), call.head.method.name, outcome, took_ms)


def _succeeded(call: Http2Call) -> Fields:
    return status_fields(grpc.StatusCode.OK, "", call.trailing)


def _failed(call: Http2Call, ex: BaseException) -> Fields:
    if isinstance(ex, Aborted) and call.status is not None:
        status = call.status
    # the client has disconnected, or the loop ends
    elif isinstance(ex, grpc.RpcError | GreenletExit):
        status = (grpc.StatusCode.CANCELLED, "the call has ended")
    elif isinstance(ex, Exception):
        method = call.head.method
        error = method.rules.failed(method, call, ex)
        status = (status_of(error), details_of(error))
    else:
        _log.error("unexpected error in a call", exc_info=ex)
        status = (grpc.StatusCode.UNKNOWN, "internal server error")
    return status_fields(*status, call.trailing)


class Serving:
    """Shared state of all connections. `hosts`: hosts that a call may name. `growth`: thread that
    makes memory, because the loop must not wait. `connections`: open `ServerConnection`s."""

    def __init__(self, services: RpcServices, settings: Settings, loop: EventLoop) -> None:
        self.loop = loop
        self.methods = {
            f"/{service}/{name}": method
            for service, methods in services.items()
            for name, method in methods.items()
        }
        self.limits = _limits(settings)
        self.runs = RpcRuns(settings)
        self.settings = settings
        self.hosts = Origins(settings, settings.grpc_bind, socket.gethostname())
        self.growth = ThreadPoolExecutor(1, thread_name_prefix="slots")
        self.connections: OpenConnections[Any] = OpenConnections(
            settings.max_connections, settings.max_caller_share
        )


def _limits(settings: Settings) -> Limits:
    return Limits(
        header_timeout_s=settings.head_timeout_s,
        frame_stall_s=settings.body_timeout_s,
        send_stall_s=settings.send_timeout_s,
        keepalive_s=settings.grpc_keepalive_time_s,
        keepalive_timeout_s=settings.grpc_keepalive_timeout_s,
        keepalive_without_calls=settings.grpc_keepalive_without_calls,
        min_ping_interval_s=settings.grpc_min_ping_interval_s,
    )
