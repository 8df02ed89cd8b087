"""Logs: stderr, one line an event, who speaks in every line.

What is logged can be changed while a process runs (`apply`, for all processes by the
coordinator). One filter and one formatter do it, on every handler of the process, gunicorn's as
well: all processes write the same lines.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from shmserve.core.live_settings import LogSettings, initial_log
from shmserve.log_fields import ATTRIBUTE, with_fields
from shmserve.observe import log_output

TRACES = "shmserve.trace"  # its lines are wanted whatever the log settings say
TEXT, JSON = "text", "json"  # forms of a line
ACCESS_GRPC = "shmserve.access"
_ACCESS = "gunicorn.access"
_LIBRARIES = ("gunicorn.error",)  # loggers with handlers of their own
_EXTRA = ("request", "status")  # of any record: keys of the object beside its message
_encode = msgspec.json.Encoder(enc_hook=str).encode  # a field may be an exception


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
        if record.name in (TRACES, ACCESS_GRPC):
            return True
        if level >= logging.ERROR:
            return settings.error
        if level >= logging.WARNING:
            return settings.warning
        return settings.info if level >= logging.INFO else settings.verbose > 0


class _Line(logging.Formatter):
    """An event of any logger as one line (text, with a traceback below it where there is one) or as
    one object of JSON. Timestamps of text are in ISO 8601 and UTC where that is wanted."""

    def __init__(self, who: str = "", form: str = TEXT) -> None:
        super().__init__(
            f"%(asctime)s %(levelname)s {who.replace('%', '%%')} %(name)s: %(message)s"
        )
        self.form = form
        self._who = who

    def format(self, record: logging.LogRecord) -> str:
        if self.form != JSON:
            return super().format(record)
        fields = {name: getattr(record, name) for name in _EXTRA if hasattr(record, name)}
        fields |= _fields_of(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self.line(record.created, record.levelname, record.name, record.getMessage(), fields)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return with_fields(super().formatMessage(record), _fields_of(record))

    def printed(self, text: str) -> str:
        """What something has printed, like any other event; before `setup` as it is."""
        if self.form == TEXT and not self._who:
            return text
        return self.format(logging.LogRecord("stdout", logging.INFO, "", 0, "%s", (text,), None))

    def line(
        self, moment: float, level: str, logger: str, message: str, more: dict[str, object]
    ) -> str:
        """Return an object of JSON. Fields of `more` that it has itself get the prefix `other_`."""
        own = {
            "time": _iso(moment),
            "level": level.lower(),
            "process": self._who,
            "pid": os.getpid(),
            "logger": logger,
            "message": message,
        }
        fields = {f"other_{key}" if key in own else key: value for key, value in more.items()}
        return _encode(own | fields).decode()

    def formatTime(  # noqa: N802 (logging's name)
        self, record: logging.LogRecord, datefmt: str | None = None
    ) -> str:
        if _filter.settings.format != "ISO8601":
            return super().formatTime(record, datefmt)
        return _iso(record.created)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Return what `log_fields` has given to the log call."""
    fields: Mapping[str, object] = getattr(record, ATTRIBUTE, {})
    return fields


def _iso(moment: float) -> str:
    text = datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


_filter = _SettingsFilter()
_line = _Line()


def setup(who: str, level: str, line_format: str = "default", forks: bool = False) -> None:
    """Log to stderr.

    Args:
        who: the process's role, and instance if it has one.
        level: the setting `log_level`.
        line_format: the setting `log_format`.
        forks: this process may have no thread, and the supervisor writes its lines.
    """
    global _line
    _line = _Line(who, JSON if line_format == JSON else TEXT)
    log_output.begin(printed, forks)
    logging.basicConfig()
    for wanted in (TRACES, ACCESS_GRPC):
        logging.getLogger(wanted).setLevel(logging.INFO)
    if not _filter.final:
        _filter.use(initial_log(level, line_format), final=False)
    _install()


def apply(settings: LogSettings) -> None:
    """From now on this process logs so."""
    _filter.use(settings, final=True)
    _install()


def adopt() -> None:
    """There are other handlers now: they log as this process was set up to."""
    _install()


def printed(text: str) -> str:
    """A line that something has printed, as the log has it: a model's has its instance's name."""
    return _line.printed(text)


def _install() -> None:
    """On every handler there is."""
    for handler in logging.getLogger(_ACCESS).handlers:
        handler.setFormatter(_line)  # whoever wants it has it, whatever the log settings say
    for name in ("", *_LIBRARIES):
        logger = logging.getLogger(name)
        if not logger.handlers:
            continue
        logger.setLevel(_least(_filter.settings))
        for handler in logger.handlers:
            if _filter not in handler.filters:
                handler.addFilter(_filter)
            handler.setFormatter(_line)


def _least(settings: LogSettings) -> int:
    """The least level that anybody wants: what is below costs nothing."""
    if settings.verbose:
        return logging.DEBUG
    if settings.info:
        return logging.INFO
    return logging.WARNING if settings.warning else logging.ERROR
