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
from shmserve.frontends.grpc.http2_engine.call_head import OK, Methods, status_fields
from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop
from shmserve.frontends.grpc.http2_engine.http2_call import Aborted, Http2Call
from shmserve.frontends.grpc.http2_engine.message_compression import deflate
from shmserve.frontends.grpc.rpc_methods import HeldAnswer
from shmserve.frontends.http2 import Buffer, Fields, Limits
from shmserve.frontends.http2.grpc_framing import GrpcMessage, prefix
from shmserve.frontends.oip.origins import Origins
from shmserve.frontends.request_ids import KEY
from shmserve.observe.logs import ACCESS_GRPC, JSON_FIELDS
from shmserve.waiting import beside_if_large

_log = logging.getLogger("shmserve.grpc")
_access = logging.getLogger(ACCESS_GRPC)

_JOINED_BYTES = 32 << 10  # up to this size a copy costs less than another buffer


class RpcRuns:
    """Runs rpcs, each a greenlet: bytes in, bytes out, errors as statuses. `methods`: all methods
    by path."""

    def __init__(self, settings: Settings, methods: Methods) -> None:
        self._paths = {method: path for path, method in methods.items()}
        self._access_log = settings.access_log
        self._send_timeout_s = settings.send_timeout_s
        self._min_bytes_per_s = settings.min_bytes_per_s

    def unary(self, call: Http2Call, message: GrpcMessage | None) -> None:
        """Run an rpc with one message and one answer. `message`: None if none came."""
        if not call.active:
            call.drop_message()
            return
        method, began, size, status = call.head.method, monotonic(), 0, grpc.StatusCode.CANCELLED
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
            status = grpc.StatusCode.OK
        except BaseException as ex:
            status, details = _failed(call, ex)
            call.answer((), status_fields(status, details, call.trailing))
        else:
            call.answer(data, trailers, held)
        finally:
            call.drop_message()
            if self._access_log:
                ended_well = status is grpc.StatusCode.OK
                outcome = f"OK {size}" if ended_well else "failed"
                self._log_call(call, outcome, began, status, bytes=size if ended_well else 0)

    def stream(self, call: Http2Call) -> None:
        """Run an rpc with any number of messages and answers."""
        if not call.active:
            return
        began, status, nbytes, count = monotonic(), grpc.StatusCode.CANCELLED, 0, 0
        answers = self._answers(call)
        try:
            for answer in answers:
                nbytes, count = nbytes + len(answer), count + 1
                if not call.send(self._encode(call, answer)):
                    return
            status = grpc.StatusCode.OK
        except BaseException as ex:
            status, details = _failed(call, ex)
            call.answer((), status_fields(status, details, call.trailing))
        else:
            call.answer((), _succeeded(call) if call.trailing else OK)
        finally:
            answers.close()
            call.drop_message()
            if self._access_log:
                outcome = "OK" if status is grpc.StatusCode.OK else "failed"
                text = f"{outcome} {nbytes} in {count}"
                self._log_call(call, text, began, status, bytes=nbytes, answers=count)

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

    def _log_call(
        self, call: Http2Call, outcome: str, began: float, status: grpc.StatusCode, **sizes: int
    ) -> None:
        """Log a call that has ended. `sizes`: fields on the size of the answer."""
        method, took_ms = call.head.method, (monotonic() - began) * 1e3
        fields: dict[str, object] = {
            "method": method.name,
            "path": self._paths.get(method, ""),
            "status": status.name,
            "duration_ms": round(took_ms, 3),
            **sizes,
            "client": call.peer(),
        }
        if request := dict(call.trailing).get(KEY):
            fields["request"] = request
        text = (call.peer(), method.name, outcome, took_ms)
        _access.info('%s "%s" %s %.0fms', *text, extra={JSON_FIELDS: fields})

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


def _succeeded(call: Http2Call) -> Fields:
    return status_fields(grpc.StatusCode.OK, "", call.trailing)


def _failed(call: Http2Call, ex: BaseException) -> tuple[grpc.StatusCode, str]:
    """Return the status of a call that ended with an exception, and the details for the client."""
    if isinstance(ex, Aborted) and call.status is not None:
        return call.status
    # the client has disconnected, or the loop ends
    if isinstance(ex, grpc.RpcError | GreenletExit):
        return grpc.StatusCode.CANCELLED, "the call has ended"
    if isinstance(ex, Exception):
        method = call.head.method
        error = method.rules.failed(method, call, ex)
        return status_of(error), details_of(error)
    _log.error("unexpected error in a call", exc_info=ex)
    return grpc.StatusCode.UNKNOWN, "internal server error"


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
        self.runs = RpcRuns(settings, self.methods)
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
