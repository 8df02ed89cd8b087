"""A dispatcher without shared memory and processes, in which models are plain functions.

For tests of the frontends. The fakes keep the contract of `shmserve.dispatch.Dispatcher` as far as
frontends see it, and count the objects that frontends must give back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from msgspec import Struct

from shmserve import config, waiting
from shmserve.core.caller import Caller
from shmserve.core.live_settings import LogChange, RuntimeSettings, TraceChange
from shmserve.core.memory.slots import Slot
from shmserve.core.region_kinds import SYSTEM
from shmserve.core.regions.region_book import ObjectFacts, RegionBook
from shmserve.core.regions.region_names import cuda_region
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.dispatch.caller_shares import CallerShares
from shmserve.dispatch.outcome import NO_OPTIONS, Outcome, OutputTensor, RunOptions
from shmserve.dispatch.receipt import Receipt
from shmserve.errors import ArenaExhausted, ShmserveError, Unavailable
from shmserve.protocol.control.data_messages import Parameter, RegionRef
from shmserve.protocol.control.history_messages import HistoryReport
from shmserve.protocol.control.span_messages import Attribute
from shmserve.protocol.control.stats_messages import Report
from shmserve.tensor.spec import ModelSpec

Shape = tuple[int, ...]


class FakeRequest(Struct, frozen=True):
    id: str
    inputs: dict[str, OutputTensor]
    requested: tuple[str, ...]
    parameters: dict[str, Parameter]


# A streaming model returns several outcomes, without setting `final`.
Function = Callable[[FakeRequest], Outcome | Iterable[Outcome]]
Model = tuple[ModelSpec, Function]


class FakeReservation(Slot, eq=False):
    sealed: bool = False


def room_for(nbytes: int) -> FakeReservation:
    return FakeReservation(0, view=memoryview(bytearray(nbytes)))


class FakeMemory:
    """Slots that are reserved before their call."""

    def __init__(self) -> None:
        self.held: list[Slot] = []  # reserved, and neither adopted nor reclaimed
        self.ready = True  # memory is available without waiting
        self.exhausted = False  # memory is never available

    def reserve_now(self, nbytes: int) -> Slot | None:
        return self.reserve(nbytes) if self.ready else None

    def reserve(self, nbytes: int) -> Slot:
        if self.exhausted:
            raise ArenaExhausted(f"no slot of {nbytes} bytes is free")
        self.held.append(room_for(nbytes))
        return self.held[-1]

    def reclaim(self, slot: Slot) -> None:
        self.held.remove(slot)


class FakeAccount:
    """The account of a request. `outcomes` lists the reported outcomes."""

    def __init__(self, receipt: Receipt) -> None:
        self.outcomes: list[str] = []
        self._receipt = receipt

    def answered(self, copied_out: int = 0, send_ns: int = 0) -> None:
        self._receipt.copied_out += copied_out
        self._receipt.send_ns += send_ns
        self.outcomes.append("answered")

    def failed(self, error: BaseException) -> None:
        self.outcomes.append(type(error).__name__)


class FakeCall:
    """A call. `closed` counts the calls of `close`."""

    def __init__(self, dispatcher: FakeDispatcher, entry: ModelEntry, options: RunOptions) -> None:
        self.receipt = Receipt(executor="fake/1/0")
        self.options = options
        self.entry = entry
        self.reserved: list[FakeReservation] = []
        self.request: FakeRequest | None = None
        self.closed = 0
        self.account = FakeAccount(self.receipt)
        self.outcomes = self.account.outcomes
        self.cancelled = False
        self._dispatcher = dispatcher
        self._inputs: dict[str, OutputTensor] = {}

    def reserve(self, nbytes: int) -> FakeReservation:
        """Reserve memory for a tensor, within the fake's budget."""
        budget = self._dispatcher.budget
        if budget is not None and nbytes + sum(len(r.view) for r in self.reserved) > budget:
            raise ArenaExhausted(f"no slot of {nbytes} bytes is free")
        reservation = room_for(nbytes)
        self.reserved.append(reservation)
        return reservation

    def adopt(self, reservation: FakeReservation) -> FakeReservation:
        """Take over a reservation as if this call had made it."""
        self._dispatcher.memory.reclaim(reservation)
        self.reserved.append(reservation)
        return reservation

    def add_input(
        self, name: str, datatype: str, shape: Shape, at: FakeReservation | RegionRef
    ) -> None:
        """Add an input. Client memory holds only zeros here."""
        assert not self.closed, "the call is closed"
        if isinstance(at, RegionRef):
            view = memoryview(bytes(at.nbytes))
        else:
            assert not at.sealed, "a reservation is sealed once"
            at.sealed = True
            view = at.view.toreadonly()
        self._inputs[name] = OutputTensor(name, datatype, shape, view)

    def execute(self) -> Outcome:
        result = self._run()
        assert isinstance(result, Outcome), "a model that streams was not asked to"
        return result

    def stream(self) -> Iterator[Outcome]:
        """Run the model's function in place. An empty final outcome follows several outcomes."""
        result = self._run()
        if isinstance(result, Outcome):
            yield msgspec.structs.replace(result, final=True)
            return
        outcomes = iter(result)
        while (outcome := waiting.beside(next, outcomes, None)) is not None:
            yield msgspec.structs.replace(outcome, final=False)
        yield Outcome()

    def _run(self) -> Outcome | Iterable[Outcome]:
        options = self.options
        assert all(reservation.sealed for reservation in self.reserved), "an input is not sealed"
        self.request = FakeRequest(
            options.request_id, self._inputs, options.outputs, options.parameters
        )
        function = self._dispatcher.functions[self.entry.spec.name]
        return waiting.beside(function, self.request)  # as in an executor

    def cancel(self) -> None:
        self.cancelled = True

    def lend(self) -> Callable[[], None]:
        """Return a function that does nothing: outputs are ordinary memory."""
        return lambda: None

    def close(self) -> None:
        self.closed += 1


