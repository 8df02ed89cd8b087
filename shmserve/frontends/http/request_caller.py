"""Callers of HTTP requests, as identified by the kernel."""

from typing import Any

from shmserve.core.caller import Caller
from shmserve.core.keys import with_key
from shmserve.transport.trust import peer_credentials
from shmserve.transport.trust.peer_credentials import REMOTE

KEY = "shmserve.key"  # key in the environ of the request's `Key`; None: the key sent is not valid


def caller_of(environ: dict[str, Any]) -> Caller:
    """Return the caller of a request, with name and scopes of the request's key.

    The worker class of this server looks up the caller once per connection. Other servers pass at
    most the socket, so the caller is looked up for each request. A request relayed by a proxy
    counts as remote (`origins.RELAYED`, or PROXY protocol): the kernel identifies the proxy only.
    """
    caller = connected_caller(environ)
    return with_key(caller, environ[KEY]) if KEY in environ else caller


def connected_caller(environ: dict[str, Any]) -> Caller:
    """Return the caller of a request, as `caller_of`, without the request's key."""
    if "HTTP_FORWARDED" in environ or "HTTP_VIA" in environ or "HTTP_X_FORWARDED_FOR" in environ:
        return REMOTE
    if environ.get("PROXY_PROTOCOL", "LOCAL") != "LOCAL":  # LOCAL: a request of the proxy's own
        return REMOTE
    connection = environ.get("shmserve.connection")
    if connection is not None:
        caller: Caller = connection.caller()
        return caller
    sock = environ.get("gunicorn.socket")
    return peer_credentials.caller_of(sock) if sock is not None else REMOTE
