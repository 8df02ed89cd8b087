"""Packed varints in bulk, by numpy: Python loops are too slow for all elements of a tensor."""

from typing import Any

import numpy as np

from shmserve.errors import InvalidArgument
from shmserve.protocol.protobuf.wire import MAX_VARINT, Malformed

Array = np.ndarray[Any, Any]


def unpack(data: memoryview | Array) -> Array:
    """Return the numbers of a packed field as an unsigned array, as wide as the longest needs.
    Raise Malformed if the last number is cut off, or a number has more than ten bytes."""
    raw = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    last = raw < 0x80
    if last.all():
        return raw
    if not last[-1]:
        raise Malformed("it ends in the middle of a varint")
    ends = np.flatnonzero(last)
    starts = np.empty_like(ends)
    starts[0] = 0
    np.add(ends[:-1], 1, out=starts[1:])
    more = ends - starts  # bytes after the first byte of each varint
    longest = int(more.max())
    if longest >= MAX_VARINT:
        raise Malformed(f"a varint of more than {MAX_VARINT} bytes")
    kind = np.uint16 if longest < 2 else np.uint32 if longest < 4 else np.uint64
    values: Array = (raw[starts] & 0x7F).astype(kind)
    rows = np.arange(len(starts))
    for place in range(1, longest + 1):
        rows = rows[more[rows] >= place]
        digits: Array = (raw[starts[rows] + place] & 0x7F).astype(kind)
        values[rows] |= digits << kind(7 * place)
    return values


def pack(values: Array) -> Array:
    """Return the bytes of a packed field with these integers (a uint8 array). Raise InvalidArgument
    if the values are not integers."""
    flat = values.reshape(-1)
    if flat.dtype.kind not in "iub":
        raise InvalidArgument(f"{flat.dtype} values are no integers")
    if flat.dtype.kind == "i":
        flat = flat.astype(np.int64).view(np.uint64)
    top = int(flat.max(initial=0))
    if top < 0x80:
        return flat.astype(np.uint8)
    lengths = np.ones(flat.size, np.int64)
    for place in range(1, MAX_VARINT):
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
