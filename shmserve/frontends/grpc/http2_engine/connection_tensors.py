"""Messages of one connection whose tensors are received into slots, and memory for these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Protocol

from shmserve.core.memory.slots import Slot
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.frontends.http2.grpc_framing import FramingFailed, GrpcMessage


class TensorCalls(Protocol):
    """The calls whose messages these are."""

    def message(self, call: Http2Call, message: GrpcMessage) -> None:
        """One has come entirely."""
        ...

    def look(self, call: Http2Call) -> None:
        """A part of one has."""
        ...

    def refuse(self, call: Http2Call, failed: FramingFailed) -> None:
        """One is not taken."""
        ...


_WAIT_S = 2.0  # for memory; later it is received on the heap


class ConnectionTensors:
    """Of the loop's turn, in which nobody waits for memory: another one makes it.

    Args:
        serving: what all connections share.
        calls: are told of what becomes of messages.
        resume: has the connection receive again, after `waiting`.

    Attributes:
        expected: the latest message was such a one, or there was none.
        waiting: so many parts of what comes next have no place yet: nothing is to be received.
        receiving: streams whose message has not come entirely.
    """

    def __init__(
        self,
        serving: Serving,
        calls: TensorCalls,
        resume: Callable[[], None],
    ) -> None:
        self._loop = serving.loop
        self._growth = serving.growth
        self._calls = calls
        self._resume = resume
        self.waiting = 0
        self.receiving: set[int] = set()
        self.expected = True

    def look(self, call: Http2Call) -> None:
        """After something of a call's messages has come: see to the memory it wants."""
        message = call.reader.receiving if call.reader is not None else None
        if not isinstance(message, TensorMessage):
            self.forget(call)
            return
        self.receiving.add(call.stream_id)
        if message.wanted and not message.asked:
            message.asked = True
            self.waiting += 1
            until = monotonic() + _WAIT_S
            self._growth.submit(self._grow, call, message, until)

    def forget(self, call: Http2Call) -> None:
        """It has no such message, or has ended."""
        self.receiving.discard(call.stream_id)

    def _grow(self, call: Http2Call, message: TensorMessage, until: float) -> None:
        slot = None
        try:
            if call.is_active() and monotonic() < until:
                slot = message.grow()
        finally:
            self._loop.post(partial(self._grown, call, message, slot))

    def _grown(self, call: Http2Call, message: TensorMessage, slot: Slot | None) -> None:
        self.waiting -= 1
        try:
            message.grown(slot)
            whole = call.reader.complete() if call.reader is not None else None
            if whole is not None:
                self._calls.message(call, whole)
            self._calls.look(call)
        except FramingFailed as failed:
            self._calls.refuse(call, failed)
        if not self.waiting:
            self._resume()
