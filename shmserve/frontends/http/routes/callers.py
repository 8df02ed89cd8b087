"""Who a request comes from, as the kernel says."""

from __future__ import annotations

from typing import Any

from shmserve.core.regions.region_book import Caller
from shmserve.transport import peer_credentials as peers
from shmserve.transport.peer_credentials import REMOTE


def caller_of(environ: dict[str, Any]) -> Caller:
    """The caller of a request. Looked up once per connection by our worker class; other
    servers hand over at most the socket, which is then looked at each time."""
    connection = environ.get("shmserve.connection")
    if connection is not None:
        caller: Caller = connection.caller()
        return caller
    sock = environ.get("gunicorn.socket")
    return peers.caller_of(sock) if sock is not None else REMOTE
