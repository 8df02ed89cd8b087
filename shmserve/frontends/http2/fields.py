"""Header blocks: decoded by `hpack` and remembered, encoded without state."""

from __future__ import annotations

from functools import lru_cache

import hpack
from hpack.hpack import decode_integer, encode_integer
from hpack.table import HeaderTable

from shmserve.frontends.http2.field_rules import (
    Fields,
    RequestFields,
    regular_fields,
    request_head,
)
from shmserve.frontends.http2.frames import ConnectionFailed, ErrorCode, StreamFailed
from shmserve.frontends.http2.limits import Limits

__all__ = ["FieldDecoder", "Fields", "RequestFields", "encode_fields"]

_FIELD_OVERHEAD = 32  # what RFC 7541 has each field count for, beside its bytes
_CACHED_FIELDS = 512
_CACHED_FIELD_BYTES = 256


class _Table(HeaderTable):
    """The decoder's table, that tells whether something was put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = False

    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)


class FieldDecoder:
    """One connection's decoder.

    Clients repeat themselves. A block means the same as its last time if the dynamic table has
    not changed meanwhile: so requests are remembered by their block until a block changes the
    table, and a block that does is not remembered itself.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._table = _Table()
        self._decoder = hpack.Decoder(max_header_list_size=limits.max_decoded_bytes)
        self._decoder.header_table = self._table
        self._remembered: dict[bytes, RequestFields] = {}

    def request(self, block: bytes) -> RequestFields:
        """The request that a block says.

        Raises:
            StreamFailed: it is malformed, or larger than we said we take.
            ConnectionFailed: the block cannot be decoded.
        """
        head = self._remembered.get(block)
        if head is None:
            decoded, changed = self._decode(block)
            head = request_head(decoded)
            if not changed and len(block) <= self._limits.remembered_block_bytes:
                self._remember(block, head)
        return head

    def trailers(self, block: bytes) -> Fields:
        """The client's trailers; raises as `request`."""
        return regular_fields(self._decode(block)[0])

    def skip(self, block: bytes) -> None:
        """Decode a block that nobody wants, for what it does to the table."""
        if block not in self._remembered:
            try:
                self._decode(block)
            except StreamFailed:
                pass  # too long a list, of a stream that is not there anyway

    def _remember(self, block: bytes, head: RequestFields) -> None:
        if len(self._remembered) >= self._limits.remembered_blocks:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[block] = head

    def _decode(self, block: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
        """The fields, and whether the table is another one now."""
        self._table.changed = block[:1] != b"" and block[0] & 0xE0 == 0x20
        try:
            if self._table.changed:
                _check_size_updates(block)
            decoded: list[tuple[bytes, bytes]] = list(self._decoder.decode(block, raw=True))
        except hpack.OversizedHeaderListError:
            raise ConnectionFailed(
                ErrorCode.ENHANCE_YOUR_CALM, "a header list is too large to be decoded"
            ) from None
        except hpack.HPACKError:
            raise ConnectionFailed(
                ErrorCode.COMPRESSION_ERROR, "a header block cannot be decoded"
            ) from None
        changed = self._table.changed
        if changed:
            self._remembered.clear()
        size = sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in decoded)
        if size > self._limits.max_header_list_bytes:
            raise StreamFailed(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large")
        return decoded, changed


def _check_size_updates(block: bytes) -> None:
    """At most two of them begin a block (RFC 7541 section 4.2): they cost us more than a byte."""
    position = count = 0
    while position < len(block) and block[position] & 0xE0 == 0x20:
        position += decode_integer(block[position : position + 8], 5)[1]
        count += 1
        if count > 2:
            raise hpack.HPACKDecodingError("too many table size updates")


def encode_fields(fields: Fields) -> bytes:
    """A block of indexed and literal fields that leaves the client's table alone.

    So it is the same bytes each time and for each connection, and may be kept.
    """
    return b"".join(
        _cached_field(name, value)
        if len(name) + len(value) <= _CACHED_FIELD_BYTES
        else _field(name, value)
        for name, value in fields
    )


def _field(name: str, value: str) -> bytes:
    raw_name, raw_value = name.encode("ascii"), value.encode("latin-1")
    index, values = HeaderTable.STATIC_TABLE_MAPPING.get(raw_name, (0, {}))
    exact = values.get(raw_value)
    if exact is not None:
        return _integer(exact, 7, 0x80)
    encoded = _integer(index, 4, 0x00)
    if not index:
        encoded += _integer(len(raw_name), 7, 0x00) + raw_name
    return encoded + _integer(len(raw_value), 7, 0x00) + raw_value


_cached_field = lru_cache(_CACHED_FIELDS)(_field)


def _integer(number: int, prefix_bits: int, pattern: int) -> bytes:
    encoded = encode_integer(number, prefix_bits)
    encoded[0] |= pattern
    return bytes(encoded)
