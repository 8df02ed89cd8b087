"""A process's last events as records of one size, written one by one. Pure: the file is elsewhere.

A ring has one writer and survives it. Records are written where older ones were, each with a
checksum: a reader takes what is whole, in the order of the records' numbers, and leaves out one
that was being written when its writer was killed. What happens again and again is one record that
counts, so a flood does not push out what led to it.

Texts name models, processes, settings and reasons: nothing that clients have sent.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping

from msgspec import Struct

_TOGETHER_S = 1.0  # the same thing again within this of the last time is the same record
_REMEMBERED = 64  # different things that are counted at a time

# Checksum of the rest, number (from 1), count, first and last time, kind, subject, text.
_LAYOUT = struct.Struct("<IQQdd28s64s128s")
_CHECKED = 4
RECORD_BYTES = _LAYOUT.size


class RecordedEvent(Struct):
    """Something that happened `count` times from `first` to `last` (seconds since 1970).

    `kind` is what it was, `subject` to whom or what, `text` says more: 28, 64 and 128 bytes.
    Only the process itself has an event's `fields` (of its log line) and `said` (the text that
    the client of a failed request was told): no file has them apart.
    """

    number: int
    first: float
    last: float
    kind: str
    subject: str
    text: str = ""
    count: int = 1
    said: str = ""
    fields: Mapping[str, object] = {}

    def again(self, now: float) -> None:
        """Count that the same thing has happened once more."""
        self.last = now
        self.count += 1


class EventRing:
    """The writer's side: says which bytes belong where, of `records` records."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._number = 0
        self._recent: OrderedDict[tuple[str, str, str], RecordedEvent] = OrderedDict()

    def add(self, now: float, kind: str, subject: str, text: str = "") -> tuple[int, bytes]:
        """Something happens: the offset in the file, and the record to be written there."""
        key = (kind, subject, text)
        event = self._recent.pop(key, None)
        if event is not None and now - event.last < _TOGETHER_S and self._has(event):
            event.again(now)
        else:
            self._number += 1
            event = RecordedEvent(self._number, now, now, kind, subject, text)
        self._recent[key] = event
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return (event.number - 1) % self._records * RECORD_BYTES, _encode(event)

    def _has(self, event: RecordedEvent) -> bool:
        return self._number - event.number < self._records


def decode(data: bytes) -> list[RecordedEvent]:
    """What a ring holds, by number; what is not whole is left out, whatever the bytes are."""
    events = []
    for begin in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        record = data[begin : begin + RECORD_BYTES]
        checksum, number, count, first, last, *texts = _LAYOUT.unpack(record)
        if checksum == zlib.crc32(record[_CHECKED:]):
            kind, subject, text = (t.rstrip(b"\0").decode(errors="ignore") for t in texts)
            events.append(RecordedEvent(number, first, last, kind, subject, text, count))
    return sorted(events, key=lambda event: event.number)


def _encode(event: RecordedEvent) -> bytes:
    """Longer texts are clipped by `struct`, and the half character that may be left by `decode`."""
    kind, subject, text = (_printable(t) for t in (event.kind, event.subject, event.text))
    record = _LAYOUT.pack(
        0, event.number, event.count, event.first, event.last, kind, subject, text
    )
    return zlib.crc32(record[_CHECKED:]).to_bytes(_CHECKED, "little") + record[_CHECKED:]


def _printable(text: str) -> bytes:
    clean = "".join(c if c.isprintable() else " " for c in text[:128])
    return clean.encode(errors="replace")
