"""gRPC messages in DATA: a flag and a length of four bytes before each, wherever frames end."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct

import msgspec

PREFIX_BYTES = 5
RESOURCE_EXHAUSTED = 8
INTERNAL = 13

_prefix = Struct(">BL")


class FramingFailed(Exception):
    """What the client sent is no message that we take.

    Args:
        status: the gRPC status to end the call with.
        reason: its message.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class GrpcMessage(msgspec.Struct, frozen=True, gc=False):
    """A whole message; `data` is a view of what was fed, or the memory that was allocated."""

    compressed: bool
    data: memoryview


def _allocate(size: int) -> memoryview:
    return memoryview(bytearray(size))


def prefix(size: int, compressed: bool = False) -> bytes:
    """What goes before a message of `size` bytes."""
    return _prefix.pack(compressed, size)


class MessageReader:
    """Messages of one stream.

    One that has come entirely is told as a view. Of another, the place is allocated as soon as its
    length is known, and the rest of it may be received there: `space`, then `filled`.

    Args:
        max_bytes: the largest message, without its prefix; compared before anything is allocated.
        allocate: gives writable memory of so many bytes, flat.
    """

    __slots__ = ("_allocate", "_compressed", "_filled", "_head", "_max_bytes", "_place")

    def __init__(self, max_bytes: int, allocate: Callable[[int], memoryview] = _allocate) -> None:
        self._max_bytes = max_bytes
        self._allocate = allocate
        self._head = b""  # a prefix that has not come entirely
        self._place: memoryview | None = None
        self._filled = 0
        self._compressed = False

    def feed(self, data: memoryview) -> list[GrpcMessage]:
        """The messages that end with `data`.

        Raises:
            FramingFailed: a prefix is invalid, or says more than `max_bytes`.
        """
        messages: list[GrpcMessage] = []
        position, end = 0, len(data)
        if self._place is not None:
            position = min(end, len(self._place) - self._filled)
            self._place[self._filled : self._filled + position] = data[:position]
            done = self.filled(position)
            if done is not None:
                messages.append(done)
        while position < end:
            position, size = self._take_prefix(data, position, end)
            if size < 0:
                break
            if end - position >= size:
                messages.append(GrpcMessage(self._compressed, data[position : position + size]))
                position += size
                continue
            self._place = self._allocate(size)
            self._filled = end - position
            self._place[: self._filled] = data[position:]
            break
        return messages

    def _take_prefix(self, data: memoryview, position: int, end: int) -> tuple[int, int]:
        """Where the message begins and its size; -1 if that is not known yet."""
        if self._head or end - position < PREFIX_BYTES:
            take = min(PREFIX_BYTES - len(self._head), end - position)
            self._head += data[position : position + take]
            position += take
            if len(self._head) < PREFIX_BYTES:
                return position, -1
            flag, size = _prefix.unpack(self._head)
            self._head = b""
        else:
            flag, size = _prefix.unpack_from(data, position)
            position += PREFIX_BYTES
        if flag > 1:
            raise FramingFailed(INTERNAL, f"the compressed flag of a message is {flag}")
        if size > self._max_bytes:
            raise FramingFailed(
                RESOURCE_EXHAUSTED,
                f"Received message larger than max ({size} vs. {self._max_bytes})",  # gRPC's words
            )
        self._compressed = flag == 1
        return position, size

    def space(self) -> memoryview | None:
        """Where the next bytes belong, if they are of a message that has begun."""
        return None if self._place is None else self._place[self._filled :]

    def filled(self, count: int) -> GrpcMessage | None:
        """So many bytes are in `space` now; the message, if it is complete."""
        place = self._place
        if place is None or count > len(place) - self._filled:
            raise ValueError(f"there is no space for {count} bytes")
        self._filled += count
        if self._filled < len(place):
            return None
        self._place = None
        return GrpcMessage(self._compressed, place)

    def finish(self) -> None:
        """The stream has ended.

        Raises:
            FramingFailed: within a message.
        """
        if self._head or self._place is not None:
            raise FramingFailed(INTERNAL, "the request ends within a message")
