"""What `shmserve doctor` has found, one line each."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Level = Literal["ok", "note", "warn", "FAIL"]


class Finding(Struct, frozen=True):
    """`todo`: what to do about it; empty: nothing."""

    level: Level
    subject: str
    text: str
    todo: str = ""

    def line(self) -> str:
        """As an operator reads it."""
        end = f"; {self.todo}" if self.todo else ""
        return f"{self.level:<5} {self.subject}: {self.text}{end}"
