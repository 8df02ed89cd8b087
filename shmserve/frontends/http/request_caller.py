"""Who a request comes from, as the kernel says."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shmserve.core.caller import Caller
from shmserve.core.keys import Key
from shmserve.transport.trust import peer_credentials
from shmserve.transport.trust.peer_credentials import REMOTE

KEY = "shmserve.key"  # in the environ: the request's key


def caller_of(environ: dict[str, Any]) -> Caller:
    """The caller of a request. Looked up once per connection by our worker class; other
    servers hand over at most the socket, which is then looked at each time. Whoever relays it
    for others is none that it could come from (`access.RELAYED`). It has the scopes of the key
    that came along."""
    caller = _connected(environ)
    key: Key | None = environ.get(KEY)
    return caller if key is None else replace(caller, scopes=key.scopes)


def _connected(environ: dict[str, Any]) -> Caller:
    if "HTTP_FORWARDED" in environ or "HTTP_VIA" in environ or "HTTP_X_FORWARDED_FOR" in environ:
        return REMOTE
    connection = environ.get("shmserve.connection")
    if connection is not None:
        caller: Caller = connection.caller()
        return caller
    sock = environ.get("gunicorn.socket")
    return peer_credentials.caller_of(sock) if sock is not None else REMOTE
