"""How rpcs become methods of an engine: bytes in, bytes out, errors as statuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any

import grpc

from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.errors import InvalidArgument, ResourceExhausted, ShmserveError
from shmserve.frontends.deciding_fields import DecidingFields
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.call_pools import AwaitedRequests, CallPool, ClientDeadlines
from shmserve.frontends.grpc.callers import CallAccess
from shmserve.frontends.grpc.error_statuses import as_error, details_of, status_of, trace_refused
from shmserve.frontends.grpc.rpc_methods import HeldAnswer, RpcContext, RpcMethod, RpcSubjects
from shmserve.frontends.grpc.tensor_message import TensorIntake
from shmserve.frontends.oip.origins import Origins
from shmserve.frontends.oip.restricted_apis import Category, Restricted, known
from shmserve.frontends.request_ids import KEY, of_metadata, request_id
from shmserve.observe.logs import ACCESS_GRPC

_access = logging.getLogger(ACCESS_GRPC)
_NO_MESSAGE = "the call has no request message"
MAX_MESSAGE_BYTES = (1 << 31) - 1  # what protobuf can have
MAX_SMALL_MESSAGE_BYTES = 4 << 20  # to rpcs without tensors or files
MESSAGE_TIMEOUT_S = 300.0  # silence of a client before the message of an inference or load ends
STREAM_IDLE_S = 3600.0  # a stream without anything to do ends after this
_OF_PAGES = ("origin", "sec-fetch-site")

Unary = Callable[[Any, RpcContext], bytes | HeldAnswer]  # of bytes, or as the method says
Stream = Callable[[AwaitedRequests, RpcContext], Iterator[bytes]]


def named(context: RpcContext, name: str, ex: Exception) -> ShmserveError:
    """An rpc's error for the client, who is told the id by which the log knows it."""
    request = of_metadata(context.invocation_metadata())
    context.set_trailing_metadata(((KEY, request),))
    return as_error(ex, name, request)


def abort(context: RpcContext, error: ShmserveError) -> None:
    """End the call with an error's status. Never returns: it raises."""
    context.abort(status_of(error), details_of(error))


