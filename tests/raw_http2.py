"""HTTP/2 client that sends exactly the given frames."""

import socket
from collections.abc import Iterator
from typing import Any

from hpack import Decoder

from shmserve.frontends.http2 import PREFACE, encode_fields
from shmserve.frontends.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SETTINGS,
    frame_head,
)
from shmserve.frontends.http2.grpc_framing import prefix
from tests.running_server import WATCHDOG_S

INFER = "/inference.GRPCInferenceService/ModelInfer"


class RawClient:
    """A connection, frame by frame."""

    def __init__(self, target: str) -> None:
        host, port = target.split(":")
        self.sock = socket.create_connection((host, int(port)), WATCHDOG_S)
        self._file = self.sock.makefile("rb")
        self.decoder = Decoder()
        self.sock.sendall(PREFACE + frame_head(0, SETTINGS, 0, 0) + frame_head(0, SETTINGS, 1, 0))

    def send(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """Send one frame."""
        self.sock.sendall(frame_head(len(payload), kind, flags, stream_id) + payload)

    def call(self, data: bytes | None, stream_id: int = 1, **changed: str) -> None:
        fields = {
            ":method": "POST", ":scheme": "http", ":path": INFER, ":authority": "localhost",
            "content-type": "application/grpc", "te": "trailers",
        }  # fmt: skip
        fields |= {name.replace("_", "-"): value for name, value in changed.items()}
        block = encode_fields(tuple(fields.items()))
        sent = frame_head(len(block), HEADERS, END_HEADERS, stream_id) + block
        if data is not None:
            sent += frame_head(len(data), DATA, END_STREAM, stream_id) + data
        self.sock.sendall(sent)

    def infer(self, message: Any, stream_id: int = 1, **changed: str) -> None:
        """Call with one message, in frames of at most 16000 bytes."""
        data = framed(message)
        if len(data) <= 16000:
            self.call(data, stream_id, **changed)
            return
        self.call(None, stream_id, **changed)
        for start in range(0, len(data), 16000):
            self.send(DATA, start + 16000 >= len(data), stream_id, data[start : start + 16000])

    def answers(self) -> bool:
        """Return True if the next call is answered with success."""
        return (self.fields()[":status"], self.fields()["grpc-status"]) == ("200", "0")

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload, until the server closes."""
        while head := self._file.read(9):
            yield (
                head[3],
                head[4],
                int.from_bytes(head[5:9]),
                self._file.read(int.from_bytes(head[:3])),
            )

    def until(self, *kinds: int) -> tuple[int, int, int, bytes]:
        """Return the next frame of one of these kinds."""
        return next(frame for frame in self.frames() if frame[0] in kinds)

    def fields(self) -> dict[str, str]:
        """Return the fields of the next HEADERS."""
        for kind, _, _, payload in self.frames():
            if kind == HEADERS:
                return {str(name): str(value) for name, value in self.decoder.decode(payload)}
        raise AssertionError("the connection was closed")

    def close(self) -> None:
        self._file.close()
        self.sock.close()


def framed(message: Any) -> bytes:
    """Return a message as sent to a call."""
    data: bytes = message.SerializeToString()
    return prefix(len(data)) + data
