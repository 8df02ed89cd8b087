"""Error answers given by the worker itself, without the application."""

from __future__ import annotations

import msgspec
from gunicorn.http import errors

REASONS = {
    400: "Bad Request",
    403: "Forbidden",
    408: "Request Timeout",
    413: "Content Too Large",
    414: "URI Too Long",
    417: "Expectation Failed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    501: "Not Implemented",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}

# The parser's own messages quote the client's bytes; these messages do not.
_REFUSED: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.LimitRequestLine, 414, "the request line is too long"),
    (errors.LimitRequestHeaders, 431, "the header fields are too many or too large"),
    (errors.InvalidHTTPVersion, 505, "the HTTP version is not supported"),
    (errors.InvalidRequestMethod, 400, "the request method is malformed"),
    (errors.UnsupportedTransferCoding, 501, "the transfer coding is not supported"),
    (errors.ExpectationFailed, 417, "the expectation cannot be met"),
    (errors.InvalidHeaderName, 400, "the name of a header field is malformed"),
    (errors.ObsoleteFolding, 400, "a header field is folded over lines"),
    (errors.ForbiddenProxyRequest, 403, "this peer may not use the PROXY protocol"),
    (errors.ConfigurationProblem, 400, "the path does not begin with SCRIPT_NAME"),
)


def status_of(error: Exception) -> tuple[int, str]:
    """Return HTTP status and message for an error of gunicorn's parser."""
    for kind, status, message in _REFUSED:
        if isinstance(error, kind):
            return status, message
    if isinstance(error, errors.InvalidHeader):
        name = str(getattr(error, "hdr", ""))
        if name in ("CONTENT-LENGTH", "TRANSFER-ENCODING"):
            return 400, f"the header field {name.title()} is malformed, repeated or in conflict"
        return 400, "a header field is malformed or repeated"
    return 400, "the request line is malformed"


def refusal(status: int, message: str, *fields: str) -> bytes:
    """Return a whole answer with a JSON error that ends the connection."""
    body = msgspec.json.encode({"error": message})
    lines = [
        f"HTTP/1.1 {status} {REASONS[status]}",
        "Server: shmserve",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *fields,
        "Connection: close",
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
