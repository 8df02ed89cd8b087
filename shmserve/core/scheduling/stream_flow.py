"""Stream flow: the life of one response stream in an executor, and its credit.

Pure: `executor.loop.response_stream` handles threads, time and bytes. Three parties share a
stream: the model sends, the frontend grants credit or cancels, the server ends a stream which the
model can no longer end.
"""

from enum import Enum

from shmserve.errors import ProtocolViolation


class StreamState(Enum):
    OPEN = "OPEN"  # the model sends, the frontend reads
    MUTED = "MUTED"  # no reader: answers are dropped until the model is done
    CLOSED = "CLOSED"  # the model has sent its final flag
    FAILED = "FAILED"  # the server has ended the stream; the model may not know yet


class StreamEvent(Enum):
    """Event of a stream, with its originator."""

    SEND = "SEND"  # the model: an answer that is not the last
    FINISH = "FINISH"  # the model: the final flag, with or without an answer
    MUTE = "MUTE"  # the frontend cancelled, died, or read nothing for too long
    FAIL = "FAIL"  # the model raised, or dropped the stream without its final flag


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
    """Decision about an answer which the model wants to send now."""

    GO = "GO"  # the answer is sent
    WAIT = "WAIT"  # the frontend must take earlier ones first
    DROP = "DROP"  # the answer has no reader


class Flow:
    """State and credit of one stream. Not thread-safe: the owner locks."""

    def __init__(self, credit: int) -> None:
        self.state = StreamState.OPEN
        self.credit = credit  # answers that may still be sent
        self._limit = credit

    @property
    def live(self) -> bool:
        """True if the model still owes the final flag."""
        return self.state in _LIVE

    def apply(self, event: StreamEvent) -> bool:
        """Apply an event. Return True if the state has changed, else False. Raise ProtocolViolation
        if the model sends after its final flag."""
        before = self.state
        target = TRANSITIONS[before].get(event)
        if target is None:
            raise ProtocolViolation(f"{event.value} of a stream that is {before.value}")
        self.state = target
        return target is not before

    def send(self, full: bool, final: bool) -> Gate:
        """Decide about an answer, or a bare final flag, of the model. `full`: True if an answer is
        included.

        Every answer takes a credit; a bare final flag needs none.

        Raise ProtocolViolation if the model has sent its final flag before.
        """
        if self.state is StreamState.OPEN and full and not self.credit:
            return Gate.WAIT
        before = self.state
        self.apply(StreamEvent.FINISH if final else StreamEvent.SEND)
        if before is StreamState.OPEN:
            self.credit -= full
            return Gate.GO
        # The end of a muted stream is sent: the requesting process keeps the inputs until then.
        return Gate.GO if final and before is StreamState.MUTED else Gate.DROP

    def grant(self, answers: int) -> None:
        """Add credit for answers consumed by the frontend. Raise ProtocolViolation if the credit
        exceeds the number of sent answers."""
        if answers < 0 or self.credit + answers > self._limit:
            raise ProtocolViolation(f"credit for {answers} answers that were not sent")
        self.credit += answers
