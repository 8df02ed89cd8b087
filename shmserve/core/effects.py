"""Effects: the coordinator's decisions, to be carried out by its shell. Plain values, no I/O."""

from msgspec import Struct

from shmserve.log_fields import LogFields

CANNOT_BE_LOADED = "model cannot be loaded"


class Publish(Struct, frozen=True):
    """The registry has changed: publish it."""


class Desire(Struct, frozen=True):
    """The set of desired instances has changed: tell the supervisor."""


class AnswerGrant(Struct, frozen=True):
    """Answer a process's request for pool budget."""

    process: str
    ticket: int
    granted: bool
    reason: str = ""


class AskTrim(Struct, frozen=True):
    """Ask a process to give back up to `nbytes` of unused memory."""

    process: str
    nbytes: int


class Dismiss(Struct, frozen=True):
    """Tell an executor to finish and exit."""

    process: str
    reason: str


class DropEndpoint(Struct, frozen=True):
    """Remove the socket of an executor that no supervisor knows, if the executor has ended."""

    process: str
    pid: int


class LogForOperators(Struct, frozen=True):
    """Log a sentence for operators."""

    text: str
    fields: LogFields = LogFields()


def given_up(instance: str, reason: str) -> LogForOperators:
    """Return the log line for an instance without further load attempts."""
    return LogForOperators(CANNOT_BE_LOADED, LogFields(instance=instance, reason=reason))


class Forget(Struct, frozen=True):
    """Forget ended instances, and the files of their load request (empty: no files)."""

    instances: tuple[str, ...]
    overrides: str


Effect = (
    Publish | Desire | AnswerGrant | AskTrim | Dismiss | DropEndpoint | LogForOperators | Forget
)
