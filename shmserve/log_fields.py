"""Fields of log lines: `key=value` behind a text line, keys of the object in JSON.

A log call names its fields beside its message:

    _log.info("draining", extra=log_fields(reason=reason))

LogFields lists every field that a log call may have, so mypy finds a misspelled name. An entry in
`_WRITTEN_AS` renames a field in log lines.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TypedDict, Unpack

ATTRIBUTE = "shmserve_fields"  # of a log record: a model's records, for one, may have `fields`
_WRITTEN_AS = {
    "nbytes": "bytes",
    "source": "from",
}  # name in log lines, where it differs from the argument's name


class LogFields(TypedDict, total=False):
    """Every field of a log line, by the name that log calls use."""

    address: str  # of a listener
    again: bool  # the coordinator was started before in this generation
    delay_s: float  # before a batch of spans that is not full is sent
    epoch: object
    error: object  # exception, or text
    exported: int  # spans, since the process started
    file: str  # name without folder
    generation: object
    instance: str
    limit_s: float
    lost: int  # spans, since the process started
    max_batch: int  # spans
    max_queue: int  # spans
    model: str
    models: str  # names, separated by commas
    name: str  # of a client's region
    nbytes: int
    path: str
    pid: int | None  # the line's subject
    pids: list[int]
    pool_bytes: int
    process: str  # the line's subject
    reason: object
    refused: int  # spans, since the process started
    request: str  # id of the request, as the client has it
    revision: int
    seconds: float  # of a load
    segments: int
    source: str  # address of a model repository
    status: object  # of an answer or of an ended process
    uid: int


def log_fields(**values: Unpack[LogFields]) -> dict[str, dict[str, object]]:
    """Return the argument `extra` of a log call with these fields."""
    return {ATTRIBUTE: {_WRITTEN_AS.get(name, name): value for name, value in values.items()}}


def with_fields(message: str, fields: Mapping[str, object]) -> str:
    """Return a message with fields as `key=value` behind it.

    Values that are not printable, or that could be taken for a field, are quoted.
    """
    return " ".join((message, *(f"{name}={_text(value)}" for name, value in fields.items())))


def iso_time(seconds: float) -> str:
    """Return a time since the epoch as ISO 8601, in UTC, with milliseconds."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def _text(value: object) -> str:
    text = str(value)
    return text if text.isprintable() and "=" not in text else repr(text)
