"""Logs: written to stderr, one line per event, with the speaker's name in every line.

Log settings can change while a process runs (`apply`; the coordinator changes the settings of all
processes). The same filters and one formatter serve every handler of the process, including
gunicorn's, so all processes write lines of the same form and within the same limits.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from shmserve.core.live_settings import LogSettings, initial_log
from shmserve.log_fields import ATTRIBUTE, iso_time, with_fields
from shmserve.observe import log_output
from shmserve.observe.line_limit import LineLimit

TRACES = "shmserve.trace"  # logger of traces, not subject to the log settings
TEXT, JSON = "text", "json"  # forms of a line
ACCESS_GRPC = "shmserve.access"
_ACCESS = "gunicorn.access"
_LIBRARIES = ("gunicorn.error",)  # loggers with handlers of their own
_EXTRA = ("request", "status")  # attributes of any record that become keys of the JSON object
JSON_FIELDS = "shmserve_json"  # attribute of records with keys that text has in its message
_encode = msgspec.json.Encoder(enc_hook=str).encode  # a field may be an exception


class _SettingsFilter(logging.Filter):
    """Filter for records, by the log settings. `settings`: present log settings of this process.
    `final`: the settings come from the coordinator and take precedence from now on."""

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
    """Formatter of all loggers: one line of text per event, or one JSON object.

    In text form, a traceback follows the line. Timestamps of text are in ISO 8601 and UTC if the
    settings say so.
    """

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
        fields |= {**_fields_of(record), **getattr(record, JSON_FIELDS, {})}
        if record.name == _ACCESS and isinstance(record.args, Mapping):
            fields |= _request_fields(record.args)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self.line(record.created, record.levelname, record.name, record.getMessage(), fields)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        return with_fields(super().formatMessage(record), _fields_of(record))

    def printed(self, text: str) -> str:
        """Return printed text in the form of an event, or unchanged before `setup`."""
        if self.form == TEXT and not self._who:
            return text
        return self.format(logging.LogRecord("stdout", logging.INFO, "", 0, "%s", (text,), None))

    def line(
        self, moment: float, level: str, logger: str, message: str, more: dict[str, object]
    ) -> str:
        """Return a JSON object. Keys of `more` that the object has get the prefix `other_`."""
        own = {
            "time": iso_time(moment),
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
        return iso_time(record.created)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """Return the fields that `log_fields` gave to the log call."""
    fields: Mapping[str, object] = getattr(record, ATTRIBUTE, {})
    return fields


def _request_fields(atoms: Mapping[str, Any]) -> dict[str, object]:
    """Return the fields of an HTTP request's line. `atoms`: parts of the line by gunicorn's names;
    "-" stands for a missing part."""
    uri = str(atoms["r"]).split(" ")[1]
    answered = atoms["{x-request-id}o"]
    request = answered if answered != "-" else atoms["{x-request-id}i"]
    fields: dict[str, object] = {
        "method": atoms["m"],
        "path": uri.partition("?")[0],
        "status": int(atoms["s"]),
        "duration_ms": atoms["D"] / 1000,
        "bytes": atoms["B"] or 0,
        "client": atoms["h"],
    }
    return fields if request == "-" else {**fields, "request": request}


_filter = _SettingsFilter()
limit = LineLimit((TRACES, ACCESS_GRPC))
_line = _Line()


def setup(who: str, level: str, line_format: str = "default", forks: bool = False) -> None:
    """Set up logging to stderr.

    Args:
        who: role of the process, with the instance if any.
        level: the setting `log_level`.
        line_format: the setting `log_format`.
        forks: this process may have no thread, and the supervisor writes its lines.
    """
    global _line
    _line = _Line(who, JSON if line_format == JSON else TEXT)
    limit.begin(threads=not forks)
    log_output.begin(printed, forks, limit.tell)
    logging.basicConfig()
    for name in (TRACES, ACCESS_GRPC):
        logging.getLogger(name).setLevel(logging.INFO)
    if not _filter.final:
        _filter.use(initial_log(level, line_format), final=False)
    adopt()


def apply(settings: LogSettings) -> None:
    """Log by these settings from now on."""
    _filter.use(settings, final=True)
    adopt()


def printed(text: str) -> str:
    """Return a printed text in the form of a log line. A model's line has its instance's name."""
    return _line.printed(text)


def adopt() -> None:
    """Set filters and formatter on every handler, also on handlers added since `setup`."""
    for handler in logging.getLogger(_ACCESS).handlers:
        handler.setFormatter(_line)  # no filter: the setting `access_log` alone switches this log
    for name in ("", *_LIBRARIES):
        logger = logging.getLogger(name)
        if not logger.handlers:
            continue
        logger.setLevel(_least(_filter.settings))
        for handler in logger.handlers:
            for each in (_filter, limit):  # addFilter knows filters that are there
                handler.addFilter(each)
            handler.setFormatter(_line)


def _least(settings: LogSettings) -> int:
    """Return the lowest level that any setting asks for. Lower levels cost nothing."""
    if settings.verbose:
        return logging.DEBUG
    if settings.info:
        return logging.INFO
    return logging.WARNING if settings.warning else logging.ERROR
