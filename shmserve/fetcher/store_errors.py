"""Errors of the stores' libraries, in words.

Only the kind of a library's error and the HTTP status are told, because texts of libraries may
contain signed addresses and keys.
"""

import os
from collections.abc import Mapping

from shmserve.errors import ShmserveError, Unavailable


def told(ex: Exception, what: str) -> ShmserveError:
    """Return the error to raise for an exception of a library."""
    if isinstance(ex, ShmserveError):
        return type(ex)(f"{what}: {ex.message}")
    return Unavailable(f"{what}: {_reason(ex)}")


def _reason(ex: BaseException) -> str:
    names = {kind.__name__ for error in (ex, ex.__cause__) for kind in type(error).__mro__}
    status, redirected = _status(ex), bool(getattr(ex, "history", ()))
    if isinstance(ex, FileNotFoundError) or (status == 404 and not redirected):
        return "it is not there"
    if (
        isinstance(ex, PermissionError)
        or names & _REFUSED
        or (status in (401, 403) and not redirected)
    ):
        return "the store refuses access, or has been shown no credentials"
    if isinstance(ex, TimeoutError) or names & {"FSTimeoutError", "ReadTimeoutError"}:
        return "the store does not answer in time"
    if names & _BROKEN:
        return "the connection to the store broke off"
    if isinstance(ex, ConnectionError) or names & _UNREACHABLE:
        return "the store cannot be reached"
    if names & _UNREADABLE:
        return "the store gives an answer that cannot be read"
    if status is not None:
        return f"the store answers with status {status}" + " after a redirect" * redirected
    if isinstance(ex, ImportError):
        return "a package of the extra 'remote' is missing"
    if isinstance(ex, OSError) and ex.errno in _DISK:
        return f"the cache cannot be written ({os.strerror(ex.errno)})"
    return f"the store cannot be used ({type(ex).__name__})"


def _status(ex: BaseException) -> int | None:
    """Return the HTTP status in a library's error, or None."""
    for error in (ex, ex.__cause__):
        answer = getattr(error, "response", None)
        if isinstance(answer, Mapping):  # botocore's
            return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
        places = (
            (error, "status"),
            (error, "status_code"),
            (answer, "status_code"),
            (error, "code"),
        )
        for owner, name in places:
            found = getattr(owner, name, None)
            if isinstance(found, int) and 300 <= found < 600:
                return found
    return 403 if str(ex).startswith("Forbidden: ") else None  # gcsfs


_REFUSED = {"NoCredentialsError", "GatedRepoError"}
_BROKEN = {
    *("ClientPayloadError", "ServerDisconnectedError", "ReadError", "RemoteProtocolError"),
    *("IncompleteReadError", "ResponseStreamingError", "ServiceResponseError"),
}
_UNREACHABLE = {
    "ClientConnectionError",
    "EndpointConnectionError",
    "HTTPClientError",
    "ConnectError",
    "ServiceRequestError",
}
_UNREADABLE = {"ResponseParserError", "JSONDecodeError", "ParseError", "DecodeError"}
_DISK = {1, 5, 13, 28, 30, 122}  # EPERM, EIO, EACCES, ENOSPC, EROFS, EDQUOT
