"""Calls from one model to others, as the model's dialect sees them.

`executor.process.model_calls` carries the calls. A backend that runs without a server has
`NO_MODELS`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol

from msgspec import Struct

from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.errors import ShmserveError, Unavailable
from shmserve.protocol.control.data_messages import CallingModel, Parameter


class CallingRequest(Protocol):
    """A request (`backend.Request`) for whose answer another model is called."""

    deadline_ns: int
    callers: tuple[CallingModel, ...]
    traceparent: str
    parameters: dict[str, Parameter]
    sequence: SequenceName | None

    @property
    def cancelled(self) -> bool: ...

    @property
    def responses(self) -> Any: ...


class CalledTensor(Struct, frozen=True):
    """A tensor of a call.

    An input is a numpy or CuPy array of any layout, copied into shared memory once. An output is a
    read-only view of the called executor's memory, which is kept until the last array on it is
    collected. BYTES is an object array of `bytes`.
    """

    name: str
    datatype: str
    array: Any


class ModelCall(Struct, frozen=True):
    """A request to another model.

    Attributes:
        version: version of the model; empty: the newest that is ready.
        outputs: names of the requested outputs; empty: all.
        timeout_s: time limit for the answer, or for each answer of a decoupled model, in seconds;
            None: the time left to the calling requests, or `request_timeout_s`.
        stream: the caller takes any number of answers. Without it, the model must not be
            decoupled.
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
    """An answer to a call.

    Attributes:
        error: error of one answer in a stream. An error that ends the call is raised instead.
    """

    outputs: tuple[CalledTensor, ...] = ()
    parameters: dict[str, Parameter] = {}
    error: ShmserveError | None = None


class RunningCall(Protocol):
    """A call whose request is ready to be sent. For one thread at a time, except `cancel`."""

    def next(self) -> CallAnswer | None:
        """Wait for the next answer. Return None after the last one.

        Raises:
            ShmserveError: the model failed or could not run, or all calling requests were
                cancelled, which is noticed within a second. The call is over.
        """
        ...

    def next_soon(self) -> Future[CallAnswer | None]:
        """Run `next` on a thread of the server."""
        ...

    @property
    def wanted(self) -> bool:
        """Return False once all requests that the call is made for are cancelled."""
        ...

    def cancel(self) -> None:
        """Make `next` raise `Cancelled` after the received answers; from any thread."""
        ...

    def abandoned(self) -> None:
        """End the call soon, as the model has dropped all references to the call. Safe in
        finalizers."""
        ...


class OtherModels(Protocol):
    """The server's models, for any thread of a model that calls them."""

    def begin(self, call: ModelCall, calling: Sequence[CallingRequest]) -> RunningCall:
        """Check a call against the called model and copy the inputs into shared memory.

        Args:
            calling: the requests that need the answer; may be empty.

        Raises:
            ShmserveError: the call does not fit the model, or cannot be made now.
        """
        ...

    def settle(self) -> None:
        """Give back outputs whose arrays have been collected."""
        ...

    def is_ready(self, model: str, version: str = "") -> bool:
        """Return whether a model, or the given version, takes requests."""
        ...

    def load(self, model: str, parameters: Mapping[str, Parameter | bytes]) -> None:
        """Load a model, as a client's request with these parameters does; return when the model
        serves.

        Raises:
            ShmserveError: the request was refused, or the model cannot be loaded.
        """
        ...

    def unload(self, model: str, dependents: bool = False) -> None:
        """Stop serving a model. With `dependents`, also unload models that were loaded only as
        steps of that model.

        Raises:
            ShmserveError: the request was refused.
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
