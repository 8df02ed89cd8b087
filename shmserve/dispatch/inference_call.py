"""Inference call: interface of a request for frontends, whether for one model or for a pipeline of
models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from shmserve.dispatch.outcome import Outcome
from shmserve.dispatch.receipt import Receipt


class RequestAccount(Protocol):
    """Account of one request, which is counted exactly once."""

    def answered(self, copied_out: int = 0, send_ns: int = 0) -> None:
        """Count the request as answered, once the answer is ready to be sent. `copied_out`: bytes
        copied to make the answer. `send_ns`: nanoseconds spent on copying. Both go into the
        receipt. `InferenceCall.close` makes up for a forgotten call."""
        ...

    def failed(self, error: BaseException) -> None:
        """Count the request as failed, for a reason other than an exception of `execute`."""


class InferenceCall(Protocol):
    """A request in progress. Closing the request gives every slot back."""

    def __enter__(self) -> InferenceCall: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None: ...

    @property
    def account(self) -> RequestAccount: ...

    @property
    def receipt(self) -> Receipt: ...

    def reserve(self, nbytes: int) -> Any:
        """Return room for a tensor: an object whose `view` is writable memory of `nbytes` bytes."""
        ...

    def adopt(self, slot: Any) -> Any:
        """Take over a slot of the process's own memory, reserved earlier. The call gives the slot
        back."""
        ...

    def add_input(self, name: str, datatype: str, shape: tuple[int, ...], at: Any) -> None:
        """Add an input: a tensor written into reserved room, or in client memory (`RegionRef`)."""

    def execute(self) -> Outcome:
        """Return the only answer, or raise the model's error."""
        ...

    def stream(self) -> Iterator[Outcome]:
        """Yield every answer in order. Only the last answer is `final`.

        A final outcome with neither outputs nor an error only ends the stream. Views of an outcome
        are valid until the next outcome is asked for. The model's errors are yielded as outcomes;
        errors that prevent any answer are raised. Closing the iterator, or the call, cancels
        answers still to come. Each answer has `request_timeout_s`, counted from asking for the
        answer; the whole stream has `stream_timeout_s`. A reader that does not ask for the next
        answer holds back the model.
        """
        ...

    def cancel(self) -> None:
        """Make `execute` or `stream` raise `Cancelled` as soon as no answer waits to be read; an
        ensemble drops waiting answers. Any other thread may call this method, at any time,
        including before and after. Only for calls made `cancellable`."""
        ...

    def lend(self) -> Callable[[], None]:
        """Keep the outputs of the latest answer readable after the call goes on or is closed. Call
        the returned function once, from any thread, to give the outputs back."""
        ...

    def close(self) -> None: ...
