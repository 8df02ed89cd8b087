"""Exceptions of `pb_utils`, `TritonError` and `TritonModelException`, and their error codes."""

from __future__ import annotations

from shmserve.errors import Code


class TritonModelException(Exception):
    """Exception for models to raise; also raised here if a model uses `pb_utils` wrongly."""


class TritonError:
    """Error with which a model answers one request."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message


# Other numbers mean INTERNAL
_CODES = {
    TritonError.UNKNOWN: Code.UNKNOWN,
    TritonError.NOT_FOUND: Code.NOT_FOUND,
    TritonError.INVALID_ARG: Code.INVALID_ARGUMENT,
    TritonError.UNAVAILABLE: Code.UNAVAILABLE,
    TritonError.UNSUPPORTED: Code.UNIMPLEMENTED,
    TritonError.ALREADY_EXISTS: Code.ALREADY_EXISTS,
    TritonError.CANCELLED: Code.CANCELLED,
}


_NUMBERS = {code: number for number, code in _CODES.items()} | {
    Code.RESOURCE_EXHAUSTED: TritonError.UNAVAILABLE,
    Code.DEADLINE_EXCEEDED: TritonError.UNAVAILABLE,
    Code.ABORTED: TritonError.UNAVAILABLE,
}


def of_code(code: Code) -> int:
    """Return the TritonError code for an error code of the server."""
    return _NUMBERS.get(code, TritonError.INTERNAL)


def to_code(code: int) -> Code:
    """Return the server's error code for a TritonError code."""
    return _CODES.get(code, Code.INTERNAL)
