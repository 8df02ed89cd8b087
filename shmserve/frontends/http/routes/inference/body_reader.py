"""Readers of request bodies for inferences: in order, in exact amounts.

A body of known length is read straight from ``wsgi.input``. Tensors are read with `readinto` into
their slots if the server offers `readinto`, as the worker class of this server does. A chunked or
compressed body has no length beforehand. Such a body is read piece by piece, never further than
the part being filled, so a decompression bomb meets a limit first.
"""

from collections.abc import Iterator
from io import BytesIO
from typing import Any

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, TooLarge, UnsupportedEncoding
from shmserve.frontends.heap_budget import BUDGET, FREE
from shmserve.frontends.http.routes.inference.body_heap import JSON_COST, BodyHeap
from shmserve.frontends.inflating import STEP_BYTES, inflated

MAX_SMALL_BODY_BYTES = 64 << 10  # limit for requests without tensors or files
_COPY = 1 << 20  # bytes per read where `readinto` cannot be used

Environ = dict[str, Any]
Buffer = bytes | memoryview
_NOTHING = memoryview(b"")


class KnownLengthReader:
    """Reader of a body whose length is given by Content-Length. `remaining`: bytes left."""

    __slots__ = ("_heap", "_stream", "remaining")

    def __init__(self, stream: Any, length: int, heap: BodyHeap) -> None:
        self._stream = stream
        self._heap = heap
        self.remaining: int | None = length

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes of JSON. Raise InvalidArgument if the body ends before. Raise
        TooLarge or Unavailable if the heap has no room for the bytes (`heap_budget`)."""
        assert self.remaining is not None
        if size > self.remaining:
            raise _short(size, self.remaining)
        if size > FREE:
            return self._read_large(size, JSON_COST)
        data: bytes = self._stream.read(size)
        if len(data) != size:
            raise _short(size, len(data))
        self.remaining -= size
        return data

    def read_rest(self, limit: int, setting: str, cost: int = JSON_COST) -> bytes:
        """Return the rest of the body.

        Args:
            limit: largest number of bytes.
            setting: name of the setting with this limit, for messages; "": a fixed limit.
            cost: bytes of heap charged per byte.

        Raises:
            TooLarge: the rest exceeds `limit` or the heap's budget.
            Unavailable: other requests use the heap's budget now.
        """
        assert self.remaining is not None
        if self.remaining > limit:
            raise _too_large(self.remaining, limit, setting, cost)
        if self.remaining <= FREE:
            return self.read(self.remaining)
        return self._read_large(self.remaining, cost)

    def _read_large(self, size: int, cost: int) -> bytes:
        assert self.remaining is not None
        gathered = BytesIO()
        pieces = iter(lambda: self._stream.read(min(size - gathered.tell(), _COPY)), b"")
        _gather(pieces, gathered, self._heap, cost)
        if gathered.tell() != size:
            raise _short(size, gathered.tell())
        self.remaining -= size
        return gathered.getvalue()

    def fill(self, view: memoryview) -> int:
        """Fill all of `view`, with the errors of `read`. Return the number of copied bytes."""
        assert self.remaining is not None
        size = len(view)
        if size > self.remaining:
            raise _short(size, self.remaining)
        readinto = getattr(self._stream, "readinto", None)
        if readinto is None:
            for start in range(0, size, _COPY):
                part = view[start : start + _COPY]
                part[:] = self.read(len(part))
            return size
        before = getattr(self._stream, "copied", 0)
        count = readinto(view) if size else 0
        if count != size:
            raise _short(size, count)
        self.remaining -= size
        copied: int = getattr(self._stream, "copied", 0) - before
        return copied

    def at_end(self) -> bool:
        return self.remaining == 0


class PieceReader:
    """Reader of a body in pieces, mostly of unknown length. Methods as in `KnownLengthReader`.
    `remaining`: bytes left; None if the length is unknown."""

    __slots__ = ("_heap", "_left", "_limit", "_piece", "_pieces", "remaining")

    def __init__(
        self,
        pieces: Iterator[bytes],
        limit: int,
        length: int | None = None,
        heap: BodyHeap | None = None,
    ) -> None:
        self._pieces = pieces
        self._heap = heap
        self._piece = memoryview(b"")
        self._limit = self._left = limit
        self.remaining = length

    def read(self, size: int) -> bytes:
        gathered = BytesIO()
        pieces = iter(lambda: self._next(size - gathered.tell()), b"")
        _gather(pieces, gathered, self._heap, JSON_COST)
        if gathered.tell() != size:
            raise _short(size, gathered.tell())
        return gathered.getvalue()

    def read_rest(self, limit: int, setting: str, cost: int = JSON_COST) -> bytes:
        gathered = BytesIO()
        pieces = iter(lambda: self._next(limit + 1 - gathered.tell()), b"")
        _gather(pieces, gathered, self._heap, cost)
        if gathered.tell() > limit:
            raise _too_large(None, limit, setting, cost)
        return gathered.getvalue()

    def fill(self, view: memoryview) -> int:
        position, size = 0, len(view)
        while position < size and (part := self._next(size - position)):
            view[position : position + len(part)] = part
            position += len(part)
        if position < size:
            raise _short(size, position)
        return size

    def at_end(self) -> bool:
        if not self._piece:
            self._piece = memoryview(next(self._pieces, b""))
        return not self._piece

    def _next(self, size: int) -> memoryview:
        if not size or self.at_end():
            return _NOTHING
        part, self._piece = self._piece[:size], self._piece[size:]
        self._left -= len(part)
        if self._left < 0:
            raise _too_large(None, self._limit, "max_request_bytes", 0)
        if self.remaining is not None:
            self.remaining -= len(part)
        return part


BodyReader = KnownLengthReader | PieceReader


def _gather(pieces: Iterator[Buffer], into: BytesIO, heap: BodyHeap | None, cost: int) -> None:
    """Gather all pieces, and charge the heap as they arrive."""
    for piece in pieces:
        into.write(piece)
        if heap is not None and into.tell() > FREE:
            heap.take(len(piece) * cost)


def held(data: bytes) -> BodyReader:
    """Return a reader of a body already in memory."""
    return PieceReader(iter((data,)), len(data), len(data))


def open_body(environ: Environ, limits: Settings) -> BodyReader:
    """Return a reader of the body of a request. Raise InvalidArgument if the length is no number.
    Raise TooLarge if Content-Length exceeds `max_request_bytes`. Raise UnsupportedEncoding for a
    Content-Encoding other than gzip and deflate."""
    stream = environ["wsgi.input"]
    text = environ.get("CONTENT_LENGTH")
    heap = BodyHeap(environ, limits, BUDGET)
    coding = environ.get("HTTP_CONTENT_ENCODING")
    chunked = "HTTP_TRANSFER_ENCODING" in environ
    if chunked:
        pieces = iter(lambda: stream.read(STEP_BYTES), b"")
        if not coding:
            return PieceReader(pieces, limits.max_request_bytes, heap=heap)
    else:
        length = 0  # a request without length and chunks has no body, as with `curl -X POST`
        if text:
            if not (text.isdecimal() and text.isascii()) or len(text) > 19:
                raise InvalidArgument(f"Content-Length must be a number, got {text[:64]}")
            length = int(text)
            if length > limits.max_request_bytes:
                raise TooLarge(
                    f"the request body of {length} bytes is larger than"
                    f" {limits.max_request_bytes} bytes (setting max_request_bytes)"
                )
        if not coding:
            return KnownLengthReader(stream, length, heap)
        pieces = _bounded(stream, length)
    if coding := _coding(coding or ""):
        pieces = inflated(pieces, coding, "the request body")
    return PieceReader(pieces, limits.max_request_bytes, heap=heap)


def small_body(environ: Environ, limits: Settings) -> bytes:
    """Return the whole body of a request without tensors and files. Raise TooLarge if the body
    exceeds `MAX_SMALL_BODY_BYTES`."""
    return open_body(environ, limits).read_rest(MAX_SMALL_BODY_BYTES, "")


def header_length(environ: Environ, reader: BodyReader) -> int | None:
    """Return the JSON part's length in bytes, from `Inference-Header-Content-Length`: None if the
    whole body is JSON, 0 if there is no JSON. Raise InvalidArgument if the length is no integer, or
    exceeds the body."""
    text: str | None = environ.get("HTTP_INFERENCE_HEADER_CONTENT_LENGTH")
    if text is None:
        return None
    digits = text.strip()
    if not (digits.removeprefix("-").isdecimal() and digits.isascii()):
        # A field sent twice is joined with a comma, and so is refused here.
        raise InvalidArgument(f"Unable to parse Inference-Header-Content-Length, got: {text[:64]}")
    value = int(digits) if len(digits) < 20 else -1
    total = reader.remaining
    if value < 0 or (total is not None and value > total):
        raise InvalidArgument(
            f"inference header size should be in range (0, {total}), got: {digits[:64]}"
            if total is not None
            else f"inference header size should not be negative, got: {digits[:64]}"
        )
    return value


def _bounded(stream: Any, length: int) -> Iterator[bytes]:
    while length > 0:
        data = stream.read(min(length, STEP_BYTES))
        if not data:
            raise _short(length, 0)
        length -= len(data)
        yield data


def _coding(header: str) -> str:
    """Return the coding of a Content-Encoding field: "gzip", "deflate" or "" for identity."""
    coding = header.strip().lower()
    if coding in ("", "identity"):
        return ""
    if coding in ("gzip", "x-gzip"):
        return "gzip"
    if coding == "deflate":
        return coding
    raise UnsupportedEncoding(
        f"Unsupported compression type '{header[:64]}': use one of gzip, deflate"
    )


def _short(expected: int, got: int) -> InvalidArgument:
    return InvalidArgument(f"the request body ended early: expected {expected} bytes, got {got}")


def _too_large(size: int | None, limit: int, setting: str, cost: int) -> TooLarge:
    what = "request JSON size" if cost == JSON_COST else "request body size"
    shown = "" if size is None else f" of {size} bytes"
    source = f" (setting {setting})" if setting else ""
    return TooLarge(
        f"{what}{shown} exceeds the maximum allowed input size of {limit} bytes. It exceeds the"
        f" maximum allowed value of {limit} bytes{source}"
    )
