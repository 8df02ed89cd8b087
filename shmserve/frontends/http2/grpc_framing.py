"""Messages of gRPC in DATA frames: each has a prefix of a flag and a length of four bytes.

Messages may begin and end anywhere in frames.
"""

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
    """The client's bytes are no acceptable message. `status`: gRPC status that ends the call.
    `reason`: text for the client."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class GrpcMessage(msgspec.Struct, frozen=True, gc=False):
    """A whole message. `compressed`: whether the message is compressed. `data`: a view of the fed
    bytes, or memory of the message. `parts`: parts received outside `data`, in the form of the
    receiver."""

    compressed: bool
    data: memoryview
    parts: Any = None


class MessageReceiver(Protocol):
    """Takes the bytes of one message, in order. `left`: bytes of the message still to come."""

    @property
    def left(self) -> int: ...

    def space(self) -> memoryview | None:
        """Return memory to receive the next bytes into; None if there is none at the moment."""
        ...

    def filled(self, count: int) -> None:
        """Note that `count` bytes were received into `space`."""
        ...

    def feed(self, data: memoryview) -> None:
        """Take bytes that were received elsewhere."""
        ...

    def stop_sparing(self) -> int:
        """Stop leaving bytes. Return the number of bytes left at the end of the fed data, which
        the caller delivers again."""
        ...

    def message(self, compressed: bool) -> GrpcMessage | None:
        """Return the message once `left` is 0; None while the receiver waits for memory."""
        ...

    def close(self) -> None:
        """Discard the message."""
        ...


class WholeMessage:
    """Receives a message into one piece of memory."""

    __slots__ = ("_place", "left")

    def __init__(self, size: int) -> None:
        # not zeroed: pages are allocated as bytes arrive
        self._place = np.empty(size, np.uint8).data
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
        """Do nothing: there is nothing to give back."""


def prefix(size: int, compressed: bool = False) -> bytes:
    """Return the prefix of a message of `size` bytes."""
    return _prefix.pack(compressed, size)


class MessageReader:
    """Reader of one stream's messages.

    A message that is fed whole is returned as a view. Any other message gets a receiver as soon as
    its length is known. The rest of the message may be received straight into the receiver's
    memory: `space`, then `filled`.

    Args:
        max_bytes: largest message, without its prefix; checked before memory is allocated.
        compressed: whether messages may be compressed.
        receiver: makes a receiver of a message. Its arguments: bytes of the message; whether the
            message is compressed; whether the receiver may leave bytes to be received again
            elsewhere (`MessageReceiver.stop_sparing`).

    Attributes:
        receiving: receiver of the current message; None between messages.
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
        self._head = b""  # start of an incomplete prefix
        self.receiving: MessageReceiver | None = None
        self._compressed = False

    def feed(self, data: memoryview, sparing: bool = False) -> list[GrpcMessage]:
        """Return the messages that end within `data`. `sparing`: whether a new receiver may leave
        bytes of `data`. Raise FramingFailed if a prefix is invalid, or announces more than
        `max_bytes`."""
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
        """Return the message's position and size in bytes: -1 if the prefix is incomplete."""
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
            # text of the gRPC specification
            reason = "compressed flag set with identity or empty encoding"
            raise FramingFailed(INTERNAL, reason)
        if size > self._max_bytes:
            raise FramingFailed(
                RESOURCE_EXHAUSTED,
                # text of gRPC's libraries
                f"Received message larger than max ({size} vs. {self._max_bytes})",
            )
        self._compressed = flag == 1
        return position, size

    def space(self) -> memoryview | None:
        """Return memory for the message's next bytes; None between messages or without memory."""
        return None if self.receiving is None else self.receiving.space()

    def filled(self, count: int) -> GrpcMessage | None:
        """Note that `count` bytes were received into `space`. Return the message if it is complete,
        else None. Raise ValueError if `count` is larger than the rest of the message."""
        receiver = self.receiving
        if receiver is None or count > receiver.left:
            raise ValueError(f"there is no space for {count} bytes")
        receiver.filled(count)
        message = None if receiver.left else receiver.message(self._compressed)
        if message is not None:
            self.receiving = None
        return message

    def complete(self) -> GrpcMessage | None:
        """Return the current message if all its bytes have come, else None."""
        receiver = self.receiving
        message = None
        if receiver is not None and not receiver.left:
            message = receiver.message(self._compressed)
            if message is not None:
                self.receiving = None
        return message

    def close(self) -> None:
        """Discard the current message."""
        if self.receiving is not None:
            self.receiving.close()

    def finish(self) -> None:
        """Check the end of the stream. Raise FramingFailed if the stream ends within a message."""
        if self._head or self.receiving is not None:
            raise FramingFailed(INTERNAL, "the request ends within a message")
