"""The last things that went wrong, as a short list for people. Pure, and bounded.

Texts are fit for clients: they name models, instances, roles and reasons.
"""

from __future__ import annotations

from msgspec import Struct

LIMIT = 50
_TOGETHER_S = 60.0  # the same thing again within this is one entry
_MAX_TEXT = 300


class Incident(Struct, array_like=True):
    """`first` and `last`: seconds since 1970; `count`: how often in between."""

    first: float
    last: float
    what: str
    text: str
    count: int = 1


class Incidents:
    """The latest last."""

    def __init__(self) -> None:
        self._entries: list[Incident] = []

    def add(self, now: float, what: str, text: str, count: int = 1) -> None:
        """Something went wrong; `what` names the thing, `text` says what about it."""
        text = text[:_MAX_TEXT]
        for index, entry in enumerate(self._entries):
            if (entry.what, entry.text) == (what, text) and now - entry.last < _TOGETHER_S:
                entry.last, entry.count = now, entry.count + count
                self._entries.append(self._entries.pop(index))
                return
        self._entries.append(Incident(now, now, what, text, count))
        del self._entries[:-LIMIT]

    def list(self) -> tuple[Incident, ...]:
        return tuple(self._entries)
