"""What a request is to whoever makes it, be it for one model or for a pipeline of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from shmserve.dispatch.outcome import Outcome
from shmserve.dispatch.receipt import Receipt
from shmserve.protocol.control.data_messages import RegionRef


class RequestAccount(Protocol):
    """The account of one request, which is counted exactly once."""

    def answered(self, copied_out: int = 0, send_ns: int = 0) -> None:
        """Count the request as answered: its answer is ready to be sent. To make the answer,
        `copied_out` bytes were copied, which took `send_ns`; both go into the receipt.
        `InferenceCall.close` makes up for a forgotten call."""
        ...

    def failed(self, error: BaseException) -> None:
        """Count the request as failed, for another reason than `execute` has raised."""


class InferenceCall(Protocol):
    """One request; closing it gives every slot back."""

    def __enter__(self) -> InferenceCall: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    @property
    def account(self) -> RequestAccount: ...

    @property
    def receipt(self) -> Receipt: ...

    def reserve(self, nbytes: int) -> Any:
        """Room for a tensor: an object whose `view` is writable memory of that size."""
        ...

    def adopt(self, slot: Any) -> Any:
        """A slot of the process's own memory, reserved before: given back with the call."""
        ...

    def add_input(
        self, name: str, datatype: str, shape: tuple[int, ...], reservation: Any
    ) -> None: ...

    def add_region_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: RegionRef
    ) -> None: ...

    def execute(self) -> Outcome:
        """The one answer; raises the model's error."""
        ...

    def stream(self) -> Iterator[Outcome]:
        """Every answer in order; the last one, and only that, is `final`.

        A final outcome may have neither outputs nor an error: then it only ends the stream.
        Views of an outcome are valid until the next one is asked for. The model's errors come
        as outcomes; what keeps it from answering at all is raised. Closing the iterator, or
        the call, cancels what has not come. Each answer has `request_timeout_s`, counted from
        when it is asked for, the whole stream `stream_timeout_s`. A reader who does not ask for
        the next one holds back the model.
        """
        ...

    def cancel(self) -> None:
        """Make `execute` or `stream` raise `Cancelled` at once; for any other thread, at any
        time, also before and after. Only for calls that were made `cancellable`."""
        ...

    def lend(self) -> Callable[[], None]:
        """Keep the outputs of the latest answer readable when the call goes on or is closed,
        until what is returned is called: once, from any thread."""
        ...

    def close(self) -> None: ...
