"""Frames of RFC 9113: numbers of all types, and the encoding of frames sent by a server."""

from enum import IntEnum
from struct import Struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9

# Plain numbers: members of an enumeration would cost another look-up in the parser's loop.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9

END_STREAM = 0x1
ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
PRIORITY_FLAG = 0x20

HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS = 1, 2, 3
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 4, 5, 6

DEFAULT_WINDOW = 65_535
DEFAULT_FRAME_BYTES = 16_384
LARGEST_FRAME_BYTES = (1 << 24) - 1
LARGEST_WINDOW = (1 << 31) - 1
LARGEST_STREAM_ID = (1 << 31) - 1

Buffer = bytes | bytearray | memoryview


class ErrorCode(IntEnum):
    """Reasons for the end of a stream or a connection (RFC 9113 section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFailed(Exception):
    """The peer's bytes end the connection, with GOAWAY. `code`: error code of the GOAWAY. `reason`:
    debug data of the GOAWAY; ASCII."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class StreamFailed(Exception):
    """The peer's bytes end one stream, with RST_STREAM."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


# length (upper 16 and lower 8 bits), type, flags, stream
_head = Struct(">HBBBL")
unpack_head = _head.unpack_from
pack_head = _head.pack
_with_word = Struct(">HBBBLL").pack
_goaway_body = Struct(">LL")
_setting = Struct(">HL")


def frame_head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return pack_head(length >> 8, length & 0xFF, kind, flags, stream_id)


def frame(kind: int, flags: int, stream_id: int, payload: Buffer) -> bytes:
    return frame_head(len(payload), kind, flags, stream_id) + payload


def rst_stream(stream_id: int, code: int) -> bytes:
    return _with_word(0, 4, RST_STREAM, 0, stream_id, code)


def window_update(stream_id: int, increment: int) -> bytes:
    return _with_word(0, 4, WINDOW_UPDATE, 0, stream_id, increment)


def ping(data: Buffer, flags: int = 0) -> bytes:
    return frame(PING, flags, 0, data)


def goaway(last_stream_id: int, code: int, reason: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, _goaway_body.pack(last_stream_id, code) + reason.encode())


def settings(values: dict[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_setting.pack(*item) for item in values.items()))


SETTINGS_ACK = frame(SETTINGS, ACK, 0, b"")


def read_settings(payload: Buffer) -> list[tuple[int, int]]:
    """Return identifier and value of each setting. `payload` is a multiple of six bytes."""
    return list(_setting.iter_unpack(payload))


def long_field_block(stream_id: int, block: bytes, flags: int, max_frame: int) -> bytes:
    """Return HEADERS and CONTINUATION frames for a block of more than `max_frame` bytes."""
    frames = [frame(HEADERS, flags, stream_id, block[:max_frame])]
    for start in range(max_frame, len(block), max_frame):
        last = END_HEADERS if start + max_frame >= len(block) else 0
        piece = block[start : start + max_frame]
        frames.append(frame(CONTINUATION, last, stream_id, piece))
    return b"".join(frames)
