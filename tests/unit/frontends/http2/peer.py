"""A client that sends exactly the given frames, and reads the server's frames."""

from typing import Any, NamedTuple

import hpack

from shmserve.frontends.http2 import PREFACE, Connection, ErrorCode, Event, Limits, encode_fields
from shmserve.frontends.http2 import frames as f

REQUEST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.Service/Method"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


CALM = ErrorCode.ENHANCE_YOUR_CALM
HEAD = encode_fields(((":status", "200"),))
TRAILERS = encode_fields((("grpc-status", "0"),))


class Frame(NamedTuple):
    kind: int
    flags: int
    stream_id: int
    payload: bytes

    @property
    def word(self) -> int:
        """Return the last four bytes of the payload: an error code, an increment."""
        return int.from_bytes(self.payload[-4:], "big")


def parse(data: bytes) -> list[Frame]:
    """Whole frames; nothing may be left over."""
    found = []
    while data:
        length = int.from_bytes(data[:3], "big")
        stream_id = int.from_bytes(data[5:9], "big")
        assert len(data) >= 9 + length
        found.append(Frame(data[3], data[4], stream_id, data[9 : 9 + length]))
        data = data[9 + length :]
    return found


def fields(pairs: Any) -> bytes:
    """Return a header block of literals that leaves tables alone."""
    encoder = hpack.Encoder()
    return b"".join(
        encoder.add((name.encode("latin-1"), value.encode("latin-1")), True)
        for name, value in pairs
    )


class Peer:
    """A connection, and its client's side.

    Args:
        handshake: preface and SETTINGS have been exchanged.
        settings: the client's.
        limits: changed values of Limits.
    """

    def __init__(
        self, handshake: bool = True, settings: dict[int, int] | None = None, **limits: Any
    ) -> None:
        self.limits = Limits(**limits)
        self.now = 100.0
        self.connection = Connection(self.limits, self.now)
        if handshake:
            assert self.give(PREFACE + f.settings(settings or {}) + f.SETTINGS_ACK) == []
            self.take()

    def give(self, *data: bytes) -> list[Event]:
        return self.connection.receive(b"".join(data), self.now)

    def take(self) -> list[Frame]:
        """Everything the server has to say."""
        said = b""
        while buffers := self.connection.outgoing(self.now):
            data = b"".join(buffers)
            said += data
            self.connection.sent(len(data), self.now)
        return parse(said)

    def ask(self, stream_id: int, end: bool = True, pairs: Any = REQUEST) -> list[Event]:
        return self.give(headers(stream_id, pairs, end))

    def failure(self, *data: bytes) -> int:
        """Return the code of the GOAWAY that ends the connection because of `data`."""
        events = self.give(*data)
        assert type(events[-1]).__name__ == "ConnectionTerminated", events
        last = self.take()[-1]
        assert last.kind == f.GOAWAY
        assert self.connection.finished
        code = int.from_bytes(last.payload[4:8], "big")
        assert code == events[-1].code
        return code

    def resets(self) -> dict[int, int]:
        """Return stream -> code of the RST_STREAM frames that wait to be sent."""
        return {x.stream_id: x.word for x in self.take() if x.kind == f.RST_STREAM}


def with_request(end: bool = True, **how: Any) -> Peer:
    """Return a peer that has sent a request on stream 1, or its beginning."""
    peer = Peer(**how)
    peer.ask(1, end)
    return peer


def headers(stream_id: int, pairs: Any = REQUEST, end: bool = True) -> bytes:
    flags = f.END_HEADERS | (f.END_STREAM if end else 0)
    return f.frame(f.HEADERS, flags, stream_id, fields(pairs))


def data(stream_id: int, payload: bytes, end: bool = False, padding: int | None = None) -> bytes:
    flags = f.END_STREAM if end else 0
    if padding is None:
        return f.frame(f.DATA, flags, stream_id, payload)
    padded = bytes((padding,)) + payload + bytes(padding)
    return f.frame(f.DATA, flags | f.PADDED, stream_id, padded)
