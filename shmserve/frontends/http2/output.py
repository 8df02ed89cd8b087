"""Bytes on their way out, as a list of buffers, and whose memory they are."""

from __future__ import annotations

from collections import deque

from shmserve.frontends.http2.frames import Buffer

_IOV_MAX = 1024  # what Linux takes in one sendmsg


class OutgoingBytes:
    """What has been framed and not been sent.

    A token stands for the memory behind some buffers. It is told by `released` exactly once, when
    the last of them has been sent or will never be.
    """

    __slots__ = ("_marks", "_position", "answered", "parts", "pending", "released")

    def __init__(self) -> None:
        self.parts: list[Buffer] = []
        self.pending = 0  # bytes in `parts`
        self.answered = False  # HEADERS or DATA went out since this was cleared
        self.released: list[object] = []
        self._position = 0  # bytes sent ever
        self._marks: deque[tuple[int, object]] = deque()

    def add(self, part: Buffer) -> None:
        self.parts.append(part)
        self.pending += len(part)

    def mark(self, token: object) -> None:
        """`token` is free once all that has been added up to now is sent."""
        if not self.pending:
            self.released.append(token)
            return
        self._marks.append((self._position + self.pending, token))

    def take(self) -> list[Buffer]:
        """Buffers for one sendmsg, valid until `sent`."""
        return self.parts if len(self.parts) <= _IOV_MAX else self.parts[:_IOV_MAX]

    def sent(self, count: int) -> None:
        """That many bytes of `take` are gone."""
        self.pending -= count
        self._position += count
        if not self.pending:
            self.parts.clear()
        else:
            self._trim(count)
        marks = self._marks
        while marks and marks[0][0] <= self._position:
            self.released.append(marks.popleft()[1])

    def _trim(self, count: int) -> None:
        parts = self.parts
        index = 0
        while count >= len(parts[index]):
            count -= len(parts[index])
            index += 1
        if count:
            parts[index] = memoryview(parts[index])[count:]
        del parts[:index]

    def discard(self) -> None:
        """Nothing will be sent any more."""
        self.parts.clear()
        self.pending = 0
        self.released.extend(token for _, token in self._marks)
        self._marks.clear()
