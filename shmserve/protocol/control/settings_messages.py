"""Messages about runtime settings: logs, traces, flags."""

from shmserve.core.live_settings import GrantedTraces, LogChange, LogSettings, TraceChange
from shmserve.protocol.control.message import Message


class ChangeLog(Message, frozen=True):
    """Request of a frontend: change what all processes log, until the next change."""

    ticket: int
    change: LogChange


class ChangeTrace(Message, frozen=True):
    """Request of a frontend: change what is traced of a model. An empty name stands for all models
    without settings of their own."""

    ticket: int
    model: str
    change: TraceChange


class TakeTraces(Message, frozen=True):
    """Request of a frontend to write traces whose number is limited, or which go to files.
    `wanted`: number of sampled requests of the model. `ids`: number of traces, including the traces
    of ensemble steps."""

    ticket: int
    model: str
    wanted: int
    ids: int = 0


class SetFlag(Message, frozen=True):
    """Request of a frontend: change a flag of an extension (`config.ExtensionSettings.FLAGS`)."""

    ticket: int
    name: str
    value: bool


class FlagSet(Message, frozen=True):
    """Reply to `SetFlag`, sent after the change is published."""

    ticket: int


class SettingsAnswer(Message, frozen=True):
    """Reply to `ChangeLog`, `ChangeTrace` and `TakeTraces`, sent after publication. `granted`:
    number of traces that may be written. `traces`: ids of these traces and their places in
    files."""

    ticket: int
    granted: int = 0
    error_code: str = ""
    error: str = ""
    traces: GrantedTraces = GrantedTraces()


class LogChanged(Message, frozen=True):
    """Report to every process: the log settings, sent after each Welcome and each change."""

    log: LogSettings
