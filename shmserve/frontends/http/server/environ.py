"""WSGI environment: built once per connection and per distinct head, then only copied."""

import os
import ssl
from typing import Any
from urllib.parse import urlsplit

from gunicorn import util
from gunicorn.http import wsgi
from gunicorn.http.errors import ConfigurationProblem

from shmserve.frontends.caller_numbers import IN_ENVIRON, of_host, of_socket
from shmserve.frontends.http.server.header_fields import UNDERSCORED, by_name

Address = str | bytes | tuple[Any, ...]


def process_environ(cfg: Any) -> dict[str, Any]:
    """Return the entries that are equal for every request of this process."""
    environ: dict[str, Any] = wsgi.base_environ(cfg)
    environ["wsgi.multithread"] = True
    return environ


def connection_environ(
    base: dict[str, Any], connection: Any, client: Address, server: Address
) -> dict[str, Any]:
    """Return `base` with the entries that are equal for every request of one connection."""
    environ = base.copy()
    environ["gunicorn.socket"] = connection.sock
    if isinstance(connection.sock, ssl.SSLSocket):
        environ["wsgi.url_scheme"] = "https"
    environ["shmserve.connection"] = connection
    environ[IN_ENVIRON] = of_socket(connection.sock)
    if isinstance(client, tuple):
        environ["REMOTE_ADDR"] = client[0]
        environ["REMOTE_PORT"] = str(client[1])
    else:
        environ["REMOTE_ADDR"] = client.decode() if isinstance(client, bytes) else client
    if isinstance(server, tuple):
        environ["SERVER_NAME"] = server[0]
        environ["SERVER_PORT"] = str(server[1])
    return environ


def request_environ(base: dict[str, Any], request: Any) -> dict[str, Any]:
    """Return `base` with the entries of a head: everything except ``wsgi.input``. Raise
    ConfigurationProblem if the path lies outside SCRIPT_NAME."""
    environ = base.copy()
    environ["REQUEST_METHOD"] = request.method
    environ["QUERY_STRING"] = request.query
    environ["RAW_URI"] = request.uri
    environ["SERVER_PROTOCOL"] = "HTTP/{}.{}".format(*request.version)
    environ.setdefault("wsgi.url_scheme", request.scheme)
    script_name = os.environ.get("SCRIPT_NAME", "")
    for name, value in request.headers:
        if name == "CONTENT-TYPE":
            environ["CONTENT_TYPE"] = value
            continue
        if name == "CONTENT-LENGTH":
            environ["CONTENT_LENGTH"] = value
            continue
        if name == "SCRIPT_NAME":  # the parser accepts this field from trusted proxies only
            script_name = value
        key = "HTTP_" + name.replace("-", "_")
        environ[key] = f"{environ[key]},{value}" if key in environ else value
    # the host of an absolute target counts instead of Host (RFC 9112, 3.2.2)
    if request.uri[:1] not in "/*" and "," not in environ.get("HTTP_HOST", ","):
        environ["HTTP_HOST"] = urlsplit(request.uri).netloc
    if request.underscored:
        environ[UNDERSCORED] = by_name(request.underscored)
    path = request.path
    if script_name:
        if not path.startswith(script_name):
            raise ConfigurationProblem("the request path does not start with SCRIPT_NAME")
        path = path[len(script_name) :]
    environ["PATH_INFO"] = util.unquote_to_wsgi_str(path)
    environ["SCRIPT_NAME"] = script_name
    if "SERVER_NAME" not in environ:
        _name_unix_server(environ)
    return environ


def proxied_environ(request: Any) -> dict[str, Any]:
    """Return the entries about a proxy's client, sent before a connection's first head (PROXY
    protocol); empty if there are none."""
    environ: dict[str, Any] = wsgi.proxy_environ(request)
    if not environ.get("REMOTE_ADDR"):  # the proxy's own request, or an unnamed client
        return {name: environ[name] for name in ("PROXY_PROTOCOL",) if name in environ}
    environ[IN_ENVIRON] = of_host(environ["REMOTE_ADDR"])
    return environ


def _name_unix_server(environ: dict[str, Any]) -> None:
    # A Unix socket has no name and port, so the Host field must do.
    name, _, port = environ.get("HTTP_HOST", "").partition(":")
    environ["SERVER_NAME"] = name
    environ["SERVER_PORT"] = port or ("443" if environ["wsgi.url_scheme"] == "https" else "80")
