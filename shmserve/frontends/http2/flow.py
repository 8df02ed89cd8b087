"""Flow control of what the client sends to the connection as a whole."""

from __future__ import annotations

from shmserve.frontends.http2 import frames
from shmserve.frontends.http2.output import OutgoingBytes


class ReceiveWindow:
    """How much DATA the client may send; given back in halves, as it is consumed.

    Args:
        size: bytes.
        output: where WINDOW_UPDATE goes.
    """

    __slots__ = ("_half", "_output", "_returned", "left")

    def __init__(self, size: int, output: OutgoingBytes) -> None:
        self._output = output
        self._half = size // 2
        self._returned = 0
        self.left = size
        if size > frames.DEFAULT_WINDOW:
            output.add(frames.window_update(0, size - frames.DEFAULT_WINDOW))

    def give_back(self, count: int) -> None:
        self._returned += count
        if self._returned >= self._half:
            self._output.add(frames.window_update(0, self._returned))
            self.left += self._returned
            self._returned = 0
