"""Chunked request bodies: gunicorn's reader, with limits."""

import sys
from collections.abc import Iterator
from math import inf
from time import monotonic
from typing import Any

from gunicorn.http.body import ChunkedReader
from gunicorn.http.errors import NoMoreData, ParseException
from gunicorn.http.unreader import Unreader

from shmserve.errors import InvalidArgument
from shmserve.frontends.http.server.request_body import BODY, RequestBody, Source, too_large

_PIECE = 1 << 20
MAX_CHUNKS = 65536


class _BoundedChunks(ChunkedReader):  # type: ignore[misc]
    """gunicorn's reader of chunked bodies, with a limit on the number of chunks."""

    def __init__(self, request: Any, unreader: Unreader) -> None:
        super().__init__(request, unreader)
        self._count = 0

    def parse_chunk_size(self, unreader: Unreader, data: bytes | None = None) -> Any:
        self._count += 1
        if self._count > MAX_CHUNKS + 1:  # the empty last chunk is free
            raise InvalidArgument(f"the chunked request body has more than {MAX_CHUNKS} chunks")
        return super().parse_chunk_size(unreader, data)


class ChunkedBody(RequestBody):
    """A chunked body, limited in chunks and bytes, and always copied.

    Args:
        source: the connection.
        request: gunicorn's request, with header limits and trailers.
        unreader: source of the chunks.
        expects: whether the client waits for ``100 Continue``.
    """

    __slots__ = ("_pieces", "_total")

    def __init__(
        self, source: Source, request: Any, unreader: Unreader, expects: bool = False
    ) -> None:
        super().__init__(source, expects=expects)
        self._pieces: Iterator[bytes] = _BoundedChunks(request, unreader).parser
        self._total = 0
        self.finished = False

    def _receive(self, want: int) -> bytes:
        if self.finished or self.failed:
            return b""
        settings = self._source.settings
        try:
            if self._until == inf:
                self._extend()
            while True:
                earned = self._until + self._total / settings.min_bytes_per_s
                self._source.wait(BODY, min(earned - monotonic(), settings.body_timeout_s))
                data = next(self._pieces, None)
                if data is None:
                    self.finished = True
                    return b""
                self._total += len(data)
                if self._total > settings.max_request_bytes:
                    raise too_large(settings)
                if data:
                    return data
        except (NoMoreData, OSError):
            self._fail()
        except ParseException:
            self._fail()
            raise InvalidArgument("the chunked framing of the request body is malformed") from None
        except InvalidArgument:
            self._fail()
            raise
        finally:
            self._source.watch = None
        return b""

    def readinto(self, view: memoryview) -> int:
        view = memoryview(view).cast("B")
        filled, size = 0, len(view)
        while filled < size and (data := self._next(size - filled)):
            taken = min(len(data), size - filled)
            view[filled : filled + taken] = data[:taken]
            if taken < len(data):
                self._put_back(data[taken:])
            filled += taken
        self.copied += filled
        return filled

    def _discard(self) -> int:
        return len(self._receive(_PIECE)) or sys.maxsize
