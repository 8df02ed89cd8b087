"""Settings that clients may change while the service runs: what is logged, what is traced.

Pure: rules only. Owner: the coordinator; it publishes them with the registry.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

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
        told = {name: getattr(self, name) for name in self.__struct_fields__}
        return replace(base, **{name: value for name, value in told.items() if value is not None})


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
        """The settings with what this says of them."""
        return TraceSettings(
            base.on if self.on is None else self.on,
            base.rate if self.rate is None else self.rate,
            base.count if self.count is None else self.count,
        )

    def then(self, later: TraceChange) -> TraceChange:
        """Both, the later on top; what it clears is gone."""
        told = {name: getattr(self, name) for name in ("on", "rate", "count")}
        for name in told:
            if name in later.cleared:
                told[name] = None
            elif getattr(later, name) is not None:
                told[name] = getattr(later, name)
        return TraceChange(**told)


def initial_log(level: str) -> LogSettings:
    """What the setting `log_level` means."""
    rank = _LEVELS.index(level)
    return LogSettings(info=rank <= 1, warning=rank <= 2, verbose=int(rank == 0))


class Tuning(Struct, frozen=True, array_like=True):
    """All of it. `models`: what is particular to single models."""

    log: LogSettings = LogSettings()
    trace: TraceSettings = TraceSettings()
    models: dict[str, TraceChange] = {}

    def trace_of(self, model: str) -> TraceSettings:
        """What holds for a model."""
        change = self.models.get(model)
        return self.trace if change is None else change.onto(self.trace)

    def with_trace(self, model: str, change: TraceChange) -> Tuning:
        """After a change, of one model or (empty) of what holds for all."""
        if not model:
            return replace(self, trace=_cleared(self.trace, change))
        merged = self.models.get(model, TraceChange()).then(change)
        rest = {name: kept for name, kept in self.models.items() if name != model}
        return replace(self, models=rest if merged == TraceChange() else {**rest, model: merged})

    def taken(self, model: str, wanted: int) -> tuple[Tuning, int]:
        """After that many traces of a model were asked for, and how many there may be."""
        settings = self.trace_of(model)
        if not settings.active:
            return self, 0
        if settings.count == UNLIMITED:
            return self, wanted
        granted = min(wanted, settings.count)
        own = self.models.get(model)
        change = TraceChange(count=settings.count - granted)
        of = model if own is not None and own.count is not None else ""
        return self.with_trace(of, change), granted


def _cleared(base: TraceSettings, change: TraceChange) -> TraceSettings:
    defaults = TraceSettings()
    return change.onto(replace(base, **{n: getattr(defaults, n) for n in change.cleared}))
