"""The one error that callers of the client see."""

from __future__ import annotations

LATE = "the server did not answer in time"
CLOSED = "the client is closed"


class InferenceError(Exception):
    """A request that was not answered with a result.

    Attributes:
        status: the HTTP status; 0: no answer came (a deadline, a lost connection).
        message: what the server says.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})" if status else message)
        self.status = status
        self.message = message
