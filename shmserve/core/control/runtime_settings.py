"""Settings that clients may change while the service runs: what is logged, what is traced.

Pure: rules only. Owner: the coordinator; it publishes them with the registry.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import asdict, replace

LOG_FORMATS = ("default", "ISO8601")
TRACE_LEVELS = ("OFF", "TIMESTAMPS")
UNLIMITED = -1
_LEVELS = ("debug", "info", "warning", "error")


class LogSettings(Struct, frozen=True, array_like=True):
    """What all processes log. `verbose` above 0: debug lines as well."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0
    format: str = "default"


class LogChange(Struct, frozen=True, array_like=True):
    """What to change; None leaves a setting alone."""

    info: bool | None = None
    warning: bool | None = None
    error: bool | None = None
    verbose: Annotated[int, Meta(ge=0)] | None = None
    format: Literal["default", "ISO8601"] | None = None

    def onto(self, base: LogSettings) -> LogSettings:
        """The settings with what this says of them."""
        return replace(base, **_given(self))


class TraceSettings(Struct, frozen=True, array_like=True):
    """Which requests are traced: one of `rate`, `count` more of them (-1: no limit)."""

    on: bool = False
    rate: int = 1000
    count: int = UNLIMITED

    @property
    def active(self) -> bool:
        return self.on and self.count != 0


class TraceChange(Struct, frozen=True, array_like=True):
    """What to change: None leaves a setting alone; those in `cleared` go back, of a model to
    what holds for all, else to the default."""

    on: bool | None = None
    rate: Annotated[int, Meta(ge=1)] | None = None
    count: Annotated[int, Meta(ge=UNLIMITED)] | None = None
    cleared: tuple[str, ...] = ()

    def onto(self, base: TraceSettings) -> TraceSettings:
        return replace(base, **_given(self))

    def then(self, later: TraceChange) -> TraceChange:
        """Both, the later on top; what it clears is gone."""
        both = {**_given(self), **_given(later)}
        return TraceChange(**{n: value for n, value in both.items() if n not in later.cleared})


def _given(change: LogChange | TraceChange) -> dict[str, Any]:
    """What it changes, by name."""
    fields = asdict(change).items()
    return {name: value for name, value in fields if value is not None and name != "cleared"}


def initial_log(level: str) -> LogSettings:
    """What the setting `log_level` means."""
    rank = _LEVELS.index(level)
    return LogSettings(info=rank <= 1, warning=rank <= 2, verbose=int(rank == 0))


class RuntimeSettings(Struct, frozen=True, array_like=True):
    """All of it. `models`: what is particular to single models."""

    log: LogSettings = LogSettings()
    trace: TraceSettings = TraceSettings()
    models: dict[str, TraceChange] = {}

    def trace_of(self, model: str) -> TraceSettings:
        change = self.models.get(model)
        return self.trace if change is None else change.onto(self.trace)

    def with_trace(self, model: str, change: TraceChange) -> RuntimeSettings:
        """After a change, of one model or (empty) of what holds for all."""
        if not model:
            cleared = {name: getattr(TraceSettings(), name) for name in change.cleared}
            return replace(self, trace=change.onto(replace(self.trace, **cleared)))
        merged = self.models.get(model, TraceChange()).then(change)
        rest = {name: kept for name, kept in self.models.items() if name != model}
        return replace(self, models=rest if merged == TraceChange() else {**rest, model: merged})

    def taken(self, model: str, wanted: int) -> tuple[RuntimeSettings, int]:
        """After that many traces of a model were asked for, and how many there may be."""
        settings = self.trace_of(model)
        if not settings.active:
            return self, 0
        if settings.count == UNLIMITED:
            return self, wanted
        granted = min(wanted, settings.count)
        own = self.models.get(model)
        change = TraceChange(count=settings.count - granted)
        scope = model if own is not None and own.count is not None else ""
        return self.with_trace(scope, change), granted
