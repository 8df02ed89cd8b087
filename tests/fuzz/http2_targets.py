"""HTTP/2: frames, compressed fields, and gRPC's messages and fields within."""

import random

from shmserve.frontends.http2 import PREFACE
from shmserve.frontends.http2 import frames as f
from shmserve.frontends.http2.grpc_framing import FramingFailed, MessageReader, prefix
from shmserve.frontends.http2.grpc_metadata import decode_binary, encode_binary, parse_timeout
from tests.fuzz.http2 import BLOCK, Server, one_connection


def http2(data: bytes) -> None:
    """Bytes on a connection after the preface, in pieces that the first byte chooses."""
    server = Server(random.Random(1))
    server.give(PREFACE + f.settings({}) + f.SETTINGS_ACK)
    step = 1 + 7 * data[0] if data else 1
    for at in range(1, len(data), step):
        if server.code is None:
            server.give(data[at : at + step])
            server.flush()
    server.finish()


def http2_seeds() -> list[bytes]:
    request = f.frame(f.HEADERS, f.END_HEADERS, 1, BLOCK) + f.frame(f.DATA, f.END_STREAM, 1, b"hi")
    cut = f.frame(f.HEADERS, f.END_STREAM, 3, BLOCK[:5])
    cut += f.frame(f.CONTINUATION, f.END_HEADERS, 3, BLOCK[5:])
    small = f.ping(bytes(8), 0) + f.window_update(0, 50) + f.settings({4: 10, 5: 20000})
    padded = f.frame(f.HEADERS, f.END_HEADERS, 5, BLOCK)
    padded += f.frame(f.DATA, f.PADDED, 5, b"\3hello" + bytes(3)) + f.rst_stream(5, 8)
    late = f.frame(f.PRIORITY, 0, 7, bytes(5)) + request
    return [b"\xff" + request + cut + padded, b"\0" + request + small, b"\x09" + late]


class BytesRandom(random.Random):
    """Random generator that a fuzzer controls: numbers come from bytes, then are 0."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data = data
        self._at = 0

    def getrandbits(self, k: int, /) -> int:
        size = (k + 7) // 8
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return int.from_bytes(piece, "little") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / 65536


def http2_calls(data: bytes) -> None:
    """Frames of an attacker whose decisions are taken by the next bytes."""
    rng = BytesRandom(data)
    one_connection(rng, min(len(data) // 8, 500))


def http2_calls_seeds() -> list[bytes]:
    return [random.Random(seed).randbytes(800) for seed in range(3)]


def hpack_block(data: bytes) -> None:
    """Compressed fields of several requests, each block behind its length."""
    server = Server(random.Random(1))
    server.give(PREFACE + f.settings({}) + f.SETTINGS_ACK)
    number, at = 1, 0
    while at < len(data) and server.code is None:
        block = data[at + 1 : at + 1 + data[at]]
        server.give(f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, number, block))
        number, at = number + 2, at + 1 + data[at]
    server.flush()
    server.finish()


def hpack_block_seeds() -> list[bytes]:
    block = bytes([len(BLOCK)]) + BLOCK
    named = BLOCK + b"\x40\x03x-n\x0212" + b"\x00\x05x-bin\x04AAAA"
    return [block + block, bytes([len(named)]) + named + bytes([len(BLOCK) + 1]) + BLOCK + b"\xbe"]


def grpc_messages(data: bytes) -> None:
    """Messages of a call in pieces of any size must come out as they were framed."""
    step, rest = (1 + data[0], data[1:]) if data else (1, b"")
    reader, found = MessageReader(300), []
    try:
        for at in range(0, len(rest), step):
            found += reader.feed(memoryview(rest)[at : at + step])
        reader.finish()
    except FramingFailed:
        return
    assert b"".join(prefix(len(m.data), m.compressed) + bytes(m.data) for m in found) == rest


def grpc_messages_seeds() -> list[bytes]:
    return [b"\x05" + b"".join(prefix(len(text)) + text for text in (b"", b"ab", b"x" * 90))]


def grpc_fields(data: bytes) -> None:
    """Values of grpc-timeout and of binary metadata."""
    text = data.decode("latin-1")
    try:
        assert parse_timeout(text) >= 0
    except ValueError:
        pass
    try:
        parts = decode_binary(text)
    except ValueError:
        return
    assert decode_binary(",".join(map(encode_binary, parts))) == parts


def grpc_fields_seeds() -> list[bytes]:
    return [b"100m", b"99999999H", b"AAE=,/w"]
