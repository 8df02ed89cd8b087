"""How bytes of a peer, a client or a file become values: the only way, and it has one error.

msgspec raises more than its own errors: UnicodeDecodeError for a string that is no UTF-8,
RecursionError for what is nested too deep. Whoever reads what others wrote must not end by
any of them, so every decoder is made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from shmserve.errors import UnreadableMessage

Bytes = bytes | memoryview
Decode = Callable[[Bytes], Any]


def msgpack_decoder(kind: Any) -> Decode:
    """A function from MessagePack to a `kind`, which raises nothing but `UnreadableMessage`."""
    return _guarded(msgspec.msgpack.Decoder(kind).decode)


def json_decoder(kind: Any = Any) -> Decode:
    """As `msgpack_decoder`, from JSON."""
    return _guarded(msgspec.json.Decoder(kind).decode)


def _guarded(decode: Decode) -> Decode:
    def guarded(data: Bytes) -> Any:
        try:
            return decode(data)
        except Exception as ex:
            raise UnreadableMessage(str(ex)) from None

    return guarded
