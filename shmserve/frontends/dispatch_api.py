"""Dispatch API: the protocols by which frontends use `shmserve.dispatch`.

The protocols let frontends be tested with `tests.fake_dispatch`, without shared memory
or processes. `shmserve.dispatch.Dispatcher` is the real implementation.
"""

from collections.abc import Mapping
from typing import Protocol

from shmserve.core.caller import Caller
from shmserve.core.live_settings import LogChange, TraceChange
from shmserve.core.memory.slots import Slot
from shmserve.core.region_kinds import SYSTEM
from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.dispatch.caller_shares import CallerShares
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import NO_OPTIONS, RunOptions
from shmserve.errors import ShmserveError
from shmserve.protocol.control.history_messages import HistoryReport
from shmserve.protocol.control.span_messages import Attribute
from shmserve.protocol.control.stats_messages import Report


class CoordinatorApi(Protocol):
    """Requests to the coordinator: client memory, models, statistics and runtime settings."""

    def register_region(
        self, caller: Caller, name: str, key: str, offset: int, byte_size: int
    ) -> None: ...
    def register_cuda_region(
        self, caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int
    ) -> None: ...
    def unregister_regions(self, caller: Caller, name: str = "", kind: str = SYSTEM) -> None: ...
    def model_folders(self) -> list[str]: ...
    def load_model(
        self, name: str, model_config: str | None, files: Mapping[str, bytes]
    ) -> None: ...
    def unload_model(self, name: str, dependents: bool = False) -> None: ...
    def report(self) -> Report: ...
    def history(
        self, level: int, since: int = 0, life: str = "", brief: bool = False
    ) -> HistoryReport: ...
    def change_log(self, change: LogChange) -> None: ...
    def change_trace(self, model: str, change: TraceChange) -> None: ...


class TensorMemory(Protocol):
    """Slots for tensors received before the call is made."""

    def reserve_now(self, nbytes: int) -> Slot | None:
        """Return a slot to write to, or None if no memory is free. Never waits."""
        ...

    def reserve(self, nbytes: int) -> Slot:
        """Return a slot to write to. Wait a bounded time for new memory if none is free.

        Raises:
            ArenaExhausted: the pool is used up.
        """
        ...

    def reclaim(self, slot: Slot) -> None:
        """Take a slot back."""
        ...


class DispatchApi(Protocol):
    """Access to the models."""

    @property
    def memory(self) -> TensorMemory: ...

    @property
    def shares(self) -> CallerShares:
        """Shares of the pool that callers hold."""
        ...

    @property
    def coordinator(self) -> CoordinatorApi: ...

    def snapshot(self) -> Snapshot: ...
    def model(self, name: str, version: str = "") -> ModelEntry: ...
    def ready_model(self, name: str, version: str = "") -> ModelEntry: ...
    def set_flag(self, name: str, value: bool) -> None: ...

    def refused(self, entry: ModelEntry, error: BaseException) -> None:
        """Count a request for this version that failed before the call was made."""
        ...

    def trace_refused(
        self, error: ShmserveError, traceparent: str, attributes: dict[str, Attribute]
    ) -> None:
        """Record a span for an inference that failed before an executor was asked, if the
        inference is to be traced. `traceparent`: the client's trace context."""
        ...

    def count_key(self, name: str) -> None:
        """Count a request with the key of this name."""
        ...

    def call(
        self, entry: ModelEntry, options: RunOptions = NO_OPTIONS, cancellable: bool = False
    ) -> InferenceCall: ...
    def close(self) -> None: ...
