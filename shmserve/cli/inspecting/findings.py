"""Findings of `shmserve doctor`, printed as a line each."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Level = Literal["ok", "note", "warn", "FAIL"]


class Finding(Struct, frozen=True):
    """Finding about the host.

    Attributes:
        todo: advice for the operator; empty: none.
    """

    level: Level
    subject: str
    text: str
    todo: str = ""

    def line(self) -> str:
        """Return the printed line."""
        end = f"; {self.todo}" if self.todo else ""
        return f"{self.level:<5} {self.subject}: {self.text}{end}"
