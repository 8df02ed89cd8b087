"""Answers that are sent piece by piece, as a model gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from falcon import Response


class _Chunks:
    """A body that is sent piece by piece; `close` comes also to one that was never begun."""

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
    """Hand a stream to the server, which calls `on_close` when its last byte is out, or its
    client is gone."""
    resp.stream = _Chunks(chain((first,) if first else (), rest), on_close)
