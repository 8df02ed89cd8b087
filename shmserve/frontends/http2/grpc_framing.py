"""gRPC messages in DATA: a flag and a length of four bytes before each, wherever frames end."""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Protocol

import msgspec
import numpy as np

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
    """A whole message.

    Attributes:
        compressed: it is.
        data: a view of what was fed, or memory of its own.
        parts: what was received apart from `data`, as whoever received it says.
    """

    compressed: bool
    data: memoryview
    parts: Any = None


class MessageReceiver(Protocol):
    """Takes the bytes of one message, in order.

    Attributes:
        left: how many are to come.
    """

    @property
    def left(self) -> int: ...

    def space(self) -> memoryview | None:
        """Where the next bytes may be received; None: nowhere at the moment."""
        ...

    def filled(self, count: int) -> None:
        """So many were."""
        ...

    def feed(self, data: memoryview) -> None:
        """Bytes that were received elsewhere."""
        ...

    def stop_sparing(self) -> int:
        """Return how many bytes at the end of what was fed were not taken: they come again."""
        ...

    def message(self, compressed: bool) -> GrpcMessage | None:
        """Return the message, once nothing is left; None while it still wants memory."""
        ...

    def close(self) -> None:
        """Nobody wants the message."""
        ...


class WholeMessage:
    """Receives a message into one piece of memory."""

    __slots__ = ("_place", "left")

    def __init__(self, size: int) -> None:
        self._place = np.empty(size, np.uint8).data  # pages come with what is received
        self.left = size

    def space(self) -> memoryview:
        return self._place[-self.left :]

    def filled(self, count: int) -> None:
        self.left -= count

    def feed(self, data: memoryview) -> None:
        self.space()[: len(data)] = data
        self.left -= len(data)

    def stop_sparing(self) -> int:
        return 0

    def message(self, compressed: bool) -> GrpcMessage | None:
        return GrpcMessage(compressed, self._place)

    def close(self) -> None:
        """It has nothing to give back."""


def prefix(size: int, compressed: bool = False) -> bytes:
    """What goes before a message of `size` bytes."""
    return _prefix.pack(compressed, size)


class MessageReader:
    """Messages of one stream.

    One that has come entirely is told as a view. Another has a receiver as soon as its
    length is known, and the rest of it may be received where that says: `space`, then `filled`.

    Args:
        max_bytes: the largest message, without its prefix; compared before anything is allocated.
        compressed: whether messages may be compressed.
        receiver: makes one for so many bytes of a message, compressed or not, which may leave what
            is received elsewhere, or not (`MessageReceiver.stop_sparing`).

    Attributes:
        receiving: of the message that has begun.
    """

    __slots__ = ("_compressed", "_head", "_largest_flag", "_make", "_max_bytes", "receiving")

    def __init__(
        self,
        max_bytes: int,
        receiver: Callable[[int, bool, bool], MessageReceiver] | None = None,
        compressed: bool = True,
    ) -> None:
        self._max_bytes = max_bytes
        self._make = receiver
        self._largest_flag = int(compressed)
        self._head = b""  # a prefix that has not come entirely
        self.receiving: MessageReceiver | None = None
        self._compressed = False

    def feed(self, data: memoryview, sparing: bool = False) -> list[GrpcMessage]:
        """The messages that end with `data`. `sparing`: a new receiver may leave some of it.

        Raises:
            FramingFailed: a prefix is invalid, or says more than `max_bytes`.
        """
        messages: list[GrpcMessage] = []
        position, end = 0, len(data)
        receiver = self.receiving
        if receiver is not None:
            position = min(end, receiver.left)
            receiver.feed(data[:position])
            message = self.complete()
            if message is not None:
                messages.append(message)
        while position < end:
            position, size = self._take_prefix(data, position, end)
            if size < 0:
                break
            if end - position >= size:
                messages.append(GrpcMessage(self._compressed, data[position : position + size]))
                position += size
                continue
            make = self._make
            self.receiving = make(size, self._compressed, sparing) if make else WholeMessage(size)
            self.receiving.feed(data[position:])
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
        if flag > self._largest_flag:
            if flag > 1:
                raise FramingFailed(INTERNAL, f"the compressed flag of a message is {flag}")
            reason = "compressed flag set with identity or empty encoding"  # the specification's
            raise FramingFailed(INTERNAL, reason)
        if size > self._max_bytes:
            raise FramingFailed(
                RESOURCE_EXHAUSTED,
                f"Received message larger than max ({size} vs. {self._max_bytes})",  # gRPC's words
            )
        self._compressed = flag == 1
        return position, size

    def space(self) -> memoryview | None:
        """Where the next bytes belong, if they are of a message that has begun."""
        return None if self.receiving is None else self.receiving.space()

    def filled(self, count: int) -> GrpcMessage | None:
        """So many bytes are in `space` now; the message, if it is complete."""
        receiver = self.receiving
        if receiver is None or count > receiver.left:
            raise ValueError(f"there is no space for {count} bytes")
        receiver.filled(count)
        message = None if receiver.left else receiver.message(self._compressed)
        if message is not None:
            self.receiving = None
        return message

    def complete(self) -> GrpcMessage | None:
        """The message that has begun, if nothing of it is left."""
        receiver = self.receiving
        message = None
        if receiver is not None and not receiver.left:
            message = receiver.message(self._compressed)
            if message is not None:
                self.receiving = None
        return message

    def close(self) -> None:
        """No message is wanted any more."""
        if self.receiving is not None:
            self.receiving.close()

    def finish(self) -> None:
        """The stream has ended.

        Raises:
            FramingFailed: within a message.
        """
        if self._head or self.receiving is not None:
            raise FramingFailed(INTERNAL, "the request ends within a message")
