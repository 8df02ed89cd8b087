"""Live settings: settings of logs and traces that clients may change while the service runs.

Pure: rules only. Owner: the coordinator, which publishes the settings with the registry. So
changes by clients outlive the coordinator, and a frontend finds the trace settings in a model's
entry.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

from shmserve.config import Settings

LOG_FORMATS = ("default", "ISO8601")
UNLIMITED = -1
_LEVELS = ("debug", "info", "warning", "error")
ALL_IN_ONE = -1  # file number of traces that go to the file without a number


class GrantedTraces(Struct, frozen=True, array_like=True):
    """Traces that a process may write. `count`: number of traces. `first`: first of the traces'
    ids; traces of steps take ids, too. `places`: (file number, number of traces for the file), in
    order."""

    count: int = 0
    first: int = 1
    places: tuple[tuple[int, int], ...] = ()


class TraceFiles(Struct, frozen=True, array_like=True):
    """Numbers of traces and trace files so far.

    Attributes:
        traces: ids used so far, by traces and traces of steps.
        begun: numbered files begun so far.
        open: scope -> (file number, traces in the file, capacity of the file). A scope is a model,
            or empty for all models without their own frequency.
    """

    traces: int = 0
    begun: int = 0
    open: dict[str, tuple[int, int, int]] = {}

    def allot(
        self, scope: str, frequency: int, count: int, ids: int
    ) -> tuple[TraceFiles, GrantedTraces]:
        """Return the numbers after `count` more traces, and the granted traces. `ids`: ids needed
        by the traces and the traces within them. `frequency`: traces per file; 0: all in one
        file."""
        ids, first = self.traces + ids, self.traces + 1
        if not frequency:
            granted = GrantedTraces(count, first, ((ALL_IN_ONE, count),))
            return TraceFiles(ids, self.begun, self.open), granted
        begun, remaining = self.begun, count
        number, filled, size = self.open.get(scope, (ALL_IN_ONE, 0, 0))
        places: list[tuple[int, int]] = []
        while remaining:
            if filled >= size or size != frequency:
                number, filled, size, begun = begun, 0, frequency, begun + 1
            share = min(remaining, size - filled)
            places.append((number, share))
            filled, remaining = filled + share, remaining - share
        opened = {**self.open, scope: (number, filled, size)}
        return TraceFiles(ids, begun, opened), GrantedTraces(count, first, tuple(places))


class LogSettings(Struct, frozen=True, array_like=True):
    """Log settings of all processes. `verbose` above 0 adds debug lines."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0
    format: str = "default"


class LogChange(Struct, frozen=True, array_like=True):
    """Change of log settings. None leaves a setting unchanged."""

    info: bool | None = None
    warning: bool | None = None
    error: bool | None = None
    verbose: Annotated[int, Meta(ge=0)] | None = None
    format: Literal["default", "ISO8601"] | None = None

    def onto(self, base: LogSettings) -> LogSettings:
        """Return the settings after this change."""
        return replace(base, **_given(self))


class TraceSettings(Struct, frozen=True, array_like=True):
    """Choice of the requests to trace.

    Attributes:
        on: record the time at which a request passes each stage.
        rate: trace one request of this many; 0: only requests whose client asks for a trace.
        count: number of further traces; -1: no limit.
        log_frequency: number of traces per file, if there are files; 0: all in one file.
        tensors: record the inputs and outputs of a request.
    """

    on: bool = False
    rate: int = 1000
    count: int = UNLIMITED
    log_frequency: int = 0
    tensors: bool = False

    @property
    def active(self) -> bool:
        return (self.on or self.tensors) and self.count != 0

    @property
    def levels(self) -> list[str]:
        """Trace levels by Triton's names."""
        names = ((self.on, "TIMESTAMPS"), (self.tensors, "TENSORS"))
        return [level for on, level in names if on] or ["OFF"]


