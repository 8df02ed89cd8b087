"""Decoders of bytes from peers, clients and files, with a single error: `UnreadableMessage`.

msgspec also raises errors of other libraries: UnicodeDecodeError for a string that is not UTF-8,
RecursionError for values nested too deep. Foreign input must not end a process with such an error,
so every decoder is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shmserve.errors import UnreadableMessage

Bytes = bytes | memoryview
Decode = Callable[[Bytes], Any]


def msgpack_decoder(kind: Any) -> Decode:
    """Return a decoder from MessagePack to a `kind` that raises only `UnreadableMessage`."""
    return _guarded(msgspec.msgpack.Decoder(kind).decode)


def json_decoder(kind: Any = Any, hook: Callable[[Any, Any], Any] | None = None) -> Decode:
    """Return a decoder from JSON to a `kind` that raises only `UnreadableMessage`. `hook`: makes
    values of types that msgspec does not know (`dec_hook`)."""
    return _guarded(msgspec.json.Decoder(kind, dec_hook=hook).decode)


def _guarded(decode: Decode) -> Decode:
    def guarded(data: Bytes) -> Any:
        try:
            return decode(data)
        except Exception as ex:
            raise UnreadableMessage(str(ex)) from None

    return guarded
