"""Frames of an HTTP/2 attacker.

Each connection gets valid traffic in which some frames are mutated, invented, repeated or left
out, in pieces of any size, while the server answers, consumes and sends. The server may only
produce events: no exception, no memory beyond the limits, no malformed frame, no token lost or
released twice.
"""

import random
import sys
from collections import Counter

import hpack

from shmserve.frontends.http2 import (
    PREFACE,
    Connection,
    ConnectionTerminated,
    DataReceived,
    ErrorCode,
    Event,
    Limits,
    RequestReceived,
    SendQueueFull,
    encode_fields,
)
from shmserve.frontends.http2 import frames as f

LIMITS = Limits(
    stream_window=65535, connection_window=100_000, max_streams=20, max_header_block_bytes=4096,
    control_burst=300, reset_burst=100, high_water_bytes=30_000, max_queued_sends=4,
)  # fmt: skip
HEAD = encode_fields(((":status", "200"), ("content-type", "application/grpc")))
TRAILERS = encode_fields((("grpc-status", "0"),))
REQUEST = (
    (":method", "POST"), (":scheme", "http"), (":path", "/S/M"), (":authority", "a"),
    ("te", "trailers"),
)  # fmt: skip
BLOCK = encode_fields(REQUEST)
NAMES = ("x-a", "content-length", "connection", "te", "Bad", ":path", ":status", "host", "cookie")
VALUES = ("", "0", "5", "a", "trailers", " b", "c\n", "y" * 300)
CONTENT = memoryview(bytes(200_000))


class Client:
    """Generator of frames for one connection; `clean` is the fraction of valid frames."""

    def __init__(self, rng: random.Random, clean: float) -> None:
        self.rng = rng
        self.clean = clean
        self.encoder = hpack.Encoder()
        self.next_id = 1
        self.open: list[int] = []

    def stream_id(self) -> int:
        rng = self.rng
        if self.open and rng.random() < self.clean:
            return rng.choice(self.open)
        return rng.choice((0, 1, 2, self.next_id, self.next_id + 4, (1 << 31) - 1))

    def block(self) -> bytes:
        rng, clean = self.rng, self.clean
        if rng.random() < 0.7:
            return BLOCK
        pairs = list(REQUEST)
        if rng.random() < 0.3:
            pairs.append(("x-n", str(rng.randrange(20))))
        if rng.random() > clean:
            place = rng.randrange(len(pairs) + 1)
            pairs.insert(place, (rng.choice(NAMES), rng.choice(VALUES)))
        block = self.encoder.encode(pairs, huffman=rng.random() < 0.5)
        return mutated(rng, block) if rng.random() > clean else block

    def request(self) -> list[bytes]:
        rng = self.rng
        stream_id, self.next_id = self.next_id, self.next_id + 2
        end = f.END_STREAM if rng.random() < 0.3 else 0
        if not end:
            self.open = [*self.open[-12:], stream_id]
        block = self.block()
        if rng.random() < 0.9:
            return [f.frame(f.HEADERS, f.END_HEADERS | end, stream_id, block)]
        cut = rng.randrange(len(block) + 1)
        return [
            f.frame(f.HEADERS, end, stream_id, block[:cut]),
            f.frame(f.CONTINUATION, f.END_HEADERS, stream_id, block[cut:]),
        ]

    def frames(self) -> list[bytes]:
        rng = self.rng
        kind = rng.random()
        if kind < 0.2 or not self.open:
            return self.request()
        stream_id = self.stream_id()
        if rng.random() > self.clean:
            return [self.wild()]
        if kind < 0.7:
            payload = bytes(rng.choice((0, 1, 5, 100, 3000)))
            flags = f.END_STREAM if rng.random() < 0.2 else 0
            self.leave(stream_id, flags)
            if rng.random() < 0.1:
                return [f.frame(f.DATA, flags | f.PADDED, stream_id, b"\x03" + payload + bytes(3))]
            return [f.frame(f.DATA, flags, stream_id, payload)]
        if kind < 0.8:
            target = rng.choice((0, stream_id))
            return [f.window_update(target, rng.choice((1, 50, 65535, 200_000)))]
        if kind < 0.84:
            self.leave(stream_id, f.END_STREAM)
            return [f.rst_stream(stream_id or 1, rng.randrange(14))]
        if kind < 0.86:
            sizes = (0, 10, 65535, 1 << 20)
            return [f.settings({4: rng.choice(sizes), 5: 16384 + rng.randrange(9000)})]
        if kind < 0.88:
            return [f.ping(bytes(8), rng.choice((0, f.ACK)))]
        if kind < 0.9:
            trailers = self.encoder.encode([("x-t", "1")])
            self.leave(stream_id, f.END_STREAM)
            return [f.frame(f.HEADERS, f.END_HEADERS | f.END_STREAM, stream_id, trailers)]
        if kind < 0.93:
            return [f.frame(f.PRIORITY, 0, stream_id or 1, bytes(5))]
        return [f.frame(rng.randrange(10, 256), rng.randrange(256), stream_id, bytes(9))]

    def leave(self, stream_id: int, flags: int) -> None:
        """The client has ended the stream, and mostly knows."""
        if flags & f.END_STREAM and stream_id in self.open and self.rng.random() < self.clean:
            self.open.remove(stream_id)

    def wild(self) -> bytes:
        """Return a frame of any type, flags and stream, or a head whose payload never comes."""
        rng = self.rng
        payload = rng.randbytes(rng.choice((0, 1, 4, 5, 6, 8, 12, 40)))
        made = f.frame(rng.randrange(11), rng.randrange(256), self.stream_id(), payload)
        return made if rng.random() < 0.7 else mutated(rng, made)


def mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        if not changed:
            break
        place, what = rng.randrange(len(changed)), rng.random()
        if what < 0.6:
            changed[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif what < 0.8:
            del changed[place]
        else:
            changed.insert(place, rng.randrange(256))
    return bytes(changed)


class Server:
    """Owner of the connection, who answers calls and records tokens."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.connection = Connection(LIMITS, self.now)
        self.tokens: Counter[int] = Counter()
        self.given = 0
        self.said = bytearray()
        self.code: int | None = None
        self.counts: Counter[str] = Counter()

    def give(self, data: bytes) -> None:
        self.now += 0.002
        while data:
            due = self.connection.payload_due
            if due is not None and self.rng.random() < 0.5:
                size = min(len(data), due[1])
                data = data[size:]
                self.handle(self.connection.payload_received(size, self.now))
                self.connection.consumed(due[0], size)
            else:
                self.handle(self.connection.receive(data, self.now))
                data = b""

    def handle(self, events: list[Event]) -> None:
        for event in events:
            self.counts[type(event).__name__] += 1
            if isinstance(event, RequestReceived):
                self.answer(event.stream_id, HEAD)
            elif isinstance(event, DataReceived):
                if event.stream_id in self.connection._streams.open:
                    self.connection.consumed(event.stream_id, len(event.data))
                if self.rng.random() < 0.4:
                    self.answer(event.stream_id, None)
            elif isinstance(event, ConnectionTerminated):
                self.code = event.code

    def answer(self, stream_id: int, head: bytes | None) -> None:
        size = self.rng.choice((0, 10, 10, 4096, 30_000))
        end = self.rng.random() < 0.7
        self.given += 1
        try:
            self.connection.send(
                stream_id, self.now, head=head, data=[CONTENT[:size]],
                trailers=TRAILERS if end else None, token=self.given,
            )  # fmt: skip
        except (SendQueueFull, ValueError):  # the response has ended, or waits
            self.tokens[self.given] += 1

    def flush(self) -> None:
        piece = b"".join(self.connection.outgoing(self.now))[: self.rng.randrange(1, 60_000)]
        self.connection.sent(len(piece), self.now)
        self.said += piece
        self.collect()
        assert self.connection._output.pending < 30_000 + (1 << 20) + (130 << 10)
        assert len(self.connection._streams.open) <= LIMITS.max_streams
        assert len(self.connection.reader._rest) <= LIMITS.max_header_block_bytes + 300

    def collect(self) -> None:
        for token in self.connection.released():
            self.tokens[token] += 1  # type: ignore[index]

    def finish(self) -> None:
        """Read all remaining output; check that it is frames, and that all memory is back."""
        self.connection.terminate(ErrorCode.NO_ERROR, "")
        while buffers := self.connection.outgoing(self.now):
            data = b"".join(buffers)
            self.said += data
            self.connection.sent(len(data), self.now)
        self.collect()
        assert self.connection.finished
        assert all(self.tokens[n] == 1 for n in range(1, self.given + 1)), "a token is lost"
        self.check_frames()

    def check_frames(self) -> None:
        said, position, last = bytes(self.said), 0, -1
        while position < len(said):
            length = int.from_bytes(said[position : position + 3], "big")
            last = said[position + 3]
            assert last in (f.DATA, f.HEADERS, 3, 4, 6, 7, 8), last
            position += 9 + length
        assert position == len(said)
        assert last == f.GOAWAY


def one_connection(rng: random.Random, frames: int) -> tuple[int, Server]:
    """Attack one connection until it ends or `frames` were sent."""
    clean = rng.choice((0.9, 0.99, 0.999, 1.0))
    client, server = Client(rng, clean), Server(rng)
    server.give(PREFACE + f.settings({}) + f.SETTINGS_ACK)
    count = 0
    while count < frames and server.code is None:
        batch = [mutated(rng, x) if rng.random() > clean else x for x in client.frames()]
        if rng.random() < 0.01:
            batch.append(batch[-1])
        count += len(batch)
        data = b"".join(batch)
        cut = rng.randrange(len(data) + 1) if rng.random() < 0.3 else len(data)
        for piece in (data[:cut], data[cut:]):
            if piece:
                server.give(piece)
        still = server.connection._streams.open
        client.open = [n for n in client.open if n in still or rng.random() > clean]
        if rng.random() < 0.3:
            server.flush()
        if rng.random() < 0.02:
            server.handle(server.connection.tick(server.now))
    server.finish()
    return count, server


def fuzz(frames: int, seed: int, longest: int = 3000) -> Counter[str]:
    """Attack connections in turn until `frames` were sent; return counts of the events."""
    counts: Counter[str] = Counter()
    while counts["frames"] < frames:
        try:
            sent, server = one_connection(random.Random(seed), min(longest, frames))
        except Exception:
            print(f"seed {seed}", file=sys.stderr)
            raise
        seed += 1
        counts["frames"] += sent
        counts["connections"] += 1
        counts.update(server.counts)
        if server.code is not None:
            counts[ErrorCode(server.code).name] += 1
    return counts