class FakeCoordinator:
    """Coordinator that records the calls of frontends and applies the real rules where it can."""

    def __init__(self) -> None:
        # as if every object had 4096 bytes and belonged to the caller
        self.book = RegionBook(config.Settings(), 0)
        self.devices = 0  # number of GPUs
        self.numbers: Report | None = Report((), (), {}, {})  # None: the coordinator is silent
        self.histories: dict[int, HistoryReport] = {}  # by level; others are not answered
        self.asked: list[tuple[int, int, str, bool]] = []  # arguments of requested histories
        self.tuning = RuntimeSettings()
        self.loads: list[tuple[str, str | None, dict[str, bytes]]] = []
        self.unloads: list[str] = []
        self.unloaded_dependents: list[bool] = []
        self.in_repository: list[str] = []
        self.refusal: ShmserveError | None = None  # of loads

    def register_region(
        self, caller: Caller, name: str, key: str, offset: int, byte_size: int
    ) -> None:
        facts = ObjectFacts(1, 1, 4096, caller.uid)
        self.book.register(caller, name, key, offset, byte_size, facts)

    def register_cuda_region(
        self, caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int
    ) -> None:
        self.book.may_register(caller)
        region = cuda_region(caller, name, handle, device_id, byte_size, self.devices)
        self.book.enter(region)

    def unregister_regions(self, caller: Caller, name: str = "", kind: str = SYSTEM) -> None:
        self.book.unregister(caller, name, kind)

    def report(self) -> Report:
        if self.numbers is None:
            raise Unavailable("the coordinator did not answer within 3 s")
        return self.numbers

    def history(
        self, level: int, since: int = 0, life: str = "", brief: bool = False
    ) -> HistoryReport:
        self.asked.append((level, since, life, brief))
        if level not in self.histories:
            raise Unavailable("the coordinator did not answer within 3 s")
        return self.histories[level]

    def change_log(self, change: LogChange) -> None:
        self.tuning = msgspec.structs.replace(self.tuning, log=change.onto(self.tuning.log))

    def change_trace(self, model: str, change: TraceChange) -> None:
        self.tuning = self.tuning.with_trace(model, change)

    def model_folders(self) -> list[str]:
        return self.in_repository

    def load_model(self, name: str, model_config: str | None, files: Mapping[str, bytes]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.loads.append((name, model_config, dict(files)))

    def unload_model(self, name: str, dependents: bool = False) -> None:
        self.unloads.append(name)
        self.unloaded_dependents.append(dependents)


class FakeDispatcher:
    """Models by name. `calls` has every call ever made; `budget` bounds the bytes of each call."""

    def __init__(self, models: Iterable[Model], budget: int | None = None) -> None:
        self.functions: dict[str, Function] = {}
        self.entries: dict[str, dict[str, ModelEntry]] = {}
        self.calls: list[FakeCall] = []
        self.budget = budget
        self.coordinator = FakeCoordinator()
        self.memory = FakeMemory()
        self.pool_bytes = 0  # size of the pool that callers share; 0: unbounded
        self.shares = CallerShares(config.Settings(), lambda: self.pool_bytes)
        self.refusals: list[tuple[str, str]] = []
        self.keys: Counter[str] = Counter()  # requests by name of their key
        self.refused_models: dict[str, str] = {}
        self.published = True
        self.complete = True
        self.draining = False
        self.flags: dict[str, bool] = {}
        for spec, function in models:
            self.functions[spec.name] = function
            self.put(spec, ModelState.READY)

    def put(self, spec: ModelSpec, state: ModelState) -> None:
        """Publish a version of a model with a state."""
        name = f"{spec.name}/{spec.version}/0"
        live = (LiveInstance(name, "fake", "fake", 1),) if state is ModelState.READY else ()
        self.entries.setdefault(spec.name, {})[spec.version] = ModelEntry(spec, state, live)

    def snapshot(self) -> Snapshot:
        if not self.published:
            raise Unavailable("the server is starting")
        return Snapshot(
            "fake",
            1,
            self.entries,
            complete=self.complete,
            draining=self.draining,
            regions=self.coordinator.book.regions,
            flags=dict(self.flags),
            tuning=self.coordinator.tuning,
            refused=self.refused_models,
        )

    def model(self, name: str, version: str = "") -> ModelEntry:
        return self.snapshot().model(name, version)

    def ready_model(self, name: str, version: str = "") -> ModelEntry:
        entry = self.model(name, version)
        if entry.state is not ModelState.READY:
            raise Unavailable(f"Request for unknown model: '{name}' is not at ready state")
        return entry

    def call(
        self, entry: ModelEntry, options: RunOptions = NO_OPTIONS, cancellable: bool = False
    ) -> FakeCall:
        call = FakeCall(self, entry, options)
        self.calls.append(call)
        return call

    def set_flag(self, name: str, value: bool) -> None:
        self.flags[name] = value

    def refused(self, entry: ModelEntry, error: BaseException) -> None:
        self.refusals.append((entry.spec.name, type(error).__name__))

    def trace_refused(
        self, error: ShmserveError, traceparent: str, attributes: dict[str, Attribute]
    ) -> None:
        """Do nothing: fakes are not traced."""

    def count_key(self, name: str) -> None:
        self.keys[name] += 1

    def start(self) -> None:
        """Do nothing: fakes have no connections."""

    def close(self) -> None:
        """Do nothing: fakes hold no resources."""
