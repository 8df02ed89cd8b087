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
from shmserve.frontends.grpc.rpc_methods import HeldAnswer, RpcContext, RpcSubjects
from shmserve.frontends.grpc.tensor_message import TensorIntake
from shmserve.frontends.oip.origins import Origins
from shmserve.frontends.oip.restricted_apis import Category, Restricted, known
from shmserve.frontends.request_ids import KEY, of_metadata, request_id

NO_MESSAGE = "the call has no request message"
MAX_MESSAGE_BYTES = (1 << 31) - 1  # what protobuf can have
MAX_SMALL_MESSAGE_BYTES = 4 << 20  # to rpcs without tensors or files
MESSAGE_TIMEOUT_S = 300.0  # silence of a client before the message of an inference or load ends
STREAM_IDLE_S = 3600.0  # a stream without anything to do ends after this
_OF_PAGES = ("origin", "sec-fetch-site")

Unary = Callable[[Any, RpcContext], bytes | HeldAnswer]  # of bytes, or as the method says
Stream = Callable[[AwaitedRequests, RpcContext], Iterator[bytes]]


class RpcMethod(Struct, frozen=True, eq=False):
    """An rpc, and what the engine has to know to run its calls.

    Attributes:
        name: the rpc's name, for the log.
        category: its category of the restricted APIs.
        run: runs a call on the loop: it waits by `shmserve.waiting`, and what takes long runs
            beside the loop. A stream gets an iterator of messages, which raises `grpc.RpcError`
            once the call has ended early, and gives an iterator of answers.
        rules: who may make a call, and what becomes of errors.
        pool: places and turns of its calls.
        streams: whether `run` is of any number of messages and answers, instead of one of each.
        message_timeout_s: longest time, in seconds, until a unary call's message has begun.
        max_bytes: size of the largest message.
        large: whether sending and taking its messages may be a matter of time.
        views: whether its messages may be views instead of bytes.
        action: what not every caller may do; None: `run` sees to that itself.
        idle_s: longest silence, in seconds, of a stream without anything to do.
        tensors: how tensors of its messages are received, each of which is a `TensorMessage` then.
        subjects: what its calls are about.
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
    subjects: RpcSubjects | None = None


RpcServices = Mapping[str, Mapping[str, RpcMethod]]  # by the services' full and the rpcs' names


class Methods:
    """Makes the methods of all services, and holds the rules of their calls.

    Attributes:
        overdue: deadlines of clients that are to take an answer.

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
        subjects: RpcSubjects | None = None,
    ) -> RpcMethod:
        """Return a method of one message and one answer; arguments as `RpcMethod` has them."""
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
        """Return a method of any number of messages and answers. A client that does not take an
        answer is given up, and so is a client that is silent for `idle_s` (None:
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
        """Return a call's error for the client, and tell the client the id by which the log knows
        the call."""
        metadata = context.invocation_metadata()
        if method.category == "inference":
            trace_refused(self._dispatcher, metadata, method.name, ex)
        request = of_metadata(metadata)
        context.set_trailing_metadata(((KEY, request),))
        return as_error(ex, method.name, request)

    def admit(self, method: RpcMethod, context: RpcContext) -> None:
        """Let a call begin.

        Raises:
            ShmserveError: its caller may not make it.
        """
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
        """No page is our own: those that reach us through a proxy must be listed."""
        self._origins.check_page("", headers.get("origin", ""), headers.get("sec-fetch-site", ""))

    def first(self, requests: AwaitedRequests) -> Any:
        """Return the one message of a stream that has only answers.

        Raises:
            InvalidArgument: the call has none.
        """
        data = requests.first(self._message_timeout_s(False))
        if data is None:
            raise InvalidArgument(NO_MESSAGE)
        return data

    def _max_bytes(self, large: bool) -> int:
        limit = MAX_MESSAGE_BYTES if large else MAX_SMALL_MESSAGE_BYTES
        return min(self._settings.max_request_bytes, limit)

    def _message_timeout_s(self, large: bool) -> float:
        return MESSAGE_TIMEOUT_S if large else self._settings.head_timeout_s
