"""Logs: stderr, one line an event, who speaks in every line.

What is logged can be changed while a process runs (`apply`, for all processes by the
coordinator). One filter and one formatter do it, on every handler of the process,
gunicorn's as well.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime

from shmserve.core.control.runtime_settings import LogSettings, initial_log
from shmserve.observe.log_stream import DroppingStream

TRACES = "shmserve.trace"  # its lines are wanted whatever the log settings say
_LIBRARIES = ("gunicorn.error",)  # loggers with handlers of their own


class _SettingsFilter(logging.Filter):
    """Lets through what the settings want.

    Attributes:
        settings: those of this process, now.
        final: they are the coordinator's, whose word counts from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings = LogSettings()
        self.final = False

    def use(self, settings: LogSettings, final: bool) -> None:
        self.settings = settings
        self.final = final

    def filter(self, record: logging.LogRecord) -> bool:
        settings, level = self.settings, record.levelno
        if record.name == TRACES:
            return True
        if level >= logging.ERROR:
            return settings.error
        if level >= logging.WARNING:
            return settings.warning
        return settings.info if level >= logging.INFO else settings.verbose > 0


class _Stamped(logging.Formatter):
    """Another formatter's lines, with timestamps in ISO 8601 and UTC where that is wanted."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__(inner._fmt, inner.datefmt)
        self._inner = inner

    def formatTime(  # noqa: N802 (logging's name)
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        if _filter.settings.format != "ISO8601":
            return self._inner.formatTime(record, datefmt)
        moment = datetime.fromtimestamp(record.created, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_filter = _SettingsFilter()


def setup(who: str, level: str, line_format: str = "default") -> None:
    """Log to stderr. `who`: the process's role, and instance if it has one."""
    logging.basicConfig(
        format=f"%(asctime)s %(levelname)s {who.replace('%', '%%')} %(name)s: %(message)s",
    )
    logging.getLogger(TRACES).setLevel(logging.INFO)
    if not _filter.final:
        _filter.use(initial_log(level, line_format), final=False)
    _never_wait()
    _install()


def _never_wait() -> None:
    """Whoever reads this process's output may stop: refusals and restarts must go on."""
    streams: dict[object, DroppingStream] = {}
    for name in ("", *_LIBRARIES, "gunicorn.access"):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (
                sys.__stderr__,
                sys.__stdout__,
            ):
                below = handler.stream
                if below not in streams:
                    streams[below] = DroppingStream(below)
                handler.setStream(streams[below])


def apply(settings: LogSettings) -> None:
    """From now on this process logs so."""
    _filter.use(settings, final=True)
    _install()


def _install() -> None:
    """On every handler there is."""
    for name in ("", *_LIBRARIES):
        logger = logging.getLogger(name)
        if not logger.handlers:
            continue
        logger.setLevel(_least(_filter.settings))
        for handler in logger.handlers:
            if _filter not in handler.filters:
                handler.addFilter(_filter)
            inner = handler.formatter or logging.Formatter()
            if not isinstance(inner, _Stamped):
                handler.setFormatter(_Stamped(inner))


def _least(settings: LogSettings) -> int:
    """The least level that anybody wants: what is below costs nothing."""
    if settings.verbose:
        return logging.DEBUG
    if settings.info:
        return logging.INFO
    return logging.WARNING if settings.warning else logging.ERROR
