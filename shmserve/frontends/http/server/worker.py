"""The gunicorn worker class of the HTTP frontend: one loop, a greenlet per connection.

Acceptors are greenlets, too. The loop keeps the master informed; what would hold it up runs
beside it (`shmserve.waiting`).
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from collections import deque
from math import inf
from time import monotonic
from typing import Any

from gunicorn.workers.base import Worker

from shmserve import config, waiting
from shmserve.core.control.silence import period_s
from shmserve.frontends.http.server import environ as environs
from shmserve.frontends.http.server.error_responses import refusal
from shmserve.frontends.http.server.http_connection import HttpConnection
from shmserve.frontends.http.server.loop_socket import GreenletSocket
from shmserve.frontends.http.server.sign_of_life import SignOfLife
from shmserve.frontends.http.server.worker_context import Hooks, ServingContext
from shmserve.frontends.hub import CROWDED_IDLE_S, Hub, Readiness
from shmserve.observe import flight_recorder, gauges
from shmserve.transport.processes import raise_fd_limit

_REFUSED_S = 1.0  # for those who are refused to read why
_STOPPING_TICK_S = 0.05
_CROWDED_S = 0.1  # where nobody is idle: until all are looked through again

_ACCEPT_DELAY_S = 0.001  # the least that the loop can wait: an idle worker is first
_TURNS = 2  # of the loop: a connection begins, and reads the end that was there already
_VACANT_S = 1.0  # not for long: connections that last are spread after the end of others as well

_REFUSED_SOCKETS = 128

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1  # without descriptors: the listeners would be ready all the time


class _NoDescriptor(Exception):
    """The process has no descriptor left for a connection."""


class ConnectionWorker(Worker):  # type: ignore[misc]
    """Set as gunicorn's ``worker_class``. The settings ``threads`` and
    ``worker_connections`` have no meaning here, `max_connections` of ours has.
    """

    tmp: SignOfLife
    alive: bool  # until a signal or max_requests says otherwise

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
        raise_fd_limit()  # a connection is a descriptor, and so is each channel and segment
        self.settings = config.load()
        self.connections: set[HttpConnection] = set()
        self.vacated = 0.0  # when the last one ended
        self.ended_since_accept = False
        self.listening: list[Readiness] = []
        self.idlers: deque[tuple[float, HttpConnection]] = deque()  # the longest idle first
        self.idlers_due = 0.0  # before that nobody can have been idle for long
        self.refused: deque[socket.socket] = deque()
        self.spare: int | None = None  # a descriptor whose place one who is refused gets
        self._take_spare()
        self.short_of_descriptors = False
        gauges.provide_connections(lambda: len(self.connections))
        super().init_process()

    def run(self) -> None:
        self.service = self._make_service()
        self.hub = Hub(self.settings.http_threads, "http_threads")
        waiting.install(self.hub)
        try:
            self.hub.spawn(self._drain_pipe)
            for listener in self.sockets:
                listener.setblocking(False)
                ready = self.hub.watch(listener.fileno())
                self.listening.append(ready)
                self.hub.spawn(self._accept_all, listener, ready)
            self._turn_until_stopped()
            self.service.stop()
            for listener, ready in zip(self.sockets, self.listening, strict=True):
                ready.forget_shared()  # the master has it, too
                listener.close()
            self._finish()
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
        due, beat_s = 0.0, period_s(self.settings.watchdog_s)
        while self.alive:
            now = monotonic()
            if now >= due:
                due = now + beat_s
                self.notify()
                self._close_refused()
                if self.ppid != os.getppid():
                    self.log.info("Parent changed, shutting down: %s", self)
                    return
            if self.refused or self.spare is None:
                due = min(due, now + _REFUSED_S)
            self.hub.run(due)

    def _finish(self) -> None:
        """Let the connections end what they have begun."""
        stop_at = monotonic() + self.cfg.graceful_timeout
        while self.connections:
            now = monotonic()
            if now >= stop_at:
                self.log.warning("Connections left behind at exit: %d", len(self.connections))
                break
            self.notify()
            for connection in self.connections:  # idle ones have less time from now on
                connection.cut_if_overdue(now)
            self.hub.run(min(stop_at, now + _STOPPING_TICK_S))
        self._close_refused()

    # Greenlets

    def _drain_pipe(self) -> None:
        """Signals and `_retire` write to it, to have the loop look whether it is to stop."""
        pipe = self.hub.watch(self.PIPE[0])
        while True:
            pipe.wait(inf)
            try:
                os.read(self.PIPE[0], 4096)
            except BlockingIOError:
                continue
            self.hub.leave()

    def _accept_all(self, listener: Any, ready: Readiness) -> None:
        """Accept connections until the worker stops.

        All workers wake up for a new connection. To spread lasting connections evenly, a worker
        that has connections waits a moment, then accepts few. It does not wait if a connection
        has ended since the last one was accepted: with clients that connect and close, a pause for
        each would be slower than the clients, and fill the listener's backlog.
        """
        address: environs.Address = listener.getsockname()
        while self.alive:
            ready.wait(inf)
            if self.cfg.workers > 1 and self.connections and not self._has_vacancy():
                self.hub.sleep(_ACCEPT_DELAY_S)
            try:
                if self.alive:
                    self._accept_some(listener, address)
            except _NoDescriptor:
                if not self.short_of_descriptors:
                    self.short_of_descriptors = True
                    count = len(self.connections)
                    self.log.warning("No descriptor is left for connections: %d", count)
                self.hub.sleep(_PAUSE_S)
                self._close_refused()
            except Exception:  # of one connection, or of those that were to make room for it
                self.log.exception("Error while accepting connections")
                self.hub.sleep(_PAUSE_S)

    def _has_vacancy(self) -> bool:
        """Return whether a connection has ended since the last one was accepted. Connections that
        were accepted just now are served first: they may have ended already."""
        if monotonic() > self.vacated + _VACANT_S:
            self.ended_since_accept = False
        for _ in range(_TURNS):
            if self.ended_since_accept:
                return True
            self.hub.pause()
        return self.ended_since_accept

    def _accept_some(self, listener: Any, address: environs.Address) -> None:
        """Accept a small part of the connections that wait.

        Raises:
            _NoDescriptor: as `_accept`.
        """
        for _ in range(len(self.connections) // 64 + 1):
            if not self._accept(listener, address):
                return

    def _accept(self, listener: Any, address: environs.Address) -> bool:
        """Accept or refuse a connection; return False if none waits.

        Raises:
            _NoDescriptor: the connection waits on, or was refused in the spare descriptor's place.
        """
        try:
            accepted, client = listener.accept()
        except OSError as ex:  # taken by another worker, gone already, or no descriptor left
            if ex.errno not in _NO_DESCRIPTOR:
                return False
            if not self._end_longest_idle():
                self._refuse_in_spare_place(listener)
            raise _NoDescriptor from None
        self.short_of_descriptors = False
        if len(self.connections) >= self.settings.max_connections and not self._end_longest_idle():
            self._refuse(accepted)
            self._vacate()
            return True
        sock = GreenletSocket(self.hub, accepted)
        connection = sock.deadlines = HttpConnection(self.service, sock, client, address)
        self.connections.add(connection)
        self.ended_since_accept = False
        self.hub.spawn(self._serve, connection)
        return True

    def _vacate(self) -> None:
        self.vacated = monotonic()
        self.ended_since_accept = True

    def _serve(self, connection: HttpConnection) -> None:
        try:
            connection.serve()
        except Exception:
            self.log.exception("Error on a connection")
        finally:
            self.connections.discard(connection)
            self._vacate()
            connection.sock.close()
            if not self.connections and not self.alive:
                self.hub.leave()

    # Where there is no room

    def _end_longest_idle(self) -> bool:
        """Have the connection that has been idle the longest close; False: none is, for long."""
        latest = monotonic() + self.settings.idle_timeout_s - CROWDED_IDLE_S
        while True:
            while self.idlers and self.idlers[0][0] <= latest:
                until, connection = self.idlers.popleft()
                if connection.idle_until == until and connection in self.connections:
                    connection.give_way()
                    return True
            if latest < self.idlers_due:  # looking through all takes long where there are many
                return False
            idle = [(c.idle_until, n, c) for n, c in enumerate(self.connections) if c.idle_until]
            self.idlers = deque((until, c) for until, _, c in sorted(idle))
            self.idlers_due = self.idlers[0][0] if self.idlers else latest + _CROWDED_S
            if latest < self.idlers_due:
                return False

    def _refuse_in_spare_place(self, listener: Any) -> None:
        if self.spare is None:  # it is taken, until the next turn
            return
        os.close(self.spare)
        self.spare = None
        try:
            self._refuse(listener.accept()[0])
        except OSError:  # gone already
            return

    def _refuse(self, sock: socket.socket) -> None:
        flight_recorder.record("limit reached", "HTTP connections", "max_connections, descriptors")
        answer = refusal(503, "too many connections (max_connections)", "Retry-After: 1")
        try:
            sock.send(answer, socket.MSG_DONTWAIT)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        # Closed on the next tick: closing over unread data would take the answer back.
        if not self.refused:
            self.hub.leave()  # so that it comes soon
        self.refused.append(sock)
        if len(self.refused) > _REFUSED_SOCKETS:
            self.refused.popleft().close()

    def _close_refused(self) -> None:
        while self.refused:
            self.refused.popleft().close()
        self._take_spare()

    def _take_spare(self) -> None:
        if self.spare is None:
            try:
                self.spare = os.open(os.devnull, os.O_RDONLY)
            except OSError:  # at the next turn
                return
