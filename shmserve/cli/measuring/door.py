"""Door: the interface of `shmserve measure` to a transport."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

from shmserve.errors import Unavailable

Receipt = Mapping[str, Any]
Answered = Callable[[int], None]
"""Function to call as soon as an answer has arrived, with the answer's size in bytes."""

WAIT_S = 60.0  # for the last answer to a request


class FailedRequest(Unavailable):
    """Request without a complete answer. `status`: HTTP status or name of a gRPC status; "": the
    failure has no status."""

    def __init__(self, status: str, message: str) -> None:
        super().__init__(message)
        self.status = status


class Door(Protocol):
    """Connection of a single caller, who repeats a single request; a context manager."""

    def send(self, answered: Answered, receipt: bool = False) -> Receipt:
        """Send the request, and wait for all answers. Return the receipt if `receipt` is set and
        the transport has one, else an empty mapping. Raise FailedRequest if the request failed, or
        Unavailable if requests do not go over this transport."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
