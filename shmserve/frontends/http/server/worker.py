"""Worker class of gunicorn for the HTTP frontend: one loop, a greenlet per connection.

The loop sends signs of life to the master. Work that would hold up the loop runs beside it
(`shmserve.waiting`). HTTP and gRPC accept, refuse and count connections alike
(`frontends.connections`).
"""

import os
import socket
import sys
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from gunicorn.workers.base import Worker

from shmserve import config, waiting
from shmserve.core.control.silence import period_s
from shmserve.frontends.connections.acceptor import Acceptor
from shmserve.frontends.connections.open_connections import OpenConnections
from shmserve.frontends.connections.refusals import Refusals
from shmserve.frontends.http.server import environ as environs
from shmserve.frontends.http.server.error_responses import refusal
from shmserve.frontends.http.server.http_connection import HttpConnection
from shmserve.frontends.http.server.loop_socket import GreenletSocket
from shmserve.frontends.http.server.sign_of_life import SignOfLife
from shmserve.frontends.http.server.worker_context import Hooks, ServingContext
from shmserve.frontends.hub import Hub
from shmserve.observe import gauges
from shmserve.transport import looking
from shmserve.transport.processes import raise_fd_limit

_STOPPING_TICK_S = 0.05
_REFUSAL = refusal(503, "too many connections (max_connections)", "Retry-After: 1")
_ONE_CALLER = 0  # no shares of `max_connections`: all clients behind a proxy would be one caller


class ConnectionWorker(Worker):  # type: ignore[misc]
    """An HTTP worker; set as gunicorn's ``worker_class``. gunicorn's settings ``threads`` and
    ``worker_connections`` have no effect. `max_connections` of this server limits connections."""

    tmp: SignOfLife
    alive: bool  # until a signal or `max_requests` ends the worker

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        problem = ""
        if cfg.is_ssl:
            problem = "has TLS by the settings http_tls_cert and http_tls_key, not by gunicorn's"
        elif getattr(cfg, "protocol", "http") != "http":
            problem = "speaks HTTP only: use worker_class = 'gthread' for other protocols"
        if problem:
            log.error("The worker class %s %s", cls.__name__, problem)
            sys.exit(1)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tmp.close()
        self.tmp = SignOfLife(self.cfg)

    def init_process(self) -> None:
        raise_fd_limit()  # each connection, channel and segment needs a descriptor
        self.settings = config.load()
        self.connections: OpenConnections[HttpConnection] = OpenConnections(
            self.settings.max_connections
        )
        gauges.provide_connections(lambda: len(self.connections))
        super().init_process()

    def run(self) -> None:
        self.service = self._make_service()
        looking.permit(self.settings.look_us)
        self.hub = Hub(self.settings.http_threads, "http_threads")
        waiting.install(self.hub)
        try:
            self.hub.spawn(self._drain_pipe)
            refusals = Refusals(self.hub, "HTTP connections", _REFUSAL)
            several = self.cfg.workers > 1
            acceptor = Acceptor(
                self.hub, self.connections, lambda _: _ONE_CALLER, refusals, self.log, several
            )
            for listener in self.sockets:
                acceptor.listen(listener, partial(self._connect, listener.getsockname()))
            self._turn_until_stopped()
            self.service.stop()
            acceptor.stop()
            self._finish()
            refusals.close()
        finally:
            self.hub.close()
            waiting.install(None)

    def _make_service(self) -> ServingContext:
        before, after = self.cfg.settings["pre_request"], self.cfg.settings["post_request"]
        hooks = Hooks(
            retire=self._retire,
            access=self.log.access if self.log.access_log_enabled else None,
            before=self._before if before.get() is not type(before).default else None,
            after=self._after if after.get() is not type(after).default else None,
        )
        return ServingContext(
            self.cfg, self.log, self.settings, self.wsgi, hooks, self.max_requests
        )

    def _before(self, request: Any) -> None:
        self.cfg.pre_request(self, request)

    def _after(self, request: Any, environ: dict[str, Any], response: Any) -> None:
        try:
            self.cfg.post_request(self, request, environ, response)
        except Exception:
            self.log.exception("Exception in post_request hook")

    def _retire(self) -> None:
        if self.alive:
            self.log.info("Autorestarting worker after current request.")
            self.service.stop()
            self.alive = False
            os.write(self.PIPE[1], b"1")

    # The loop

    def _turn_until_stopped(self) -> None:
        next_sign, beat_s = 0.0, period_s(self.settings.watchdog_s)
        while self.alive:
            now = monotonic()
            if now >= next_sign:
                next_sign = now + beat_s
                self.notify()
                if self.ppid != os.getppid():
                    self.log.info("Parent changed, shutting down: %s", self)
                    return
            self.hub.run(next_sign)

    def _finish(self) -> None:
        """Let connections finish the requests they have begun, for at most `graceful_timeout`."""
        stop_at = monotonic() + self.cfg.graceful_timeout
        while self.connections:
            now = monotonic()
            if now >= stop_at:
                self.log.warning("Connections left behind at exit: %d", len(self.connections))
                break
            self.notify()
            for connection in self.connections:  # idle connections have earlier deadlines now
                connection.cut_if_overdue(now)
            self.hub.run(min(stop_at, now + _STOPPING_TICK_S))

    # Greenlets

    def _drain_pipe(self) -> None:
        """Leave the loop after each write to the pipe, so that the worker checks `alive`. Signals
        and `_retire` write to the pipe."""
        pipe = self.hub.watch(self.PIPE[0])
        while True:
            pipe.wait(inf)
            try:
                os.read(self.PIPE[0], 4096)
            except BlockingIOError:
                continue
            self.hub.leave()

    def _connect(
        self, server: environs.Address, accepted: socket.socket, client: environs.Address
    ) -> HttpConnection:
        open_socket = partial(GreenletSocket, self.hub, accepted)
        connection = HttpConnection(self.service, open_socket, client, server)
        self.hub.spawn(self._serve, connection)
        return connection

    def _serve(self, connection: HttpConnection) -> None:
        try:
            connection.serve()
        except Exception:
            self.log.exception("Error on a connection")
        finally:
            self.connections.discard(connection)
            connection.sock.close()
            if not self.connections and not self.alive:
                self.hub.leave()
