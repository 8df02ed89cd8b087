"""Calls from one model to others, as a model's dialect sees them.

`executor.process.model_calls` carries the calls. A backend that is run without a server has
`NO_MODELS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol

from msgspec import Struct

from shmserve.errors import ShmserveError, Unavailable
from shmserve.protocol.control.data_messages import CallingModel, Parameter


class CallingRequest(Protocol):
    """A request (`backend.Request`) on whose behalf another model is called."""

    deadline_ns: int
    callers: tuple[CallingModel, ...]
    traceparent: str

    @property
    def cancelled(self) -> bool: ...

    @property
    def responses(self) -> Any: ...


class CalledTensor(Struct, frozen=True):
    """A tensor of a call.

    As an input: a numpy or CuPy array of any layout, copied into shared memory once. As an output:
    a read-only view of the called executor's memory, which is kept until the last array on it is
    collected; BYTES as an object array of `bytes`.
    """

    name: str
    datatype: str
    array: Any


class ModelCall(Struct, frozen=True):
    """What is asked of which model.

    Attributes:
        version: empty: the newest that is ready.
        outputs: names of those wanted; empty: all.
        timeout_s: for the answer, of a decoupled model for each; None: what the calling requests
            have left, or `request_timeout_s`.
        stream: any number of answers is taken; else the model must not be decoupled.
    """

    model: str
    inputs: Sequence[CalledTensor] = ()
    version: str = ""
    outputs: Sequence[str] = ()
    id: str = ""
    parameters: dict[str, Parameter] = {}
    timeout_s: float | None = None
    stream: bool = False


class CallAnswer(Struct, frozen=True):
    """One answer. `error`: of one answer in a stream; what ends a call is raised."""

    outputs: tuple[CalledTensor, ...] = ()
    parameters: dict[str, Parameter] = {}
    error: ShmserveError | None = None


class RunningCall(Protocol):
    """A call whose request is ready to be sent. For one thread at a time, but for `cancel`."""

    def next(self) -> CallAnswer | None:
        """The next answer; None: there are no more. Waits until there is one.

        Raises:
            ShmserveError: the model's error, or why it could not run; also that the calling
                requests were cancelled, which is noticed within a second. The call is over.
        """
        ...

    def next_soon(self) -> Future[CallAnswer | None]:
        """As `next`, on a thread of the server's."""
        ...

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for what the model calls it for."""
        ...

    def cancel(self) -> None:
        """Make `next` raise `Cancelled`, at once; from any thread."""
        ...

    def abandoned(self) -> None:
        """Nobody asks for further answers: it ends soon. Safe in finalizers."""
        ...


class OtherModels(Protocol):
    """The models of the server, for any thread of a model."""

    def begin(self, call: ModelCall, calling: Sequence[CallingRequest]) -> RunningCall:
        """Check a call against its model and bring its inputs into shared memory.

        Args:
            calling: the requests that need the answer; empty: it is for none of them.

        Raises:
            ShmserveError: it does not fit the model, or cannot be made now.
        """
        ...

    def settle(self) -> None:
        """Give back outputs whose arrays have been collected."""
        ...

    def is_ready(self, model: str, version: str = "") -> bool:
        """Whether a model, or this version of it, takes requests."""
        ...

    def load(self, model: str, parameters: Mapping[str, Parameter | bytes]) -> None:
        """Load a model, as a client's request with these parameters does; returns when it serves.

        Raises:
            ShmserveError: it was refused, or the model cannot be loaded.
        """
        ...

    def unload(self, model: str, dependents: bool = False) -> None:
        """Serve a model no more; with `dependents` nor what was loaded as steps of it alone.

        Raises:
            ShmserveError: it was refused.
        """
        ...


class _NoModels:
    def begin(self, call: ModelCall, calling: Sequence[CallingRequest]) -> NoReturn:
        raise _alone(f"model '{call.model}' cannot be called")

    def settle(self) -> None:
        pass

    def is_ready(self, model: str, version: str = "") -> bool:
        return False

    def load(self, model: str, parameters: Mapping[str, Parameter | bytes]) -> NoReturn:
        raise _alone(f"model '{model}' cannot be loaded")

    def unload(self, model: str, dependents: bool = False) -> NoReturn:
        raise _alone(f"model '{model}' cannot be unloaded")


def _alone(what: str) -> Unavailable:
    return Unavailable(f"{what}: no server is running")


NO_MODELS = _NoModels()