class TraceChange(Struct, frozen=True, array_like=True):
    """Change of trace settings. None leaves a setting unchanged. A setting in `cleared` returns to
    the server's setting (of a model), or to the value at the start of the service (of the
    server)."""

    on: bool | None = None
    rate: Annotated[int, Meta(ge=0)] | None = None
    count: Annotated[int, Meta(ge=UNLIMITED)] | None = None
    cleared: tuple[str, ...] = ()
    log_frequency: Annotated[int, Meta(ge=0)] | None = None
    tensors: bool | None = None

    def onto(self, base: TraceSettings) -> TraceSettings:
        return replace(base, **_given(self))

    def then(self, later: TraceChange) -> TraceChange:
        """Return both changes in one. The later change wins, and removes the settings in its
        `cleared`."""
        merged = {**_given(self), **_given(later)}
        return TraceChange(**{n: value for n, value in merged.items() if n not in later.cleared})


def _given(change: LogChange | TraceChange) -> dict[str, Any]:
    """Return the changed settings by name."""
    fields = asdict(change).items()
    return {name: value for name, value in fields if value is not None and name != "cleared"}


def initial_log(level: str, line_format: str) -> LogSettings:
    """Return the log settings for the settings `log_level` and `log_format`."""
    rank = _LEVELS.index(level)
    stamps = line_format if line_format in LOG_FORMATS else LOG_FORMATS[0]
    return LogSettings(rank <= 1, rank <= 2, verbose=int(rank == 0), format=stamps)


class RuntimeSettings(Struct, frozen=True, array_like=True):
    """All settings that clients may change. `models`: model -> difference to `trace`. `start`:
    trace settings at the start of the service. `files`: position of the next traces in the trace
    files."""

    log: LogSettings = LogSettings()
    trace: TraceSettings = TraceSettings()
    models: dict[str, TraceChange] = {}
    start: TraceSettings = TraceSettings()
    files: TraceFiles = TraceFiles()

    def trace_of(self, model: str) -> TraceSettings:
        change = self.models.get(model)
        return self.trace if change is None else change.onto(self.trace)

    def with_trace(self, model: str, change: TraceChange) -> RuntimeSettings:
        """Return the settings after a change for one model, or for the server if `model` is
        empty."""
        if not model:
            cleared = {name: getattr(self.start, name) for name in change.cleared}
            return replace(self, trace=change.onto(replace(self.trace, **cleared)))
        merged = self.models.get(model, TraceChange()).then(change)
        rest = {name: kept for name, kept in self.models.items() if name != model}
        return replace(self, models=rest if merged == TraceChange() else {**rest, model: merged})

    def taken(self, model: str, wanted: int, ids: int = 0) -> tuple[RuntimeSettings, GrantedTraces]:
        """Grant up to `wanted` traces of a model. Return the settings afterwards, and the granted
        traces. `ids`: ids needed by the traces and the traces of their steps."""
        settings = self.trace_of(model)
        granted = wanted if settings.count == UNLIMITED else min(wanted, settings.count)
        if not settings.active or not granted:
            return self, GrantedTraces()
        after, own = self, self.models.get(model, TraceChange())
        if settings.count != UNLIMITED:
            change = TraceChange(count=settings.count - granted)
            after = self.with_trace(model if own.count is not None else "", change)
        scope = model if own.log_frequency is not None else ""
        files, traces = self.files.allot(scope, settings.log_frequency, granted, max(ids, granted))
        return replace(after, files=files), traces


def initial(settings: Settings) -> RuntimeSettings:
    """Return the settings at the start of the service."""
    levels, frequency = set(settings.trace_level), settings.trace_log_frequency
    trace = TraceSettings(
        *("TIMESTAMPS" in levels, settings.trace_rate, settings.trace_count),
        *(frequency, "TENSORS" in levels),
    )
    log = initial_log(settings.log_level, settings.log_format)
    return RuntimeSettings(log, trace, start=trace)
