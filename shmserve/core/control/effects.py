"""What the coordinator's decisions ask its shell to do: plain values, no I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Publish:
    """The registry has changed: publish it."""


@dataclass(frozen=True, slots=True)
class Desire:
    """The set of instances that should run has changed: tell the supervisor."""


@dataclass(frozen=True, slots=True)
class AnswerGrant:
    """Answer a process's request for pool budget."""

    process: str
    ticket: int
    granted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AskTrim:
    """Ask a process to give back up to `nbytes` of what it does not use."""

    process: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Tell an executor to finish and exit."""

    process: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Log a sentence for operators."""

    text: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Instances that are no more, and the files that were sent for them (empty: none)."""

    instances: tuple[str, ...]
    overrides: str


Effect = Publish | Desire | AnswerGrant | AskTrim | Dismiss | Report | Forget
