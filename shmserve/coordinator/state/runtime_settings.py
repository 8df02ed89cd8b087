"""Runtime settings: settings that clients change while the service runs, kept, published and sent
to every process."""

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.live_settings import initial
from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.errors import Code
from shmserve.observe import flight_recorder, logs
from shmserve.protocol.control import settings_messages as wire
from shmserve.protocol.control.messages import FromCoordinator

Models = dict[str, dict[str, ModelEntry]]


class RuntimeSettingsStore:
    """Current runtime settings, initially taken from the settings of the service."""

    def __init__(self, settings: Settings, send: Callable[[str, FromCoordinator], None]) -> None:
        self.current = initial(settings)
        self._send = send

    def restore(self, previous: Snapshot) -> None:
        if previous.tuning is not None:
            self.current = previous.tuning
            logs.apply(self.current.log)

    def hello(self, process: str) -> None:
        """Send the log settings to a process that was just welcomed."""
        self._send(process, wire.LogChanged(self.current.log))

    def handle(
        self,
        process: str,
        message: wire.ChangeLog | wire.ChangeTrace | wire.TakeTraces,
        models: Iterable[str],
        publish: Callable[[], object],
        everybody: Iterable[str],
    ) -> None:
        """Carry out a frontend's request. Answer once the change is published."""
        if isinstance(message, wire.ChangeLog):
            log = message.change.onto(self.current.log)
            self.current = replace(self.current, log=log)
            logs.apply(log)
            flight_recorder.record("settings changed", "log")
            publish()
            for name in everybody:
                self._send(name, wire.LogChanged(log))
            self._send(process, wire.SettingsAnswer(message.ticket))
        elif isinstance(message, wire.ChangeTrace):
            if message.model and message.model not in set(models):
                error = f"Request for unknown model : {message.model}"
                self._send(
                    process, wire.SettingsAnswer(message.ticket, 0, Code.INVALID_ARGUMENT, error)
                )
                return
            self.current = self.current.with_trace(message.model, message.change)
            flight_recorder.record("settings changed", "trace", message.model)
            publish()
            self._send(process, wire.SettingsAnswer(message.ticket))
        else:
            before, wanted = self.current, max(0, message.wanted)
            self.current, granted = before.taken(message.model, wanted, message.ids)
            if self.current != before:
                publish()
            self._send(process, wire.SettingsAnswer(message.ticket, granted.count, traces=granted))

    def traced(self, models: Models) -> Models:
        """Return the registry's models with their trace settings. Usually no model is traced, and
        `models` is returned unchanged."""
        current = self.current
        if not current.trace.active and not current.models:
            return models
        traced: Models = {}
        for name, versions in models.items():
            settings = current.trace_of(name)
            trace = settings if settings.active else None
            traced[name] = {
                number: replace(entry, trace=trace) for number, entry in versions.items()
            }
        return traced
