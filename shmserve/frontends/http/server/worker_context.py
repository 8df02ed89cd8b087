"""State shared by the connections of one worker."""

from collections.abc import Callable
from time import monotonic
from typing import Any

from msgspec import Struct

from shmserve.config import Settings
from shmserve.frontends.http.server import environ as environs
from shmserve.transport.trust.tls import certificates, plain_ports

WsgiApplication = Callable[[dict[str, Any], Any], Any]


class Hooks(Struct, frozen=True):
    """Callbacks of gunicorn. `retire`: called once `max_requests` requests have begun. `access`:
    called after each answer with response, request, environ and elapsed time. `before`, `after`:
    gunicorn's pre_request and post_request hooks, where configured."""

    retire: Callable[[], None]
    access: Callable[..., None] | None = None
    before: Callable[[Any], None] | None = None
    after: Callable[[Any, dict[str, Any], Any], None] | None = None


class ServingContext:
    """Settings and state shared by all connections of a worker.

    Attributes:
        certificates: for TLS on TCP connections; None without TLS.
        plain_ports: TCP ports without TLS, although there are certificates.
        requests: number of requests begun.
        stopping: whether connections end after their present request, since `stopping_at`
            (monotonic).
    """

    def __init__(
        self,
        cfg: Any,
        log: Any,
        settings: Settings,
        wsgi: WsgiApplication,
        hooks: Hooks,
        max_requests: int,
    ) -> None:
        self.cfg = cfg
        self.log = log
        self.settings = settings
        self.wsgi = wsgi
        self.hooks = hooks
        self.max_requests = max_requests
        self.environ = environs.process_environ(cfg)
        self.keep_alive = bool(cfg.keepalive)
        self.certificates = certificates(settings, "http", "http/1.1")
        self.plain_ports = plain_ports(settings)
        self.requests = 0
        self.stopping = False
        self.stopping_at = 0.0

    def stop(self) -> None:
        """Keep no connection open from now on."""
        if not self.stopping:
            self.stopping, self.stopping_at = True, monotonic()
