"""A dispatcher without shared memory and processes: models are plain functions.

For tests of the frontends. It keeps the contract of `shmserve.dispatch.Dispatcher` as
far as they see it, and counts what they must give back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from shmserve import config
from shmserve.core.control.runtime_settings import LogChange, TraceChange, Tuning
from shmserve.core.regions.cuda_allocation import cuda_region
from shmserve.core.regions.region_book import Caller, ObjectFacts, RegionBook
from shmserve.core.registry import SYSTEM, LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.errors import ArenaExhausted, NotFound, ShmserveError, Unavailable
from shmserve.protocol.control.data_messages import OutputPlace, Parameter, RegionRef
from shmserve.protocol.control.history_messages import HistoryReport
from shmserve.protocol.control.stats_messages import Report
from shmserve.tensor.spec import ModelSpec


class FakeTensor(Struct, frozen=True):
    """An input or an output of a fake model."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    view: memoryview


class FakeRequest(Struct, frozen=True):
    """What a fake model is given."""

    id: str
    inputs: dict[str, FakeTensor]
    requested: tuple[str, ...]
    parameters: dict[str, Parameter]


class FakeOutcome(Struct, frozen=True):
    """What a fake model gives."""

    outputs: tuple[FakeTensor, ...] = ()
    parameters: dict[str, Parameter] = {}
    final: bool = True
    error: ShmserveError | None = None


# A model that streams gives several; their `final` is set for it.
Function = Callable[[FakeRequest], FakeOutcome | Iterable[FakeOutcome]]


class FakeReservation:
    """A slot made of a bytearray."""

    def __init__(self, nbytes: int) -> None:
        self.view = memoryview(bytearray(nbytes))
        self.sealed = False


class FakeReceipt:
    """Counts of one request."""

    def __init__(self) -> None:
        self.copied_in = 0
        self.copied_out = 0
        self.receive_ns = 0
        self.queue_ns = 0
        self.compute_ns = 0
        self.send_ns = 0

    def as_dict(self) -> dict[str, Any]:
        """The receipt as clients see it."""
        return {
            "copied_bytes": {"in": self.copied_in, "batch": 0, "out": self.copied_out, "device": 0},
            "ns": {
                "receive": self.receive_ns,
                "queue": self.queue_ns,
                "compute": self.compute_ns,
                "send": self.send_ns,
            },
            "executor": "fake/1/0",
        }


class FakeCall:
    """One request; `closed` counts the calls of `close`."""

    def __init__(self, dispatcher: FakeDispatcher, entry: ModelEntry) -> None:
        self.receipt = FakeReceipt()
        self.entry = entry
        self.reserved: list[FakeReservation] = []
        self.request: FakeRequest | None = None
        self.places: tuple[OutputPlace, ...] = ()
        self.closed = 0
        self.outcomes: list[str] = []
        self.cancelled = False
        self._dispatcher = dispatcher
        self._inputs: dict[str, FakeTensor] = {}

    def reserve(self, nbytes: int) -> FakeReservation:
        """Room for a tensor, within the fake's budget."""
        budget = self._dispatcher.budget
        if budget is not None and nbytes + sum(len(r.view) for r in self.reserved) > budget:
            raise ArenaExhausted(f"no slot of {nbytes} bytes is free")
        reservation = FakeReservation(nbytes)
        self.reserved.append(reservation)
        return reservation

    def add_input(
        self, name: str, datatype: str, shape: tuple[int, ...], reservation: FakeReservation
    ) -> None:
        """Seal a reservation as an input."""
        assert not reservation.sealed, "a reservation is sealed once"
        assert not self.closed, "the call is closed"
        reservation.sealed = True
        view = reservation.view.toreadonly()
        self._inputs[name] = FakeTensor(name, datatype, shape, view)

    def add_region_input(
        self, name: str, datatype: str, shape: tuple[int, ...], at: RegionRef
    ) -> None:
        """An input in client memory: zeros here."""
        view = memoryview(bytes(at.nbytes))
        self._inputs[name] = FakeTensor(name, datatype, shape, view)

    def execute(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        on_wait: Callable[[], bool] | None = None,
        places: tuple[OutputPlace, ...] = (),
    ) -> FakeOutcome:
        """Run the model's function in place."""
        self.places = places
        assert all(reservation.sealed for reservation in self.reserved), "an input is not sealed"
        self.request = FakeRequest(request_id, self._inputs, outputs, parameters or {})
        outcome = self._dispatcher.functions[self.entry.spec.name](self.request)
        assert isinstance(outcome, FakeOutcome), "a model that streams was not asked to"
        return outcome

    def stream(
        self,
        request_id: str = "",
        outputs: tuple[str, ...] = (),
        parameters: dict[str, Parameter] | None = None,
        on_wait: Callable[[], bool] | None = None,
        places: tuple[OutputPlace, ...] = (),
    ) -> Iterator[FakeOutcome]:
        """Run the model's function in place; of several outcomes the last is final."""
        self.places = places
        assert all(reservation.sealed for reservation in self.reserved), "an input is not sealed"
        self.request = FakeRequest(request_id, self._inputs, outputs, parameters or {})
        result = self._dispatcher.functions[self.entry.spec.name](self.request)
        if isinstance(result, FakeOutcome):
            yield msgspec.structs.replace(result, final=True)
            return
        for outcome in result:
            yield msgspec.structs.replace(outcome, final=False)
        yield FakeOutcome()

    def answered(self) -> None:
        """Count."""
        self.outcomes.append("answered")

    def failed(self, error: BaseException) -> None:
        """Count."""
        self.outcomes.append(type(error).__name__)

    def cancel(self) -> None:
        """Remember."""
        self.cancelled = True

    def close(self) -> None:
        """Count."""
        self.closed += 1


