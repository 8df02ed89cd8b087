"""Answer to clients that send HTTP without TLS to an address with TLS."""

_TEXT = "The plain HTTP request was sent to an HTTPS port: use https://"
ANSWER = (
    "HTTP/1.1 400 Bad Request\r\nServer: shmserve\r\nContent-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: {len(_TEXT) + 1}\r\nConnection: close\r\n\r\n{_TEXT}\n"
).encode()


def is_plain(first: bytes) -> bool:
    """Return True if a client's first byte is a letter of an HTTP method, False if TLS may follow.
    TLS begins with the number of a record's type."""
    return first.isalpha() and first.isupper()
