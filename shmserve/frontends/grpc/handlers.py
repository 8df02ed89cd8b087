"""Rpcs as methods of the engine, and the rules of their calls: admission, limits, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.access import Action
from shmserve.errors import InvalidArgument, ShmserveError
from shmserve.frontends.deciding_fields import DecidingFields
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.call_pools import AwaitedRequests, CallPool, ClientDeadlines
from shmserve.frontends.grpc.callers import CallAccess
from shmserve.frontends.grpc.error_statuses import as_error, trace_refused
from shmserve.frontends.grpc.rpc_methods import HeldAnswer, RpcContext
from shmserve.frontends.grpc.tensor_message import ModelSubjects, TensorIntake
from shmserve.frontends.oip.origins import Origins
from shmserve.frontends.oip.restricted_apis import Category, Restricted, known
from shmserve.frontends.request_ids import KEY, of_metadata, request_id

NO_MESSAGE = "the call has no request message"
MAX_MESSAGE_BYTES = (1 << 31) - 1  # largest message in protobuf
MAX_SMALL_MESSAGE_BYTES = 4 << 20  # for rpcs without tensors or files
MESSAGE_TIMEOUT_S = 300.0  # silence of a client before the message of an inference or load begins
STREAM_IDLE_S = 3600.0  # silence before a stream without work is ended
_OF_PAGES = ("origin", "sec-fetch-site")

# the message is bytes, or as the method says
Unary = Callable[[Any, RpcContext], bytes | HeldAnswer]
Stream = Callable[[AwaitedRequests, RpcContext], Iterator[bytes]]


class RpcMethod(Struct, frozen=True, eq=False):
    """An rpc, with all that the engine needs to run its calls.

    Attributes:
        name: name of the rpc, for the log.
        category: category of the rpc in the restricted APIs.
        run: runs a call on the loop: waits by `shmserve.waiting`, and runs long work beside the
            loop. The `run` of a stream gets an iterator of messages and returns an iterator of
            answers. The iterator of messages raises `grpc.RpcError` once the call has ended early.
        rules: admission of calls, and handling of errors.
        pool: places and turns of the calls.
        streams: True if `run` handles any number of messages and answers, False if one of each.
        message_timeout_s: longest time, in seconds, until a unary call's message has begun.
        max_bytes: size of the largest message, in bytes.
        large: True if sending and taking messages may take long.
        views: True if messages may be views instead of bytes.
        action: action that needs permission; None if `run` checks permissions itself.
        idle_s: longest silence, in seconds, of a stream without work.
        tensors: how tensors of messages are received; each message is then a `TensorMessage`.
        subjects: finds the models of calls: no model may take all places of the pool.
    """

    name: str
    category: Category
    run: Callable[[Any, RpcContext], Any]
    rules: Methods
    pool: CallPool
    streams: bool
    message_timeout_s: float
    max_bytes: int
    large: bool = False
    views: bool = False
    action: Action | None = None
    idle_s: float = 0.0
    tensors: TensorIntake | None = None
    subjects: ModelSubjects | None = None


# by full name of the service and name of the rpc
RpcServices = Mapping[str, Mapping[str, RpcMethod]]


class Methods:
    """Makes the methods of all services, and holds the rules of their calls. `overdue`: deadlines
    of clients that have to take an answer. Raise ConfigError if `grpc_restricted_protocol` is
    invalid."""

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
        self.overdue = overdue
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
        subjects: ModelSubjects | None = None,
    ) -> RpcMethod:
        """Return a method with one message and one answer. Arguments as in `RpcMethod`."""
        known(category, f"rpc {name}")
        return RpcMethod(
            name,
            category,
            run,
            self,
            pool,
            False,
            self._message_timeout_s(large),
            self._max_bytes(large),
            large,
            tensors is not None,
            action,
            tensors=tensors,
            subjects=subjects,
        )

    def stream(
        self,
        name: str,
        category: Category,
        run: Stream,
        pool: CallPool,
        idle_s: float | None = None,
        views: bool = False,
        large: bool = True,
    ) -> RpcMethod:
        """Return a method with any number of messages and answers. A call is cancelled if the
        client does not take an answer, or is silent for `idle_s` seconds (None:
        `STREAM_IDLE_S`). `large`: messages may have tensors."""
        known(category, f"rpc {name}")
        return RpcMethod(
            name,
            category,
            run,
            self,
            pool,
            True,
            self._message_timeout_s(False),
            self._max_bytes(large),
            views=views,
            idle_s=STREAM_IDLE_S if idle_s is None else idle_s,
        )

    def failed(self, method: RpcMethod, context: RpcContext, ex: Exception) -> ShmserveError:
        """Return a call's error for the client, and send the client the call's id in the log."""
        metadata = context.invocation_metadata()
        if method.category == "inference":
            trace_refused(self._dispatcher, metadata, method.name, ex)
        request = of_metadata(metadata)
        context.set_trailing_metadata(((KEY, request),))
        return as_error(ex, method.name, request)

    def admit(self, method: RpcMethod, context: RpcContext) -> None:
        """Let a call begin. Raise ShmserveError if the caller may not make the call."""
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
            self._restricted.check(method.category, DecidingFields(headers))
        if self._keyed:
            self._access.admit(method.category, context)
        if method.action is not None:
            self._access.check(method.action, context)

    def _check_page(self, headers: Mapping[str, str]) -> None:
        """Refuse calls of web pages that are not listed. The server has no pages of its own over
        gRPC."""
        self._origins.check_page("", headers.get("origin", ""), headers.get("sec-fetch-site", ""))

    def first(self, requests: AwaitedRequests) -> Any:
        """Return the one message of a stream that has only answers. Raise InvalidArgument if the
        client sent no message."""
        data = requests.first(self._message_timeout_s(False))
        if data is None:
            raise InvalidArgument(NO_MESSAGE)
        return data

    def _max_bytes(self, large: bool) -> int:
        limit = MAX_MESSAGE_BYTES if large else MAX_SMALL_MESSAGE_BYTES
        return min(self._settings.max_request_bytes, limit)

    def _message_timeout_s(self, large: bool) -> float:
        return MESSAGE_TIMEOUT_S if large else self._settings.head_timeout_s
