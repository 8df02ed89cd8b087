"""Messages about what can be changed while the service runs: logs, traces, flags."""

from __future__ import annotations

from shmserve.core.live_settings import LogChange, LogSettings, TraceChange
from shmserve.core.trace_grants import GrantedTraces
from shmserve.protocol.control.message import Message


class ChangeLog(Message, frozen=True):
    """A frontend's client changes what is logged, everywhere and for good."""

    ticket: int
    change: LogChange


class ChangeTrace(Message, frozen=True):
    """A frontend's client changes what is traced: of one model, or (empty) of all others."""

    ticket: int
    model: str
    change: TraceChange


class TakeTraces(Message, frozen=True):
    """A frontend has sampled `wanted` requests of a model whose number of traces is limited, or
    that are written to files; `ids`: how many traces they are with those of their steps."""

    ticket: int
    model: str
    wanted: int
    ids: int = 0


class SetFlag(Message, frozen=True):
    """A frontend's client changes a flag of an extension (`config.ExtensionSettings.FLAGS`)."""

    ticket: int
    name: str
    value: bool


class FlagSet(Message, frozen=True):
    """Reply to `SetFlag`, sent after the change is published."""

    ticket: int


class SettingsAnswer(Message, frozen=True):
    """Reply to all but `SetFlag`, sent after publication; `granted`: traces to be written, and
    `traces`: which ids and places they have."""

    ticket: int
    granted: int = 0
    error_code: str = ""
    error: str = ""
    traces: GrantedTraces = GrantedTraces()


class LogChanged(Message, frozen=True):
    """To every process, after its Welcome and after each change."""

    log: LogSettings
