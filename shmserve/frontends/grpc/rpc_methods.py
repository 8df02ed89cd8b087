"""Calls and answers as seen by rpcs: the only part of the engine that rpcs use."""

from collections.abc import Callable, Iterable
from typing import NoReturn, Protocol

import grpc
from msgspec import Struct

from shmserve.dispatch.inference_call import InferenceCall
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.protocol.protobuf.infer_wire import Part


class RpcContext(Protocol):
    """A call as seen by its rpc: the part of `grpc.ServicerContext` that rpcs use here.
    `caller_number`: number of the caller, for turns and shares. `admitted`: True if the rpc's rules
    let the call in before the message was received."""

    caller_number: int
    admitted: bool

    @property
    def client_number(self) -> int:
        """The caller number of the connected client, regardless of the call's key."""
        ...

    def peer(self) -> str:
        """Return the client's address as text for people."""
        ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Return the client's metadata. Values are bytes if the key ends with ``-bin``."""
        ...

    def time_remaining(self) -> float:
        """Return the seconds until the call's deadline, never negative; infinite or very long
        without a deadline."""
        ...

    def is_active(self) -> bool:
        """Return True until the call has ended."""
        ...

    def add_callback(self, callback: Callable[[], object], /) -> bool:
        """Have the loop call `callback` at the call's end. Return False if the call has ended."""
        ...

    def attach(self, call: InferenceCall) -> None:
        """Cancel this inference at the call's end, unless `detach` comes before."""
        ...

    def detach(self, call: InferenceCall) -> None:
        """Stop cancelling this inference at the call's end."""
        ...

    def on_message(self, callback: Callable[[], object] | None, /) -> bool:
        """Have the loop call `callback` when the next message of a stream arrives; None: call
        nothing. Return False, without effect, if a message waits already."""
        ...

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...], /) -> None:
        """Set the metadata that go with the status."""
        ...

    def abort(self, code: grpc.StatusCode, details: str, /) -> NoReturn:
        """End the call with this status by raising an exception that the rpc must not catch."""
        ...

    def cancel(self) -> None:
        """End the call without an answer. From any thread."""
        ...

    def give_up(self) -> None:
        """End the call without an answer, at once. Only in the loop."""
        ...


class HeldAnswer(Struct, eq=False):
    """An answer sent straight from the memory in which its parts lie. `parts`: the parts of the
    message, in order. `nbytes`: size of all parts together, in bytes. `close`: releases the memory.
    Called once, when no part is needed any more; callable from any thread, never waits."""

    parts: list[Part]
    nbytes: int
    close: Callable[[], None]

    def __len__(self) -> int:
        return self.nbytes


RpcMessage = bytes | memoryview | TensorMessage
