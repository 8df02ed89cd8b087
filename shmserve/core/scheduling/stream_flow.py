"""The life of one stream of answers in an executor, and how far it may run ahead.

Pure: threads, time and bytes are the business of `executor.loop.response_stream`. A stream is
shared by three parties: the model sends, the frontend grants credit or loses interest,
the server ends what the model cannot end any more.
"""

from __future__ import annotations

from enum import Enum

from shmserve.errors import ProtocolViolation


class StreamState(Enum):
    OPEN = "OPEN"  # the model sends, the frontend reads
    MUTED = "MUTED"  # nobody reads any more: what is sent is dropped until the model is done
    CLOSED = "CLOSED"  # the model has sent its final flag
    FAILED = "FAILED"  # the server has ended it; the model may not know yet


class StreamEvent(Enum):
    """What happens to a stream, and who does it."""

    SEND = "SEND"  # the model: an answer that is not the last
    FINISH = "FINISH"  # the model: the final flag, with or without an answer
    MUTE = "MUTE"  # the frontend cancelled, died, or took nothing for too long
    FAIL = "FAIL"  # the model raised, or let go of the stream without its final flag


TRANSITIONS: dict[StreamState, dict[StreamEvent, StreamState]] = {
    StreamState.OPEN: {
        StreamEvent.SEND: StreamState.OPEN,
        StreamEvent.FINISH: StreamState.CLOSED,
        StreamEvent.MUTE: StreamState.MUTED,
        StreamEvent.FAIL: StreamState.FAILED,
    },
    StreamState.MUTED: {
        StreamEvent.SEND: StreamState.MUTED,
        StreamEvent.FINISH: StreamState.CLOSED,
        StreamEvent.MUTE: StreamState.MUTED,
        StreamEvent.FAIL: StreamState.FAILED,
    },
    StreamState.CLOSED: {  # sending is the model's mistake
        StreamEvent.MUTE: StreamState.CLOSED,
        StreamEvent.FAIL: StreamState.CLOSED,
    },
    StreamState.FAILED: {
        StreamEvent.SEND: StreamState.FAILED,
        StreamEvent.FINISH: StreamState.FAILED,
        StreamEvent.MUTE: StreamState.FAILED,
        StreamEvent.FAIL: StreamState.FAILED,
    },
}

_LIVE = (StreamState.OPEN, StreamState.MUTED)


class Gate(Enum):
    """What becomes of an answer that the model wants to send now."""

    GO = "GO"  # it is on its way
    WAIT = "WAIT"  # the frontend must take earlier ones first
    DROP = "DROP"  # nobody wants it


class Flow:
    """One stream. Not thread-safe: its owner locks."""

    def __init__(self, credit: int) -> None:
        self.state = StreamState.OPEN
        self.credit = credit  # answers that may still be sent
        self._limit = credit

    @property
    def live(self) -> bool:
        """Whether the model still owes its final flag."""
        return self.state in _LIVE

    def apply(self, event: StreamEvent) -> bool:
        """Move on; whether the state is another one now.

        Raises:
            ProtocolViolation: the model sends after its final flag.
        """
        before = self.state
        target = TRANSITIONS[before].get(event)
        if target is None:
            raise ProtocolViolation(f"{event.value} of a stream that is {before.value}")
        self.state = target
        return target is not before

    def send(self, full: bool, final: bool) -> Gate:
        """The model sends. `full`: with an answer, not just the final flag.

        Every answer takes a credit; a bare final flag needs none.

        Raises:
            ProtocolViolation: it had sent its final flag before.
        """
        if self.state is StreamState.OPEN and full and not self.credit:
            return Gate.WAIT
        before = self.state
        self.apply(StreamEvent.FINISH if final else StreamEvent.SEND)
        if before is StreamState.OPEN:
            self.credit -= full
            return Gate.GO
        # The end of a muted stream is told: somebody keeps its inputs until then.
        return Gate.GO if final and before is StreamState.MUTED else Gate.DROP

    def grant(self, answers: int) -> None:
        """The frontend has consumed answers.

        Raises:
            ProtocolViolation: more than were sent.
        """
        if answers < 0 or self.credit + answers > self._limit:
            raise ProtocolViolation(f"credit for {answers} answers that were not sent")
        self.credit += answers
