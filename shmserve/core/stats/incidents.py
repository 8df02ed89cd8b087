"""The last things that went wrong, as a short list for people. Pure, and bounded.

Texts are fit for clients: they name models, instances, roles and reasons. What `said` has was told
to one client, and is for those who may see the log (`core.access.Access.sees_errors`).
"""

from __future__ import annotations

from math import inf

from msgspec import Struct

LIMIT = 50
_TOGETHER_S = 60.0  # the same thing again within this is one entry
_SAID_S = 5.0  # what was said belongs to an entry that comes within this
_MAX_TEXT = 300


class Incident(Struct, array_like=True):
    """`first` and `last`: seconds since 1970; `count`: how often in between; `said`: what the last
    client was told, of requests."""

    first: float
    last: float
    what: str
    text: str
    count: int = 1
    said: str = ""


class Incidents:
    """The latest last."""

    def __init__(self) -> None:
        self._entries: list[Incident] = []
        # Of entries that are yet to come: when, and what
        self._said: dict[tuple[str, str], tuple[float, str]] = {}

    def add(self, now: float, what: str, text: str, count: int = 1) -> None:
        """Something went wrong; `what` names the thing, `text` says what about it."""
        text = text[:_MAX_TEXT]
        for index, entry in enumerate(self._entries):
            if (entry.what, entry.text) == (what, text) and now - entry.last < _TOGETHER_S:
                entry.last, entry.count = now, entry.count + count
                self._entries.append(self._entries.pop(index))
                break
        else:
            self._entries.append(Incident(now, now, what, text, count))
        at, said = self._said.pop((what, text), (-inf, ""))
        if now - at < _SAID_S:
            self._entries[-1].said = said
        del self._entries[:-LIMIT]

    def say(self, now: float, what: str, text: str, said: str) -> None:
        """What the last client was told about this. It is counted separately, and may be told here
        before the entry is there, or after."""
        said = said[:_MAX_TEXT]
        for entry in reversed(self._entries):
            if (entry.what, entry.text) == (what, text) and now - entry.last < _TOGETHER_S:
                entry.said = said
                return
        self._said[what, text] = now, said
        while len(self._said) > LIMIT:
            del self._said[next(iter(self._said))]

    def list(self) -> tuple[Incident, ...]:
        return tuple(self._entries)
