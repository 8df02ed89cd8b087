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

_OF_BYTES = (msgspec.MsgspecError, UnicodeError, RecursionError)  # causes: the bytes alone

Bytes = bytes | memoryview
Decode = Callable[[Bytes], Any]


def msgpack_decoder(kind: Any) -> Decode:
    """Return a decoder from MessagePack to a `kind` that raises only `UnreadableMessage`."""
    return _guarded(msgspec.msgpack.Decoder(kind).decode)


def json_decoder(kind: Any = Any, hook: Callable[[Any, Any], Any] | None = None) -> Decode:
    """Return a decoder from JSON to a `kind` that raises only `UnreadableMessage`. `hook`: makes
    values of types that msgspec does not know (`dec_hook`). With a hook, other errors of the hook
    and of the kind's own code, such as `__post_init__`, pass through."""
    decode = msgspec.json.Decoder(kind, dec_hook=hook).decode
    return _guarded(decode) if hook is None else _guarded(decode, _OF_BYTES)


def _guarded(decode: Decode, errors: tuple[type[Exception], ...] = (Exception,)) -> Decode:
    def guarded(data: Bytes) -> Any:
        try:
            return decode(data)
        except errors as ex:
            raise UnreadableMessage(str(ex)) from None

    return guarded
