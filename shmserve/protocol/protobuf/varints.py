"""Protocol buffers' variable-length integers: one by one, and packed fields in bulk with numpy.

Packed fields hold as many as a tensor has elements, so nothing here looks at those in a
Python loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument

Array = np.ndarray[Any, Any]

_LONGEST = 10  # bytes of a 64-bit number
_MASK64 = (1 << 64) - 1


def read(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """The number at `at` and where the next thing begins.

    Raises:
        InvalidArgument: it goes on beyond `end`, or for longer than 64 bits.
    """
    value = 0
    for shift in range(0, 7 * _LONGEST, 7):
        if at >= end:
            raise InvalidArgument("the message ends in the middle of a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _MASK64, at
    raise InvalidArgument("the message has a number of more than 64 bits")


def write(value: int) -> bytes:
    """One number; negative ones as 64-bit two's complement."""
    value &= _MASK64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def signed(value: int, bits: int) -> int:
    """The lowest `bits` bits of a number as a signed one."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def unpack(data: memoryview) -> Array:
    """The numbers of a packed field as an unsigned array, as wide as the longest one needs.

    Raises:
        InvalidArgument: the last number has no end, or one has more than 64 bits.
    """
    raw = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    last = raw < 0x80
    if last.all():
        return raw
    if not last[-1]:
        raise InvalidArgument("the message ends in the middle of a number")
    ends = np.flatnonzero(last)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > _LONGEST:
        raise InvalidArgument("the message has a number of more than 64 bits")
    kind = np.uint16 if longest <= 2 else np.uint32 if longest <= 4 else np.uint64
    values: Array = (raw[starts] & 0x7F).astype(kind)
    for place in range(1, longest):
        longer = np.flatnonzero(lengths > place)
        values[longer] |= (raw[starts[longer] + place] & 0x7F).astype(kind) << kind(7 * place)
    return values


def pack(values: Array) -> Array:
    """The bytes of a packed field with these integers (an uint8 array).

    Raises:
        InvalidArgument: they are no integers.
    """
    flat = values.reshape(-1)
    if flat.dtype.kind not in "iub":
        raise InvalidArgument(f"{flat.dtype} values are no integers")
    if flat.dtype.kind == "i":
        flat = flat.astype(np.int64).view(np.uint64)
    top = int(flat.max(initial=0))
    if top < 0x80:
        return flat.astype(np.uint8)
    lengths = np.ones(flat.size, np.int64)
    for place in range(1, _LONGEST):
        if top >> (7 * place):
            lengths += flat >= np.asarray(1 << (7 * place), np.uint64)
    starts = np.cumsum(lengths) - lengths
    out = np.empty(int(lengths.sum()), np.uint8)
    wide = flat.astype(np.uint64)
    for place in range(int(lengths.max())):
        longer = np.flatnonzero(lengths > place)
        more = (lengths[longer] > place + 1).astype(np.uint8) << np.uint8(7)
        digits = (wide[longer] >> np.uint64(7 * place)).astype(np.uint8) & np.uint8(0x7F)
        out[starts[longer] + place] = digits | more
    return out