class Methods:
    """Makes handlers, whose calls have places in given pools.

    Raises:
        ConfigError: `grpc_restricted_protocol` cannot be understood.
    """

    def __init__(
        self,
        overdue: ClientDeadlines,
        settings: Settings,
        access: CallAccess,
        dispatcher: DispatchApi,
    ) -> None:
        self._dispatcher = dispatcher
        self._access = access
        self._keyed = access.keyed
        self._origins = Origins(settings, settings.grpc_bind, "")
        self._overdue = overdue
        self._max_message_bytes = min(settings.max_request_bytes, MAX_MESSAGE_BYTES)
        self._settings = settings
        restricted = Restricted(settings.grpc_restricted_protocol, grpc=True)
        self._restricted = restricted if restricted else None

    def unary(
        self,
        name: str,
        category: Category,
        run: Unary,
        pool: CallPool,
        large: bool = False,
        action: Action | None = None,
        tensors: TensorIntake | None = None,
        subjects: RpcSubjects | None = None,
    ) -> RpcMethod:
        """One message, one answer. `large`: sending and taking them may be a matter of time;
        `action`: what not every caller may, or None: `run` sees to it itself; `tensors` of the
        message and `subjects` of the calls: see `RpcMethod`."""
        known(category, f"rpc {name}")
        message_s = self._message_timeout_s(large)
        settings = self._settings
        most = self._max_message_bytes if large else MAX_SMALL_MESSAGE_BYTES

        def admit(context: RpcContext) -> None:
            self._check_caller(category, context)
            if action is not None:
                self._access.check(action, context)

        def behave(read: Callable[[], Any], context: RpcContext) -> bytes | HeldAnswer:
            try:
                if not context.admitted:  # else that was before its message was received
                    admit(context)
                data = read()
                if data is None:
                    raise InvalidArgument(_NO_MESSAGE)
                if not large and len(data) > most:
                    raise _too_long(len(data), most)
                answer = run(data, context)
            except grpc.RpcError:  # the client has gone
                raise
            except Exception as ex:
                error = self._failed(category, context, name, ex)
            else:
                if large:
                    nbytes = answer.nbytes if isinstance(answer, HeldAnswer) else len(answer)
                    limit_s = settings.send_timeout_s + nbytes / settings.min_bytes_per_s
                    self._overdue.expect_taken(context, limit_s)
                return answer
            abort(context, error)
            raise AssertionError("unreachable: abort raises")

        if settings.access_log:
            behave = _told(name, behave)
        views = tensors is not None
        return RpcMethod(behave, pool, False, message_s, most, views, admit, tensors, subjects)

    def stream(
        self,
        name: str,
        category: Category,
        run: Stream,
        pool: CallPool,
        idle_s: float | None = None,
        views: bool = False,
    ) -> RpcMethod:
        """Any number of messages and answers. Whoever does not take one is given up, and so is who
        sends nothing for `idle_s` (None: `STREAM_IDLE_S`). `views`: messages may be views."""
        known(category, f"rpc {name}")
        limit_s = STREAM_IDLE_S if idle_s is None else idle_s

        def behave(requests: Iterator[Any], context: RpcContext) -> Iterator[bytes]:
            try:
                self._check_caller(category, context)
                awaited = AwaitedRequests(requests, context, pool.silent, limit_s)
                for answer in run(awaited, context):
                    self._overdue.expect(context, self.send_limit(len(answer)))
                    try:
                        yield answer
                    finally:
                        self._overdue.met(context)
                return
            except grpc.RpcError:
                raise
            except Exception as ex:
                error = self._failed(category, context, name, ex)
            abort(context, error)

        if self._settings.access_log:
            behave = _told_stream(name, behave)
        most = self._max_message_bytes
        return RpcMethod(behave, pool, True, self._message_timeout_s(False), most, views)

    def _failed(
        self, category: Category, context: RpcContext, name: str, ex: Exception
    ) -> ShmserveError:
        if category == "inference":
            trace_refused(self._dispatcher, context.invocation_metadata(), name, ex)
        return named(context, name, ex)

    def _check_caller(self, category: Category, context: RpcContext) -> None:
        metadata = context.invocation_metadata()
        is_page = False
        for key, value in metadata:
            if key == KEY:
                context.set_trailing_metadata(((KEY, request_id(value)),))
            elif key in _OF_PAGES:
                is_page = True
        if is_page:
            self._check_page({k: v for k, v in metadata if isinstance(v, str)})
        if self._restricted is not None:
            headers = {k: v for k, v in metadata if isinstance(v, str)}
            self._restricted.check(category, DecidingFields(headers))
        if self._keyed:
            self._access.admit(category, context)

    def _check_page(self, headers: Mapping[str, str]) -> None:
        """No page is our own: those that reach us through a proxy must be listed."""
        self._origins.check_page("", headers.get("origin", ""), headers.get("sec-fetch-site", ""))

    def first(self, requests: AwaitedRequests) -> Any:
        """Return the one message of a stream that has only answers.

        Raises:
            InvalidArgument: the call has none.
        """
        data = requests.first(self._message_timeout_s(False))
        if data is None:
            raise InvalidArgument(_NO_MESSAGE)
        return data

    def _message_timeout_s(self, large: bool) -> float:
        return MESSAGE_TIMEOUT_S if large else self._settings.head_timeout_s

    def send_limit(self, nbytes: int) -> float:
        """How long a client may take to receive so many bytes."""
        return self._settings.send_timeout_s + nbytes / self._settings.min_bytes_per_s


def _told(name: str, behave: Callable[..., Any]) -> Callable[..., Any]:
    """An rpc with one answer, each call of which is a line of the log."""

    def run(read: Callable[[], Any], context: RpcContext) -> Any:
        began, outcome = monotonic(), "failed"
        try:
            answer = behave(read, context)
            outcome = f"OK {len(answer)}"
            return answer
        finally:
            _tell(context, name, outcome, began)

    return run


def _told_stream(name: str, behave: Callable[..., Iterator[bytes]]) -> Callable[..., Any]:
    """As `_told`, of an rpc with any number of answers, whose line comes at its end."""

    def run(requests: Iterator[Any], context: RpcContext) -> Iterator[bytes]:
        began, outcome, nbytes, answers = monotonic(), "failed", 0, 0
        try:
            for answer in behave(requests, context):
                nbytes, answers = nbytes + len(answer), answers + 1
                yield answer
            outcome = "OK"
        finally:
            _tell(context, name, f"{outcome} {nbytes} in {answers}", began)

    return run


def _tell(context: RpcContext, name: str, outcome: str, began: float) -> None:
    took_ms = (monotonic() - began) * 1e3
    _access.info('%s "%s" %s %.0fms', context.peer(), name, outcome, took_ms)


def _too_long(size: int, most: int) -> ResourceExhausted:
    return ResourceExhausted(f"the request message has {size} bytes, at most {most} are taken here")
