"""Header blocks: assembled from frames, decoded by `hpack`, encoded without state."""

from functools import lru_cache

import hpack
import msgspec.structs
from hpack.hpack import decode_integer, encode_integer
from hpack.table import HeaderTable

from shmserve.frontends.http2.field_rules import (
    Fields,
    RequestFields,
    regular_fields,
    request_head,
)
from shmserve.frontends.http2.frames import (
    END_HEADERS,
    END_STREAM,
    PADDED,
    PRIORITY_FLAG,
    ConnectionFailed,
    ErrorCode,
    StreamFailed,
)
from shmserve.frontends.http2.limits import Limits

__all__ = ["FieldDecoder", "Fields", "RequestFields", "encode_fields"]

# largest extra in a frame with a block: length of padding, priority, padding
BESIDE_BLOCK = 1 + 5 + 255
_FIELD_OVERHEAD = 32  # bytes that each field adds to the list size (RFC 7541 section 4.1)
_CACHED_FIELDS = 512
_CACHED_FIELD_BYTES = 256


class _Table(HeaderTable):
    """The decoder's dynamic table; records whether a block changed the table."""

    def __init__(self) -> None:
        super().__init__()
        self.changed = False

    def watch(self, changed: bool) -> None:
        """Begin a block. `changed`: whether the block begins with a change of the table's size."""
        self.changed = changed

    def add(self, name: bytes, value: bytes) -> None:
        self.changed = True
        super().add(name, value)


class FieldDecoder:
    """Decoder of one connection's header blocks: from HEADERS and CONTINUATION frames to fields.

    At most one block is open at a time, since no other frame may come between its frames.

    Clients repeat requests. An equal block means an equal request as long as the dynamic table has
    not changed. So requests are cached by block until a block changes the table. A block that
    changes the table is not cached.

    `stream_id`: the stream whose block is open; 0 if no block is open. `since`: the time of the
    open block's first frame. `ends_stream`: whether the latest block ends its stream.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._table = _Table()
        self._decoder = hpack.Decoder(max_header_list_size=limits.max_decoded_bytes)
        self._decoder.header_table = self._table
        self._remembered: dict[bytes, RequestFields] = {}
        self._pieces: list[bytes] = []
        self._size = 0
        self._count = 0
        self.stream_id = 0
        self.since = 0.0
        self.ends_stream = False

    def begin(self, flags: int, stream_id: int, payload: memoryview, now: float) -> bytes | None:
        """Return the block of a HEADERS frame, or None if CONTINUATION follows. Raise
        ConnectionFailed if stream identifier, padding or size is invalid."""
        if not stream_id & 1:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "HEADERS, stream identifier")
        if flags & (PADDED | PRIORITY_FLAG):
            payload = _unpadded(flags, payload)
        block = bytes(payload)
        self.ends_stream = bool(flags & END_STREAM)
        self._size = len(block)
        if self._size > self._limits.max_header_block_bytes:
            raise _too_large()
        if flags & END_HEADERS:
            return block
        self.stream_id, self.since = stream_id, now
        self._pieces = [block]
        self._count = 0
        return None

    def go_on(self, flags: int, payload: memoryview) -> bytes | None:
        """Return the whole block after its last CONTINUATION frame, or None if more frames follow.
        Raise ConnectionFailed if no block is open, or the block has too many frames or bytes."""
        if not self.stream_id:
            raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._count += 1
        if self._count > self._limits.max_continuations:
            raise ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "too many CONTINUATION frames")
        self._size += len(payload)
        if self._size > self._limits.max_header_block_bytes:
            raise _too_large()
        self._pieces.append(bytes(payload))
        if not flags & END_HEADERS:
            return None
        block = b"".join(self._pieces)
        self._pieces = []
        self.stream_id = 0
        return block

    def request(self, block: bytes) -> RequestFields:
        """Return the request encoded in a block. A request with a larger header list than announced
        in SETTINGS has an `excess`. Raise StreamFailed if the request is malformed. Raise
        ConnectionFailed if the block cannot be decoded."""
        head = self._remembered.get(block)
        if head is None:
            decoded, changed = self._decode(block)
            head = request_head(decoded)
            size, limit = _list_size(decoded), self._limits.max_header_list_bytes
            if size > limit:
                excess = f"the metadata have {size} bytes, at most {limit} are taken"
                head = msgspec.structs.replace(head, excess=excess)
            elif not changed and len(block) <= self._limits.remembered_block_bytes:
                self._remember(block, head)
        return head

    def trailers(self, block: bytes) -> Fields:
        """Return the client's trailers. Raise the errors of `request`, and StreamFailed if the
        list is too large."""
        decoded, _ = self._decode(block)
        if _list_size(decoded) > self._limits.max_header_list_bytes:
            raise StreamFailed(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large")
        return regular_fields(decoded)

    def skip(self, block: bytes) -> None:
        """Decode an unwanted block for its effect on the dynamic table."""
        if block not in self._remembered:
            self._decode(block)

    def _remember(self, block: bytes, head: RequestFields) -> None:
        if len(self._remembered) >= self._limits.remembered_blocks:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[block] = head

    def _decode(self, block: bytes) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return the fields, and True if the block changed the dynamic table."""
        self._table.watch(block[:1] != b"" and block[0] & 0xE0 == 0x20)
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
        return decoded, changed


def _list_size(decoded: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + _FIELD_OVERHEAD for name, value in decoded)


def _too_large() -> ConnectionFailed:
    return ConnectionFailed(ErrorCode.ENHANCE_YOUR_CALM, "the header block is too large")


def _unpadded(flags: int, payload: memoryview) -> memoryview:
    """Return the field block fragment of a HEADERS frame."""
    start, stop = 0, len(payload)
    if flags & PADDED and stop:
        start = 1
        stop -= payload[0]
    if flags & PRIORITY_FLAG:
        start += 5
    if start > stop or (flags & PADDED and not payload):
        raise ConnectionFailed(ErrorCode.PROTOCOL_ERROR, "HEADERS, padding or length")
    return payload[start:stop]


def _check_size_updates(block: bytes) -> None:
    """Refuse more than two table size updates at the start of a block (RFC 7541 section 4.2): an
    update costs the server more than its single byte."""
    position = count = 0
    while position < len(block) and block[position] & 0xE0 == 0x20:
        position += decode_integer(block[position : position + 8], 5)[1]
        count += 1
        if count > 2:
            raise hpack.HPACKDecodingError("too many table size updates")


def encode_fields(fields: Fields) -> bytes:
    """Return a block of indexed and literal fields. The block does not change the client's dynamic
    table. So the block is equal each time and for each connection, and may be cached."""
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
