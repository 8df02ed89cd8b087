"""Calls and answers as rpcs see them: rpcs know no more of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

import grpc
from msgspec import Struct

from shmserve.dispatch.inference_call import InferenceCall
from shmserve.errors import ShmserveError
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.protocol.protobuf.infer_wire import Part


class RpcContext(Protocol):
    """One call, as its rpc sees it: the part of `grpc.ServicerContext` that is used here.

    Attributes:
        caller_number: whose it is, for turns and shares.
        admitted: the rpc's rules have let the call in already, before its message was received.
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

    def add_callback(self, callback: Callable[[], object], /) -> bool:
        """Have this called at the call's end, in the loop; False: it has ended already."""
        ...

    def attach(self, call: InferenceCall) -> None:
        """Cancel this inference at the call's end, unless `detach` comes before."""
        ...

    def detach(self, call: InferenceCall) -> None:
        """Let an attached inference be."""
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
