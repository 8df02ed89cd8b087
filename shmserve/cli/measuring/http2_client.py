"""Client's side of an HTTP/2 connection with a single request at a time. Pure: the owner feeds the
received bytes, and sends the bytes of `outgoing` and `request_frames`.

The client announces a header table of size 0, so header blocks have no state: equal blocks mean
equal fields, which are decoded once.
"""

import hpack

from shmserve.frontends.http2 import PREFACE, frames

_MOST_FRAME = 1 << 20  # bytes of a frame that the server may send
_ACKNOWLEDGED = 1 << 30  # received bytes after which a window is opened again
_MOST_KNOWN = 64
_ANNOUNCED = {
    frames.HEADER_TABLE_SIZE: 0,
    frames.ENABLE_PUSH: 0,
    frames.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW,
    frames.MAX_FRAME_SIZE: _MOST_FRAME,
}


class Http2Client:
    """Connection, with the answer to the latest request.

    Attributes:
        outgoing: bytes to send before any others.
        is_closing: the server takes no further request.
        fields: header fields and trailers of the answer so far.
        content: bytes of the answer, not yet taken out by the owner.
        ended: True once the answer is complete, or will not come.
        failure: reason why the answer will not come; "": no such reason.
    """

    def __init__(self) -> None:
        self.outgoing = b"".join(
            [
                PREFACE,
                frames.settings(_ANNOUNCED),
                frames.window_update(0, frames.LARGEST_WINDOW - frames.DEFAULT_WINDOW),
            ]
        )
        self.is_closing = False
        self._decoder = hpack.Decoder()
        self._decoder.max_allowed_table_size = self._decoder.header_table_size = 0
        self._known: dict[bytes, dict[str, str]] = {}
        self._buffer, self._needed = bytearray(), frames.HEAD_BYTES
        self._block, self._ends_stream = b"", False
        self._window = self._initial_window = frames.DEFAULT_WINDOW
        self._max_frame = frames.DEFAULT_FRAME_BYTES
        self._unacknowledged = [0, 0]  # of the connection, of the stream
        self._stream_id = -1
        self._reset()

    def begin(self, block: bytes) -> bytes:
        """Begin a request. Return the frame with the header block."""
        self._stream_id += 2
        self._reset()
        return frames.frame(frames.HEADERS, frames.END_HEADERS, self._stream_id, block)

    def _reset(self) -> None:
        self.fields: dict[str, str] = {}
        self.content = bytearray()
        self.ended, self.failure = False, ""
        self._stream_window = self._initial_window
        self._unacknowledged[1] = 0

    def data_frame(self, body: memoryview) -> tuple[bytes, int]:
        """Return a frame with as much of the rest of the body as the server takes, and the number
        of bytes of the body in the frame; no frame and 0: the server must open a window first."""
        size = min(len(body), self._max_frame, self._window, self._stream_window)
        if size <= 0:
            return b"", 0
        self._window -= size
        self._stream_window -= size
        flags = frames.END_STREAM if size == len(body) else 0
        head = frames.frame_head(size, frames.DATA, flags, self._stream_id)
        return b"".join([head, body[:size]]), size

    def cancel(self) -> None:
        """End the request before its answer is complete."""
        self.outgoing += frames.rst_stream(self._stream_id, frames.ErrorCode.CANCEL)
        self.ended = True

    def feed(self, data: bytes) -> None:
        """Take received bytes. Raise ConnectionError if they are no frames of HTTP/2."""
        buffer, position = self._buffer, 0
        buffer += data
        if len(buffer) < self._needed:
            return
        while (have := len(buffer) - position) >= frames.HEAD_BYTES:
            high, low, kind, flags, stream_id = frames.unpack_head(buffer, position)
            end = frames.HEAD_BYTES + (high << 8 | low)
            if have < end:
                break
            payload = bytes(buffer[position + frames.HEAD_BYTES : position + end])
            self._take(kind, flags, stream_id & frames.LARGEST_STREAM_ID, payload)
            position += end
        del buffer[:position]
        self._needed = end if have >= frames.HEAD_BYTES else frames.HEAD_BYTES
        if self._needed > frames.HEAD_BYTES + _MOST_FRAME:
            raise ConnectionError("the server does not speak HTTP/2")

    def _take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.DATA:
            self._take_data(flags, stream_id, payload)
        elif kind in (frames.HEADERS, frames.CONTINUATION):
            self._take_block(kind, flags, stream_id, payload)
        elif kind == frames.WINDOW_UPDATE:
            increment = int.from_bytes(payload)
            if not stream_id:
                self._window += increment
            elif stream_id == self._stream_id:
                self._stream_window += increment
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(payload)
        elif kind == frames.PING and not flags & frames.ACK:
            self.outgoing += frames.ping(payload, frames.ACK)
        elif kind == frames.RST_STREAM and stream_id == self._stream_id:
            self._fail(f"the server reset the stream, error code {int.from_bytes(payload)}")
        elif kind == frames.GOAWAY:
            self.is_closing = True
            if int.from_bytes(payload[:4]) < self._stream_id:
                self._fail("the server took no further request over this connection")

    def _take_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        self._open_window(0, len(payload))
        if stream_id == self._stream_id and not self.ended:
            self._open_window(stream_id, len(payload))
            self.content += _unpadded(flags, payload)
            self.ended = bool(flags & frames.END_STREAM)

    def _open_window(self, stream_id: int, nbytes: int) -> None:
        """Let the server send on, after `nbytes` more of the connection (0) or the stream."""
        nbytes += self._unacknowledged[stream_id > 0]
        if nbytes >= _ACKNOWLEDGED:
            self.outgoing += frames.window_update(stream_id, nbytes)
            nbytes = 0
        self._unacknowledged[stream_id > 0] = nbytes

    def _take_block(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            payload = _unpadded(flags, payload)
            if flags & frames.PRIORITY_FLAG:
                payload = payload[5:]
            self._block, self._ends_stream = b"", bool(flags & frames.END_STREAM)
        self._block += payload
        if not flags & frames.END_HEADERS:
            return
        fields = self._known.get(self._block)
        if fields is None:
            try:
                decoded = self._decoder.decode(self._block)
                fields = {str(name): str(value) for name, value in decoded}
            except hpack.HPACKError:
                raise ConnectionError("a header block cannot be decoded") from None
            if len(self._known) < _MOST_KNOWN:
                self._known[self._block] = fields
        if stream_id == self._stream_id and not self.ended:
            self.fields |= fields
            self.ended = self._ends_stream

    def _take_settings(self, payload: bytes) -> None:
        values = dict(frames.read_settings(payload))
        self._max_frame = values.get(frames.MAX_FRAME_SIZE, self._max_frame)
        initial = values.get(frames.INITIAL_WINDOW_SIZE, self._initial_window)
        self._stream_window += initial - self._initial_window
        self._initial_window = initial
        self.outgoing += frames.SETTINGS_ACK

    def _fail(self, reason: str) -> None:
        if not self.ended:
            self.ended, self.failure = True, reason


def _unpadded(flags: int, payload: bytes) -> bytes:
    if not flags & frames.PADDED or not payload:
        return payload
    return payload[1 : len(payload) - payload[0]]
