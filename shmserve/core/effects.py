"""What the coordinator's decisions ask its shell to do: plain values, no I/O."""

from __future__ import annotations

from msgspec import Struct

from shmserve.log_fields import LogFields

CANNOT_BE_LOADED = "model cannot be loaded"


class Publish(Struct, frozen=True):
    """The registry has changed: publish it."""


class Desire(Struct, frozen=True):
    """The set of instances that should run has changed: tell the supervisor."""


class AnswerGrant(Struct, frozen=True):
    """Answer a process's request for pool budget."""

    process: str
    ticket: int
    granted: bool
    reason: str = ""


class AskTrim(Struct, frozen=True):
    """Ask a process to give back up to `nbytes` of what it does not use."""

    process: str
    nbytes: int


class Dismiss(Struct, frozen=True):
    """Tell an executor to finish and exit."""

    process: str
    reason: str


class LogForOperators(Struct, frozen=True):
    """Log a sentence for operators."""

    text: str
    fields: LogFields = LogFields()


def given_up(instance: str, reason: str) -> LogForOperators:
    """Return the log line of an instance that will not be tried again."""
    return LogForOperators(CANNOT_BE_LOADED, LogFields(instance=instance, reason=reason))


class Forget(Struct, frozen=True):
    """Instances that are no more, and the files that were sent for them (empty: none)."""

    instances: tuple[str, ...]
    overrides: str


Effect = Publish | Desire | AnswerGrant | AskTrim | Dismiss | LogForOperators | Forget
