"""InferenceError: the exception for all failures of a call."""

LATE = "the server did not answer in time"
CLOSED = "the client is closed"


class InferenceError(Exception):
    """Request that ended without a result.

    Attributes:
        status: HTTP status; 0: no answer came (deadline, lost connection).
        message: the server's error message, or the client's own.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})" if status else message)
        self.status = status
        self.message = message
