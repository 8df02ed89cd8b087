"""A response body made of buffers that are somebody else's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


class BufferBody:
    """Buffers to send as they are, and what to do once they are not needed any more.

    The connection worker sends `buffers` together with the head in one system call.
    Any other WSGI server iterates the object, which copies, and calls `close`.

    Args:
        buffers: the body's parts in order; they stay valid until `close`.
        on_close: called exactly once, after the last byte went out or the client was lost.
    """

    __slots__ = ("_on_close", "buffers")

    def __init__(
        self,
        buffers: Sequence[bytes | memoryview],
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self.buffers = buffers
        self._on_close = on_close

    def __iter__(self) -> Iterator[bytes]:
        for buffer in self.buffers:
            yield bytes(buffer)

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()
