"""Span channel: takes spans from serving processes to the exporter.

Requests never wait for the channel. A process sends spans in its maintenance, for half a second at
most. Without an exporter, or without room, the process drops the spans and counts them. The
exporter's queue is bounded as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import islice

from shmserve.errors import PeerDied
from shmserve.protocol.control.span_messages import Span, Spans, encode
from shmserve.transport import rundir
from shmserve.transport.channel import MAX_MESSAGE, Channel

_CONNECT_S = 0.5
_ROOM_S = 0.5  # limit of one flush, which waits for the exporter to read
_TICK_S = 0.005
_MOST_TOGETHER = 100  # spans in one message


class SpanSender:
    """Sender of spans, for one thread of a process. `dropped`: number of unsent spans so far."""

    def __init__(self, run_dir: str) -> None:
        self._path = os.path.join(run_dir, rundir.EXPORTER_SOCKET)
        self._channel: Channel | None = None
        self._untold = 0  # dropped spans that the exporter was not told of
        self.dropped = 0

    def send(self, spans: Sequence[Span]) -> None:
        """Send spans, or drop them."""
        deadline = time.monotonic() + _ROOM_S
        ahead = iter(spans)
        while some := tuple(islice(ahead, _MOST_TOGETHER)):
            self._send(some, deadline)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _send(self, spans: tuple[Span, ...], deadline: float) -> None:
        data = encode(Spans(spans, self._untold))
        if len(data) > MAX_MESSAGE and len(spans) > 1:
            half = len(spans) // 2
            self._send(spans[:half], deadline)
            self._send(spans[half:], deadline)
        elif len(data) <= MAX_MESSAGE and self._pass(data, deadline):
            self._untold = 0
        else:
            self._untold += len(spans)
            self.dropped += len(spans)

    def _pass(self, data: bytes, deadline: float) -> bool:
        try:
            if self._channel is None:
                self._channel = Channel.connect(self._path, _CONNECT_S)
            while not self._channel.send(data, wait=False):
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_TICK_S)
        except PeerDied:
            self.close()
            return False
        return True
