"""Incremental parser of a ModelInferRequest: large tensors are received into places of their own.

The parser looks only at the top-level fields of the message, and only for their boundaries. Each
raw_input_contents is kept apart. All other fields are collected and parsed later by
`parse_request`. Some fields cannot be separated: groups, large fields of other kinds, more or
larger tensors than allowed. From such a field on, the whole rest is collected for `parse_request`,
which raises the error, if any.

Each raw_input_contents of 64 KiB and more gets a slot. So models find every large tensor at the
start of a block, aligned to at least 256 bytes, whatever its position in the message. A receive
call takes the rest of a DATA frame and the head of the next frame, no more. Where such a message
is expected, the receiver first looks at its head (MSG_PEEK) and takes no tensor byte before the
slot exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from shmserve.config import Settings
from shmserve.protocol import bounds
from shmserve.protocol.protobuf.wire import FIXED32, FIXED64, LEN, VARINT, Malformed, uint32, varint

LARGE_BYTES = 64 << 10  # from this size on, a copy costs more than a place
_RAW = 0x3A
_LARGEST_FIELD = 64 << 10  # bytes of any other field; such fields are copied once
_MOST_FIELDS = 1024  # fields that the hub's loop may look at without delaying other connections
_SCRATCH_BYTES = 64
_FIXED = {FIXED32: 4, FIXED64: 8}


class Place(Protocol):
    """Memory for a tensor. `view` is writable and has exactly the requested size."""

    @property
    def view(self) -> memoryview: ...

    def take(self) -> Any:
        """Return the owner of the memory and pass on the duty to give the memory back."""
        ...


def _nowhere(_: int) -> None:
    return None


class IncomingRequest:
    """Receiver of one message, whose bytes come in order.

    Args:
        size: bytes of the message.
        limits: bounds of a request.
        reserve: function that `placed` calls; subclasses override `placed`.
        sparing: until `stop_sparing`, `feed` takes no bytes of a tensor that has or wants a place.
        free_bytes: bytes outside places before `keep` is called.

    Attributes:
        wanted: bytes of a place that the receiver needs before going on; 0: no place is needed.
        left: bytes of the message still to come.
        raw: raw_input_contents received so far, each a place or bytes; later entries are in
            `rest`.
        copied: bytes of tensors that were copied into a place, not received there.
        gathered: bytes received so far outside places.
    """

    __slots__ = (
        "_fields", "_filled", "_free_bytes", "_held_back", "_limits", "_partial", "_placed",
        "_reserve", "_rest", "_scratch", "_spared", "_sparing", "_target", "_whole", "copied",
        "gathered", "left", "raw", "wanted",
    )  # fmt: skip

    def __init__(
        self,
        size: int,
        limits: Settings,
        reserve: Callable[[int], Place | None] = _nowhere,
        sparing: bool = False,
        free_bytes: int = 0,
    ) -> None:
        self._limits = limits
        self._reserve = reserve
        self._rest = bytearray()
        # the rest with all bytes still to come, after `_give_up`
        self._whole: memoryview | None = None
        self._partial = b""  # a field that has not come completely
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._target: memoryview | None = None  # memory that is being filled
        self._placed = False  # the target is a place
        self._filled = 0
        self._fields = 0
        self._held_back = b""  # bytes that came while a place was wanted
        self.wanted = 0
        self.left = size
        self.raw: list[Place | memoryview] = []
        self.copied = self.gathered = 0
        self._free_bytes = free_bytes
        self._sparing = sparing
        self._spared = 0

    def space(self) -> memoryview | None:
        """Return memory for the next bytes, or None while a place is wanted."""
        if self.wanted:
            return None
        if self._target is not None:
            return self._target[self._filled :]
        return self._scratch[: self.left]

    def filled(self, count: int) -> None:
        """Take `count` bytes that were received into `space`."""
        if self._target is None:
            self.feed(self._scratch[:count])
            return
        if not self._placed:
            self.gathered += count
            if self.gathered > self._free_bytes:
                self.keep(count)
        self.left -= count
        self._advance(count)

    def feed(self, data: memoryview) -> None:
        """Take bytes that were received elsewhere."""
        self.gathered += len(data)
        if self.gathered > self._free_bytes:
            self.keep(len(data))
        self.left -= len(data)
        self._take(data)

    def placed(self, nbytes: int) -> Place | None:
        """Return a place for `nbytes` bytes, or None if none is available now."""
        return self._reserve(nbytes)

    def keep(self, count: int) -> None:
        """Account for `count` bytes outside places. Subclasses raise if memory is short."""

    def grant(self, place: Place | None) -> None:
        """Give the wanted place. With None, the tensor's bytes are copied once more."""
        size, self.wanted = self.wanted, 0
        held_back, self._held_back = self._held_back, b""
        self._begin(size, place)
        self._take(memoryview(held_back))

    def stop_sparing(self) -> int:
        """End sparing. Return how many bytes at the end of the fed data must be fed again."""
        spared, self._spared = self._spared, 0
        self._sparing = False
        self.left += spared
        return spared

    def rest(self) -> memoryview:
        """Return everything outside `raw` as a message, once all bytes have come."""
        if self._partial:
            self._rest += self._partial
            self._partial = b""
        return memoryview(self._rest) if self._whole is None else self._whole

    def _take(self, data: memoryview) -> None:
        position, end = 0, len(data)
        while position < end:
            if self._sparing and (self.wanted or (self._placed and self._target is not None)):
                self._spared = end - position
                return
            if self.wanted:
                self._held_back += data[position:]
                return
            if self._target is None:
                position = self._scan(data[position:], position)
                continue
            count = min(len(self._target) - self._filled, end - position)
            self._target[self._filled : self._filled + count] = data[position : position + count]
            if self._placed:
                self.copied += count
            self._advance(count)
            position += count

    def _advance(self, count: int) -> None:
        assert self._target is not None
        self._filled += count
        if self._filled == len(self._target):
            self._target = None

    def _scan(self, data: memoryview, before: int) -> int:
        """Take fields until a tensor begins. Return the position after the last byte taken.

        `before`: bytes of the caller's data that were taken earlier.
        """
        offset = before - len(self._partial)
        if self._partial:
            data = memoryview(self._partial + data)
            self._partial = b""
        position, end = 0, len(data)
        while position < end:
            field = _field(data, position)
            if field is None:
                break
            tag, start, size = field
            self._fields += 1
            remaining = self.left + end - start  # bytes of the message from the field's value on
            if tag == _RAW and self._allowed(size, remaining):
                self._rest += data[:position]
                self._want(size)
                return offset + start
            inseparable = tag == _RAW or size > _LARGEST_FIELD or self._fields > _MOST_FIELDS
            if inseparable or not 0 <= size <= remaining:
                return offset + self._give_up(data)
            if start + size > end:
                break
            position = start + size
        self._rest += data[:position]
        self._partial = bytes(data[position:])
        return offset + end

    def _allowed(self, size: int, left: int) -> bool:
        limits = self._limits
        return size <= min(left, limits.max_tensor_bytes) and len(self.raw) < bounds.MAX_INPUTS

    def expected(self, size: int, head: memoryview) -> bool:
        """Return True if the next entry of `raw`, of `size` bytes, may have a place.

        Subclasses raise if the model cannot take the request. `head`: the fields before the first
        tensor.
        """
        return True

    def _want(self, size: int) -> None:
        # A copy: a bytearray with views cannot grow.
        if size < LARGE_BYTES or not self.expected(size, memoryview(bytes(self._rest))):
            self._begin(size, None)
            return
        place = self.placed(size)
        if place is None:
            self.wanted = size
        else:
            self._begin(size, place)

    def _begin(self, size: int, place: Place | None) -> None:
        if place is None:
            self._target = np.empty(size, np.uint8).data  # pages are allocated when written
            self.raw.append(self._target)
        else:
            self._target = place.view
            self.raw.append(place)
        self._placed = place is not None
        self._filled = 0
        if not size:
            self._target = None

    def _give_up(self, data: memoryview) -> int:
        """Collect everything from here on as one piece. Return the number of bytes taken."""
        self._rest += data
        begun = len(self._rest)
        # pages are allocated when written
        self._whole = np.empty(begun + self.left, np.uint8).data
        self._whole[:begun] = self._rest
        self._target = self._whole[begun:] if self.left else None
        self._placed = False
        self._filled = 0
        return len(data)


def _field(data: memoryview, position: int) -> tuple[int, int, int] | None:
    """Return a field's tag, start and size of the value, or None if too few bytes have come.

    The size is -1 for a field that cannot be separated.
    """
    try:
        tag, start = data[position], position + 1  # usually the tag is a single byte
        if tag >= 0x80:
            tag, start = uint32(data, position, "a tag")
        kind = tag & 7
        if kind == LEN:
            size = data[start]
            if size < 0x80:
                return tag, start + 1, size
            size, start = uint32(data, start, "a length")
            return tag, start, size
        if kind == VARINT:
            return tag, start, varint(data, start)[1] - start
    except IndexError:
        return None
    except Malformed:
        return 0, position, -1
    return tag, start, _FIXED.get(kind, -1)
