"""What a gRPC engine serves and what it tells an rpc of its call; the rpcs know no more of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, Protocol

import grpc
from msgspec import Struct

from shmserve.errors import ShmserveError
from shmserve.frontends.grpc.call_pools import CallPool
from shmserve.frontends.grpc.tensor_message import TensorIntake, TensorMessage
from shmserve.protocol.protobuf.infer_wire import Part


class RpcContext(Protocol):
    """One call, as its rpc sees it: the part of `grpc.ServicerContext` that is used here.

    Attributes:
        caller_number: whose it is, for turns and shares.
        admitted: its method's `admit` has let it in already.
    """

    caller_number: int
    admitted: bool

    @property
    def client_number(self) -> int:
        """Who is connected, whatever key the call has."""
        ...

    def peer(self) -> str:
        """The client's address, for people."""
        ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """The client's metadata; bytes where the key ends with ``-bin``."""
        ...

    def time_remaining(self) -> float:
        """Seconds until its deadline, not negative; infinite or very long without one."""
        ...

    def is_active(self) -> bool:
        """Whether it has not ended yet."""
        ...

    def add_callback(self, callback: Callable[[], None], /) -> bool:
        """Have this called at the call's end, in the loop; False: it has ended already."""
        ...

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...], /) -> None:
        """Metadata that go with the status."""
        ...

    def abort(self, code: grpc.StatusCode, details: str, /) -> NoReturn:
        """End the call with this status; raises something that the rpc must let pass."""
        ...

    def cancel(self) -> None:
        """End the call without an answer. From any thread."""
        ...

    def give_up(self) -> None:
        """As `cancel`, at once: for the loop."""
        ...


class HeldAnswer(Struct, eq=False):
    """An answer whose parts are other memory's, sent from where they are.

    Attributes:
        parts: the message in order.
        nbytes: of all of them.
        close: to be called once, when no part is needed any more; from any thread, never waits.
    """

    parts: list[Part]
    nbytes: int
    close: Callable[[], None]

    def __len__(self) -> int:
        return self.nbytes


RpcMessage = bytes | memoryview | TensorMessage


class RpcSubjects(Protocol):
    """What the calls of a method are about, where no subject may have all of its pool."""

    def of(self, message: memoryview) -> bytes:
        """The subject of a message; empty: it cannot be told at once."""
        ...

    def refused(self, subject: bytes, error: ShmserveError) -> None:
        """A call was refused, since there were too many of its subject."""
        ...


class RpcMethod(Struct, frozen=True, eq=False):
    """An rpc as an engine runs it.

    Attributes:
        behave: runs a call, given its messages and its context. A unary rpc gets a function that
            reads the one message (None: there is none); a stream gets an iterator, which raises
            `grpc.RpcError` once the call has ended early. Runs on the loop: it waits by
            `shmserve.waiting`, and what takes long runs beside the loop.
        pool: places and turns of its calls.
        streams: it gives an iterator of answers instead of one.
        message_timeout_s: how long the client of a unary call may take to send its message.
        max_bytes: the largest message.
        views: its messages may be views instead of bytes.
        admit: refuses a unary call whose caller may not make it; an engine that calls it before a
            large message is received sets the context's `admitted`.
        subjects: what its calls are about, for an engine that takes heed of it.
        tensors: how an engine that can receives its message's tensors: it is a `TensorMessage`.
    """

    behave: Callable[[Any, RpcContext], Any]
    pool: CallPool
    streams: bool
    message_timeout_s: float
    max_bytes: int
    views: bool = False
    admit: Callable[[RpcContext], None] | None = None
    tensors: TensorIntake | None = None
    subjects: RpcSubjects | None = None


RpcServices = Mapping[str, Mapping[str, RpcMethod]]  # by the services' full and the rpcs' names