class FakeRegions:
    """Registers whatever it is told, as if every object had 4096 bytes of the caller's and
    there were `devices` GPUs."""

    def __init__(self) -> None:
        self.book = RegionBook(config.Settings(), 0)
        self.devices = 0

    def register(self, caller: Caller, name: str, key: str, offset: int, byte_size: int) -> None:
        """Enter it, by the real rules."""
        self.book.register(
            caller, name, key, offset, byte_size, ObjectFacts(1, 1, 4096, caller.uid)
        )

    def register_cuda(
        self, caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int
    ) -> None:
        """Enter it, by the real rules."""
        self.book.may_register(caller)
        made = cuda_region(caller, name, handle, device_id, byte_size, self.devices)
        self.book.enter(made)

    def unregister(self, caller: Caller, name: str = "", kind: str = SYSTEM) -> None:
        """Remove it."""
        self.book.unregister(caller, name, kind)


class FakeServer:
    """Numbers that a test makes up, and the real rules for settings."""

    def __init__(self) -> None:
        self.numbers: Report | None = Report((), (), {}, {})
        self.histories: dict[int, HistoryReport] = {}
        self.asked: list[tuple[int, int, str, bool]] = []
        self.tuning = Tuning()

    def report(self) -> Report:
        """What `numbers` are; None: the coordinator is away."""
        if self.numbers is None:
            raise Unavailable("the coordinator did not answer within 3 s")
        return self.numbers

    def history(
        self, level: int, since: int = 0, life: str = "", brief: bool = False
    ) -> HistoryReport:
        """What `histories` has of this level."""
        self.asked.append((level, since, life, brief))
        if level not in self.histories:
            raise Unavailable("the coordinator did not answer within 3 s")
        return self.histories[level]

    def change_log(self, change: LogChange) -> None:
        """Change it at once."""
        self.tuning = msgspec.structs.replace(self.tuning, log=change.onto(self.tuning.log))

    def change_trace(self, model: str, change: TraceChange) -> None:
        """Change it at once."""
        self.tuning = self.tuning.with_trace(model, change)


class FakeModels:
    """Notes what it is told; `refusal` is raised instead, if there is one."""

    def __init__(self) -> None:
        self.loads: list[tuple[str, str | None, dict[str, bytes]]] = []
        self.unloads: list[str] = []
        self.in_repository: list[str] = []
        self.refusal: ShmserveError | None = None

    def folders(self) -> list[str]:
        """Names in the repository."""
        return self.in_repository

    def load(self, name: str, model_config: str | None, files: Mapping[str, bytes]) -> None:
        """Note it."""
        if self.refusal is not None:
            raise self.refusal
        self.loads.append((name, model_config, dict(files)))

    def unload(self, name: str) -> None:
        """Note it."""
        self.unloads.append(name)


class FakeDispatcher:
    """Models by name; `calls` are all calls ever made, `budget` bounds each one's bytes."""

    def __init__(
        self, models: Iterable[tuple[ModelSpec, Function]], budget: int | None = None
    ) -> None:
        self.functions: dict[str, Function] = {}
        self.entries: dict[str, dict[str, ModelEntry]] = {}
        self.calls: list[FakeCall] = []
        self.budget = budget
        self.regions = FakeRegions()
        self.server = FakeServer()
        self.refusals: list[tuple[str, str]] = []
        self.models = FakeModels()
        self.refused_models: dict[str, str] = {}
        self.published = True
        self.draining = False
        self.online = False
        for spec, function in models:
            self.functions[spec.name] = function
            self.put(spec, ModelState.READY)

    def put(self, spec: ModelSpec, state: ModelState) -> None:
        """Publish a version of a model in a state."""
        name = f"{spec.name}/{spec.version}/0"
        live = (LiveInstance(name, "fake", "fake", 1),) if state is ModelState.READY else ()
        self.entries.setdefault(spec.name, {})[spec.version] = ModelEntry(spec, state, live)

    def snapshot(self) -> Snapshot:
        """The registry."""
        if not self.published:
            raise Unavailable("the server is starting")
        return Snapshot(
            "fake",
            1,
            self.entries,
            complete=True,
            draining=self.draining,
            regions=self.regions.book.regions,
            grps_online=self.online,
            tuning=self.server.tuning,
            refused=self.refused_models,
        )

    def model(self, name: str, version: str = "") -> ModelEntry:
        """An entry in any state."""
        entry = self.snapshot().newest(name)
        if entry is None:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        if version:
            found = self.entries[name].get(version)
            if found is None:
                raise NotFound(
                    f"Request for unknown model: '{name}' version {version} is not found"
                )
            return found
        return entry

    def ready_model(self, name: str, version: str = "") -> ModelEntry:
        """An entry that can be used."""
        entry = self.model(name, version)
        if entry.state is not ModelState.READY:
            raise Unavailable(f"Request for unknown model: '{name}' is not at ready state")
        return entry

    def call(
        self, entry: ModelEntry, timeout_s: float | None = None, cancellable: bool = False
    ) -> FakeCall:
        """A new request."""
        call = FakeCall(self, entry)
        self.calls.append(call)
        return call

    def set_online(self, online: bool) -> None:
        """GRPS's online flag."""
        self.online = online

    def refused(self, entry: ModelEntry, error: BaseException) -> None:
        """Remember it."""
        self.refusals.append((entry.spec.name, type(error).__name__))

    def start(self) -> None:
        """Nothing to connect to."""

    def close(self) -> None:
        """Nothing to let go of."""
