"""Inflating of received data, in steps of bounded size: gzip and deflate."""

import zlib
from collections.abc import Callable, Iterator
from typing import Any

from shmserve import waiting
from shmserve.errors import InvalidArgument

STEP_BYTES = 1 << 16  # compressed bytes taken and bytes inflated at a time

_GZIP, _ZLIB, _BARE = zlib.MAX_WBITS | 16, zlib.MAX_WBITS, -zlib.MAX_WBITS


def inflated(pieces: Iterator[bytes | memoryview], coding: str, subject: str) -> Iterator[bytes]:
    """Yield the inflated data, at most `STEP_BYTES` bytes at a time.

    "deflate" is the zlib format, but some clients send bare deflate data instead. The first byte
    distinguishes the two: its low half is always 8 in zlib.

    Args:
        pieces: the compressed data, in pieces of at most `STEP_BYTES` bytes: zlib copies the
            rest of a piece in each step.
        coding: "gzip" or "deflate".
        subject: noun for the data, for error messages.

    Raises:
        InvalidArgument: the data are not valid for the coding, are cut off, or go on after
            their end.
    """
    inflater: Any = None
    inflate: Callable[..., bytes] = _at_once
    try:
        for piece in pieces:
            if inflater is None:
                bare = coding == "deflate" and piece[0] & 0x0F != 8
                inflater = zlib.decompressobj(
                    _GZIP if coding == "gzip" else _BARE if bare else _ZLIB
                )
            elif inflater.eof:
                raise InvalidArgument(f"{subject} goes on after its {coding} data")
            data = inflate(inflater.decompress, piece, STEP_BYTES)
            while data:
                yield data
                inflate = waiting.beside  # much data: inflate the rest beside the loop
                data = inflate(inflater.decompress, inflater.unconsumed_tail, STEP_BYTES)
            if inflater.unused_data:
                raise InvalidArgument(f"{subject} goes on after its {coding} data")
    except zlib.error:
        raise InvalidArgument(f"{subject} is not valid {coding} data") from None
    if inflater is None or not inflater.eof:
        raise InvalidArgument(f"{subject}'s {coding} data is cut off")


def _at_once(inflate: Callable[..., bytes], *args: Any) -> bytes:
    return inflate(*args)
