"""Answers sent piece by piece, as the model makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from falcon import Response


class _Chunks:
    """A body sent piece by piece. `close` calls `on_close` once, even if no piece was taken."""

    __slots__ = ("_on_close", "_pieces")

    def __init__(self, pieces: Iterator[bytes], on_close: Callable[[], object]) -> None:
        self._pieces = pieces
        self._on_close: Callable[[], object] | None = on_close

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


def send_chunks(
    resp: Response, first: bytes, rest: Iterator[bytes], on_close: Callable[[], object]
) -> None:
    """Stream pieces as the response's body. The server calls `on_close` after the last byte, or
    when the client is gone."""
    resp.stream = _Chunks(chain((first,) if first else (), rest), on_close)
