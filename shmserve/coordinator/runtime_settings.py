"""What clients have set while the service runs: kept here, published, told to every process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from shmserve.core.control.runtime_settings import LogSettings, Tuning
from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.errors import Code
from shmserve.observe import logs
from shmserve.protocol.control.settings_messages import (
    ChangeLog,
    ChangeTrace,
    LogChanged,
    SettingsAnswer,
    TakeTraces,
)
from shmserve.protocol.messages import FromCoordinator

_log = logging.getLogger(__name__)

Models = dict[str, dict[str, ModelEntry]]


class TuningDesk:
    """See the module. `log`: as the service was started."""

    def __init__(self, log: LogSettings, send: Callable[[str, FromCoordinator], None]) -> None:
        self.tuning = Tuning(log)
        self._send = send

    def restore(self, previous: Snapshot) -> None:
        """After a restart: what was published before."""
        if previous.tuning is not None:
            self.tuning = previous.tuning
            logs.apply(self.tuning.log)

    def hello(self, process: str) -> None:
        """A process that has just been welcomed."""
        self._send(process, LogChanged(self.tuning.log))

    def handle(
        self,
        process: str,
        message: ChangeLog | ChangeTrace | TakeTraces,
        models: Iterable[str],
        publish: Callable[[], None],
        everybody: Iterable[str],
    ) -> None:
        """One question of a frontend, answered when everything is done."""
        if isinstance(message, ChangeLog):
            self.tuning = msgspec.structs.replace(
                self.tuning, log=message.change.onto(self.tuning.log)
            )
            logs.apply(self.tuning.log)
            publish()
            for name in everybody:
                self._send(name, LogChanged(self.tuning.log))
            self._send(process, SettingsAnswer(message.ticket))
        elif isinstance(message, ChangeTrace):
            if message.model and message.model not in set(models):
                error = f"Request for unknown model : {message.model}"
                code = Code.INVALID_ARGUMENT
                self._send(process, SettingsAnswer(message.ticket, error_code=code, error=error))
                return
            self.tuning = self.tuning.with_trace(message.model, message.change)
            publish()
            self._send(process, SettingsAnswer(message.ticket))
        else:
            before = self.tuning
            self.tuning, granted = before.taken(message.model, max(0, message.wanted))
            if self.tuning != before:
                publish()
            self._send(process, SettingsAnswer(message.ticket, granted))

    def traced(self, models: Models) -> Models:
        """The registry's models with what is to be traced of each; most often the same."""
        tuning = self.tuning
        if not tuning.trace.active and not tuning.models:
            return models
        found: Models = {}
        for name, versions in models.items():
            settings = tuning.trace_of(name)
            trace = settings if settings.active else None
            found[name] = {
                number: msgspec.structs.replace(entry, trace=trace)
                for number, entry in versions.items()
            }
        return found
