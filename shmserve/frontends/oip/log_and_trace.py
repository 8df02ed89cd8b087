"""Trace and logging extensions: settings that clients change while the server runs.

Trace values are lists of strings over gRPC, strings or lists over HTTP; both forms are accepted. A
null or empty value clears a trace setting. A null value leaves a log setting unchanged. Unknown
settings are refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from shmserve.config import Settings
from shmserve.core import live_settings
from shmserve.errors import InvalidArgument, Unimplemented
from shmserve.frontends.dispatch_api import DispatchApi

_LARGEST = (1 << 31) - 1
_SHOWN = 64
_LOG_FLAGS = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
_LOG_SETTINGS = {*_LOG_FLAGS, "log_file", "log_verbose_level", "log_format"}
# The fields of `TraceChange` for each setting
_TRACE_NAMES = {
    "trace_level": ("on", "tensors"),
    "trace_rate": ("rate",),
    "trace_count": ("count",),
    "log_frequency": ("log_frequency",),
}
_LEVELS = ("OFF", "TIMESTAMPS", "TENSORS")

TraceValue = list[str] | str | None
LogValue = bool | int | str


class ServerSettings:
    """Reader and editor of the log and trace settings, for any transport."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._initial = live_settings.initial(settings)
        self._file = os.path.basename(settings.trace_file)  # clients do not learn the folder
        self._mode = settings.trace_mode
        self._checks = _trace_checks(self._mode)

    def trace(
        self, model: str = "", update: Mapping[str, TraceValue] | None = None
    ) -> dict[str, list[str] | str]:
        """Return the trace settings of a model, or of all models, after applying the update if
        given. Raise InvalidArgument for an unknown model, setting or value. Raise Unimplemented for
        a value that Triton supports and this server does not."""
        if model and model not in self._dispatcher.snapshot().models:
            raise InvalidArgument(f"Request for unknown model : {model}")
        if update:
            change = _trace_change(update, self._checks)
            if not self._file and (change.log_frequency or change.tensors):
                feature = "trace level 'TENSORS'" if change.tensors else "'log_frequency'"
                raise Unimplemented(f"{feature} is not supported: there is no setting trace_file")
            self._dispatcher.coordinator.change_trace(model, change)
        settings = self._tuning().trace_of(model)
        return {
            "trace_level": settings.levels,
            "trace_rate": str(settings.rate),
            "trace_count": str(settings.count),
            "log_frequency": str(settings.log_frequency),
            "trace_file": self._file,
            "trace_mode": self._mode,
        }

    def logging(self, update: Mapping[str, LogValue | None] | None = None) -> dict[str, LogValue]:
        """Return the log settings of all processes of the server, after applying the update if
        given. Raise InvalidArgument for an unknown setting or value. Raise Unimplemented for a
        value that Triton supports and this server does not."""
        if update:
            self._dispatcher.coordinator.change_log(_log_change(update))
        log = self._tuning().log
        return {
            "log_file": "",
            "log_info": log.info,
            "log_warning": log.warning,
            "log_error": log.error,
            "log_verbose_level": log.verbose,
            "log_format": log.format,
        }

    def _tuning(self) -> live_settings.RuntimeSettings:
        return self._dispatcher.snapshot().tuning or self._initial


# ------------------------------------------------------------------------- logging


def _log_change(update: Mapping[str, Any]) -> live_settings.LogChange:
    changes: dict[str, Any] = {}
    for name, value in update.items():
        if name not in _LOG_SETTINGS:
            raise InvalidArgument(f"there is no log setting '{ascii(name[:_SHOWN])[1:-1]}'")
        if value is None:
            continue
        if name == "log_file":
            raise Unimplemented("log file location can not be updated through network protocol")
        if name in _LOG_FLAGS:
            if not isinstance(value, bool):
                raise InvalidArgument(f"'{name}' must be true or false, got {_shown(value)}")
            changes[_LOG_FLAGS[name]] = value
        elif name == "log_verbose_level":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
                raise InvalidArgument(
                    f"'log_verbose_level' must be an integer from 0, got {_shown(value)}"
                )
            changes["verbose"] = value
        else:
            if value not in live_settings.LOG_FORMATS:
                raise InvalidArgument(
                    f"'log_format' must be one of {', '.join(live_settings.LOG_FORMATS)}, "
                    f"got {_shown(value)}"
                )
            changes["format"] = value
    return live_settings.LogChange(**changes)


# ------------------------------------------------------------------------- tracing


_Check = Callable[[str, Any], tuple[Any, ...]]


def _trace_checks(mode: str) -> dict[str, _Check]:
    """Return the check of each setting's value, for a server started in the trace mode `mode`."""
    return {
        "trace_level": _level,
        "trace_rate": _number(0 if mode == "opentelemetry" else 1),
        "trace_count": _number(live_settings.UNLIMITED),
        "log_frequency": _number(0),
        "trace_mode": _same(mode),
    }


def _trace_change(
    update: Mapping[str, Any], checks: Mapping[str, _Check]
) -> live_settings.TraceChange:
    changes: dict[str, Any] = {}
    cleared: list[str] = []
    for name, value in update.items():
        if name == "trace_file":
            raise Unimplemented("trace file location can not be updated through network protocol")
        check = checks.get(name)
        if check is None:
            raise InvalidArgument(f"there is no trace setting '{ascii(name[:_SHOWN])[1:-1]}'")
        fields = _TRACE_NAMES.get(name, ())
        if value is None or value == []:
            cleared += fields
        else:
            changes.update(zip(fields, check(name, value), strict=True))
    return live_settings.TraceChange(**changes, cleared=tuple(cleared))


def _level(name: str, value: Any) -> tuple[bool, bool]:
    levels = value if isinstance(value, list) else [value]
    for level in levels:
        if level in ("MIN", "MAX"):
            raise Unimplemented(f"trace level '{level}' is not supported: {' or '.join(_LEVELS)}")
        if level not in _LEVELS:
            raise InvalidArgument(
                f"'{name}' must be one of {', '.join(_LEVELS)}, got {_shown(level)}"
            )
    if "OFF" in levels and len(set(levels)) > 1:
        raise InvalidArgument(f"'{name}' cannot be OFF together with other levels")
    return "TIMESTAMPS" in levels, "TENSORS" in levels


def _number(least: int) -> Callable[[str, Any], tuple[int]]:
    def check(name: str, value: Any) -> tuple[int]:
        text = _single(name, value)
        try:
            number = int(text) if len(text) <= 11 else None
        except ValueError:
            number = None
        if number is None or not least <= number <= _LARGEST:
            raise InvalidArgument(
                f"'{name}' must be an integer from {least} to {_LARGEST}, got {_shown(text)}"
            )
        return (number,)

    return check


def _same(mode: str) -> _Check:
    def check(name: str, value: Any) -> tuple[()]:
        requested = _single(name, value)
        if requested != mode:  # the mode is fixed when the server starts
            raise Unimplemented(f"trace mode {_shown(requested)} is not supported: {mode}")
        return ()

    return check


def _single(name: str, value: Any) -> str:
    """Return the only string of a value: the value, or the single item of a list, as over gRPC."""
    item = value[0] if isinstance(value, list) and len(value) == 1 else value
    if not isinstance(item, str):
        raise InvalidArgument(f"'{name}' must be a string, got {_shown(value)}")
    return item


def _shown(value: Any) -> str:
    return repr(value)[:_SHOWN]
