"""What the frontends need of `shmserve.dispatch`, as protocols.

They let the frontends be tested with `shmserve.testing.fake_dispatch`, without
shared memory or processes; `shmserve.dispatch.Dispatcher` is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from shmserve.core.control.runtime_settings import LogChange, TraceChange
from shmserve.core.regions.region_book import Caller
from shmserve.core.registry import SYSTEM, ModelEntry, Snapshot
from shmserve.errors import ShmserveError
from shmserve.protocol.control.data_messages import OutputPlace, Parameter, RegionRef
from shmserve.protocol.control.history_messages import HistoryReport
from shmserve.protocol.control.stats_messages import Report


class Receipt(Protocol):
    """What one request copied and how long it took, in bytes and nanoseconds."""

    copied_in: int
    copied_out: int
    receive_ns: int
    queue_ns: int
    compute_ns: int
    send_ns: int

    def as_dict(self) -> dict[str, Any]: ...


class OutputTensor(Protocol):
    """One output; `view` are its bytes, valid until the call is closed."""

    @property
    def name(self) -> str: ...
    @property
    def datatype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def view(self) -> memoryview: ...


class Outcome(Protocol):
    """An answer. `final` and `error` matter in streams only: `execute` raises errors."""

    @property
    def outputs(self) -> Sequence[OutputTensor]: ...
    @property
    def parameters(self) -> dict[str, Parameter]: ...
    @property
    def final(self) -> bool: ...
    @property
    def error(self) -> ShmserveError | None: ...


class Call(Protocol):
    """One request; closing it gives every slot back."""

    @property
    def receipt(self) -> Receipt: ...

    def reserve(self, nbytes: int) -> Any:
        """Room for a tensor: an object whose `view` is writable memory of that size."""
        ...

    def add_input(
        self, name: str, datatype: str, shape: tuple[int, ...], reservation: Any
    ) -> None: ...

    def add_region_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: RegionRef
    ) -> None: ...

    def execute(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        on_wait: Callable[[], bool] | None = None,
        places: tuple[OutputPlace, ...] = (),
    ) -> Outcome: ...

    def stream(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        on_wait: Callable[[], bool] | None = None,
        places: tuple[OutputPlace, ...] = (),
    ) -> Iterator[Outcome]:
        """Every answer in order; the last one, and only that, is `final`.

        A final outcome may have neither outputs nor an error: then it only ends the stream.
        Views of an outcome are valid until the next one is asked for. The model's errors come
        as outcomes; what keeps it from answering at all is raised. Closing the iterator, or
        the call, cancels what has not come. Each answer has `request_timeout_s`, counted from
        when it is asked for, the whole stream `stream_timeout_s`. A reader who does not ask for
        the next one holds back the model.
        """
        ...

    def answered(self) -> None:
        """The answer is ready to be sent and its receipt complete: the request is counted
        before its client has it. Forgotten, that is made up for by `close`."""
        ...

    def failed(self, error: BaseException) -> None:
        """The request ends without an answer for another reason than `execute` has raised."""

    def cancel(self) -> None:
        """Make `execute` or `stream` raise `Cancelled` at once; for any other thread, at any
        time, also before and after. Only for calls that were made `cancellable`."""
        ...

    def close(self) -> None: ...


class RegionDesk(Protocol):
    """Where client memory is registered."""

    def register(
        self, caller: Caller, name: str, key: str, offset: int, byte_size: int
    ) -> None: ...
    def register_cuda(
        self, caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int
    ) -> None: ...
    def unregister(self, caller: Caller, name: str = "", kind: str = SYSTEM) -> None: ...


class ServerDesk(Protocol):
    """Numbers and settings of the whole server."""

    def report(self) -> Report: ...
    def history(
        self, level: int, since: int = 0, life: str = "", brief: bool = False
    ) -> HistoryReport: ...
    def change_log(self, change: LogChange) -> None: ...
    def change_trace(self, model: str, change: TraceChange) -> None: ...


class ModelDesk(Protocol):
    """Where models are loaded and unloaded."""

    def folders(self) -> list[str]: ...
    def load(self, name: str, model_config: str | None, files: Mapping[str, bytes]) -> None: ...
    def unload(self, name: str) -> None: ...


class Dispatcher(Protocol):
    """The way to the models."""

    @property
    def models(self) -> ModelDesk: ...

    @property
    def regions(self) -> RegionDesk: ...
    @property
    def server(self) -> ServerDesk: ...

    def snapshot(self) -> Snapshot: ...
    def model(self, name: str, version: str = "") -> ModelEntry: ...
    def ready_model(self, name: str, version: str = "") -> ModelEntry: ...
    def set_online(self, online: bool) -> None: ...

    def refused(self, entry: ModelEntry, error: BaseException) -> None:
        """A request for this version failed before there was a call for it: count that."""
        ...

    def call(
        self, entry: ModelEntry, timeout_s: float | None = None, cancellable: bool = False
    ) -> Call: ...
    def close(self) -> None: ...
