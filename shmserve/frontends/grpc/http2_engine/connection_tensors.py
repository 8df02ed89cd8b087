"""Messages of one connection whose tensors are received into slots, and memory for these."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import monotonic

from shmserve.core.memory.slots import Slot
from shmserve.frontends.grpc.http2_engine.http2_call import Http2Call
from shmserve.frontends.grpc.http2_engine.serving import Serving
from shmserve.frontends.grpc.tensor_message import TensorMessage
from shmserve.frontends.http2.grpc_framing import GrpcMessage

_WAIT_S = 2.0  # for memory; later it is received on the heap


class ConnectionTensors:
    """Of the loop's thread, which does not wait for memory: another one makes it.

    Args:
        serving: what all connections share.
        complete: takes a message that has come entirely.
        resume: has the connection receive again, after `waiting`.

    Attributes:
        expected: the latest message was such a one, or there was none.
        waiting: what comes next has no place yet: nothing is to be received.
        receiving: one has not come entirely.
    """

    def __init__(
        self,
        serving: Serving,
        complete: Callable[[Http2Call, GrpcMessage], None],
        resume: Callable[[], None],
    ) -> None:
        self._loop = serving.loop
        self._growth = serving.growth
        self._complete = complete
        self._resume = resume
        self._growing = 0
        self._receiving: set[int] = set()
        self.expected = True

    @property
    def waiting(self) -> bool:
        return self._growing > 0

    @property
    def receiving(self) -> bool:
        return bool(self._receiving)

    def look(self, call: Http2Call) -> None:
        """After something of a call's messages has come: see to the memory it wants."""
        message = call.reader.receiving if call.reader is not None else None
        if not isinstance(message, TensorMessage):
            self.forget(call)
            return
        self._receiving.add(call.stream_id)
        if message.wanted and not message.asked:
            message.asked = True
            self._growing += 1
            until = monotonic() + _WAIT_S
            self._growth.submit(self._grow, call, message, until)

    def forget(self, call: Http2Call) -> None:
        """It has no such message, or has ended."""
        self._receiving.discard(call.stream_id)

    def _grow(self, call: Http2Call, message: TensorMessage, until: float) -> None:
        slot = None
        try:
            if call.is_active() and monotonic() < until:
                slot = message.grow()
        finally:
            self._loop.post(partial(self._grown, call, message, slot))

    def _grown(self, call: Http2Call, message: TensorMessage, slot: Slot | None) -> None:
        self._growing -= 1
        message.grown(slot)
        whole = call.reader.complete() if call.reader is not None else None
        if whole is not None:
            self._complete(call, whole)
        self.look(call)
        if not self.waiting:
            self._resume()
