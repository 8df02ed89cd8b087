"""Event ring: a process's latest events as records of one size. Pure: another module handles the
file.

A ring has one writer, and remains readable after the writer's death. New records overwrite the
oldest, each with a checksum. A reader takes intact records in order of their numbers, and skips a
record whose writer was killed while writing. Repeated events share a record with a count, so a
flood does not push out the events that led to it.

Texts name models, processes, settings and reasons: no data from clients.
"""

import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping

from msgspec import Struct

_TOGETHER_S = 1.0  # repetitions within this time after the last share its record
_REMEMBERED = 64  # different events that are counted at a time

# Checksum of the rest, number (from 1), count, first and last time, kind, subject, text.
_LAYOUT = struct.Struct("<IQQdd28s64s128s")
_CHECKED = 4
RECORD_BYTES = _LAYOUT.size


class RecordedEvent(Struct):
    """Event that happened `count` times from `first` to `last` (seconds since 1970).

    Attributes:
        kind: kind of event, up to 28 bytes.
        subject: affected process, model or other object, up to 64 bytes.
        text: details, up to 128 bytes.
        said: error text sent to the client of a failed request. Only in the process, not in the
            file.
        fields: fields of the event's log line. Only in the process, not in the file.
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


class EventRing:
    """Writer's side of a ring of `records` records: decides which bytes belong where."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._number = 0
        self._recent: OrderedDict[tuple[str, str, str], RecordedEvent] = OrderedDict()

    def add(self, now: float, kind: str, subject: str, text: str = "") -> tuple[int, bytes]:
        """Add an event. Return the offset in the file, and the record to write there."""
        key = (kind, subject, text)
        event = self._recent.pop(key, None)
        is_there = event is not None and self._number - event.number < self._records
        if event is not None and is_there and now - event.last < _TOGETHER_S:
            event.last = now
            event.count += 1
        else:
            self._number += 1
            event = RecordedEvent(self._number, now, now, kind, subject, text)
        self._recent[key] = event
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        return (event.number - 1) % self._records * RECORD_BYTES, _encode(event)


def decode(data: bytes) -> list[RecordedEvent]:
    """Return the events of a ring by number. Skips damaged records; any bytes are accepted."""
    events = []
    for begin in range(0, len(data) - RECORD_BYTES + 1, RECORD_BYTES):
        record = data[begin : begin + RECORD_BYTES]
        checksum, number, count, first, last, *texts = _LAYOUT.unpack(record)
        if checksum == zlib.crc32(record[_CHECKED:]):
            kind, subject, text = (t.rstrip(b"\0").decode(errors="ignore") for t in texts)
            events.append(RecordedEvent(number, first, last, kind, subject, text, count))
    return sorted(events, key=lambda event: event.number)


def _encode(event: RecordedEvent) -> bytes:
    """Return the record of an event. `struct` clips longer texts; `decode` drops a character cut
    in half."""
    kind, subject, text = (_printable(t) for t in (event.kind, event.subject, event.text))
    record = _LAYOUT.pack(
        0, event.number, event.count, event.first, event.last, kind, subject, text
    )
    return zlib.crc32(record[_CHECKED:]).to_bytes(_CHECKED, "little") + record[_CHECKED:]


def _printable(text: str) -> bytes:
    clean = "".join(c if c.isprintable() else " " for c in text[:128])
    return clean.encode(errors="replace")
