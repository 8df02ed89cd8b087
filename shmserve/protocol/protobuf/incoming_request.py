"""A ModelInferRequest taken apart while it comes: large tensors go to places of their own.

Only the fields of the message itself are looked at, and of these only where they begin and end:
each raw_input_contents gets a place, all others stay together as what `parse_request` reads.
What cannot be told apart (groups, large fields of other kinds, more or larger tensors than
allowed) is left to it from there on, and with it the error, if it is one.

Each raw_input_contents of 64 KiB and more gets a slot of its own. So models find every tensor at
the start of a block, aligned to 256 bytes at least, wherever it lay in the message. One receive
takes what is left of a DATA frame and the head of the next, nothing else. Where such a message is
expected, its head is looked at first (MSG_PEEK), and nothing of a tensor is received before its
slot is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from shmserve.config import Settings
from shmserve.protocol import bounds
from shmserve.protocol.protobuf.wire import (
    FIXED32,
    FIXED64,
    LEN,
    VARINT,
    Malformed,
    uint32,
    varint,
)

LARGE_BYTES = 64 << 10  # from here on a copy costs more than a place of its own
_RAW = 0x3A
_LARGEST_FIELD = 64 << 10  # of others; they are copied once
_MOST_FIELDS = 1024  # to be looked at, by who has other things to do
_SCRATCH_BYTES = 64
_FIXED = {FIXED32: 4, FIXED64: 8}


class Place(Protocol):
    """Memory for a tensor; `view` is writable and exactly as large as was asked for."""

    @property
    def view(self) -> memoryview: ...

    def take(self) -> Any:
        """Whose memory it is, for who gives that back from now on."""
        ...


def _nowhere(_: int) -> None:
    return None


class IncomingRequest:
    """Takes the bytes of one message, in order.

    Args:
        size: of the message.
        limits: what a request may have.
        reserve: what `placed` asks; a subclass has its own.
        sparing: `feed` takes nothing of a tensor that begins and has a place, or wants one, until
            `stop_sparing`.
        free_bytes: bytes without a place that are not told to `keep`.

    Attributes:
        wanted: bytes of a place without which it cannot go on; 0: it can.
        left: bytes of the message to come.
        raw: the raw_input_contents, each a place or bytes; those after them are in `rest`.
        copied: bytes of tensors in places that were not received there.
        gathered: bytes that have come and have no place.
    """

    __slots__ = (
        "_fields", "_filled", "_free_bytes", "_limits", "_partial", "_placed", "_reserve", "_rest",
        "_scratch", "_since", "_spared", "_sparing", "_target", "_whole", "copied", "gathered",
        "left", "raw", "wanted",
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
        self._whole: memoryview | None = None  # the same with all that is still to come
        self._partial = b""  # a field that has not come entirely
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._target: memoryview | None = None  # what is being filled
        self._placed = False  # the target is a place
        self._filled = 0
        self._fields = 0
        self._since = b""  # what has come since a place is wanted
        self.wanted = 0
        self.left = size
        self.raw: list[Place | memoryview] = []
        self.copied = self.gathered = 0
        self._free_bytes = free_bytes
        self._sparing = sparing
        self._spared = 0

    def space(self) -> memoryview | None:
        """Where the next bytes may be received; None: nowhere while a place is wanted."""
        if self.wanted:
            return None
        if self._target is not None:
            return self._target[self._filled :]
        return self._scratch[: self.left]

    def filled(self, count: int) -> None:
        """So many bytes were received in `space`."""
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
        """Bytes that were received elsewhere."""
        self.gathered += len(data)
        if self.gathered > self._free_bytes:
            self.keep(len(data))
        self.left -= len(data)
        self._take(data)

    def placed(self, nbytes: int) -> Place | None:
        """A place for so many bytes; None: not now, see `wanted`."""
        return self._reserve(nbytes)

    def keep(self, count: int) -> None:
        """So many bytes come that have no place; raises where there is no memory for them."""

    def grant(self, place: Place | None) -> None:
        """The place that was wanted; None: there is none, and the bytes of the tensor will be
        copied once more."""
        size, self.wanted = self.wanted, 0
        since, self._since = self._since, b""
        self._begin(size, place)
        self._take(memoryview(since))

    def stop_sparing(self) -> int:
        """How many bytes at the end of what was fed were not taken: they are to come again."""
        spared, self._spared = self._spared, 0
        self._sparing = False
        self.left += spared
        return spared

    def rest(self) -> memoryview:
        """All that is not in `raw`, as a message. Once nothing is left."""
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
                self._since += data[position:]
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
        """Take fields until a tensor begins; where in the data that is.  `before`: what was
        taken of it."""
        offset = before - len(self._partial)
        if self._partial:
            data = memoryview(self._partial + data)
            self._partial = b""
        position, end = 0, len(data)
        while position < end:
            found = _field(data, position)
            if found is None:
                break
            tag, start, size = found
            self._fields += 1
            left = self.left + end - start  # of the message, from the field's value on
            if tag == _RAW and self._allowed(size, left):
                self._rest += data[:position]
                self._want(size)
                return offset + start
            other = tag == _RAW or size > _LARGEST_FIELD or self._fields > _MOST_FIELDS
            if other or not 0 <= size <= left:
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
        """Whether the next of `raw`, of so many bytes, may have a place; raises where it is not
        wanted at all. `head`: what came before the first tensor."""
        return True

    def _want(self, size: int) -> None:
        # A copy, since a view of `_rest` would keep it from growing
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
            self._target = np.empty(size, np.uint8).data  # pages come when written
            self.raw.append(self._target)
        else:
            self._target = place.view
            self.raw.append(place)
        self._placed = place is not None
        self._filled = 0
        if not size:
            self._target = None

    def _give_up(self, data: memoryview) -> int:
        """All that comes from here on belongs together."""
        self._rest += data
        begun = len(self._rest)
        self._whole = np.empty(begun + self.left, np.uint8).data  # pages come when written
        self._whole[:begun] = self._rest
        self._target = self._whole[begun:] if self.left else None
        self._placed = False
        self._filled = 0
        return len(data)


def _field(data: memoryview, position: int) -> tuple[int, int, int] | None:
    """A field's tag, where its value begins, and that value's size, -1 if it is of no simple
    kind; None: too little of it has come."""
    try:
        tag, start = data[position], position + 1  # most often a byte is all
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
