"""The gunicorn worker class of the HTTP frontend: a thread per connection.

The main thread accepts, keeps the master informed, and closes what has passed its
deadline; the connections' threads do everything else on blocking sockets.
"""

from __future__ import annotations

import errno
import os
import queue
import selectors
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic, sleep
from typing import Any

from gunicorn.workers.base import Worker

from shmserve import config
from shmserve.frontends.http.server import environ as environs
from shmserve.frontends.http.server.connection import HttpConnection
from shmserve.frontends.http.server.context import Hooks, ServingContext
from shmserve.frontends.http.server.error_responses import refusal
from shmserve.observe import gauges
from shmserve.transport.processes import raise_fd_limit

_TICK_S = 1.0
_STOPPING_TICK_S = 0.05
_PARKED_THREADS = 64

_ACCEPT_DELAY_S = 0.0001  # for each connection, so that the least busy worker is first
_MAX_ACCEPT_DELAY_S = 0.001

_REFUSED_SOCKETS = 128

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1  # without descriptors: the listeners would be ready all the time


class _Threads:
    """Runs items, each in a thread of its own; threads that are done wait for another item."""

    def __init__(self, run: Callable[[HttpConnection], None]) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._idle = 0
        self._items: queue.SimpleQueue[HttpConnection] = queue.SimpleQueue()

    def submit(self, item: HttpConnection) -> None:
        with self._lock:
            parked = self._idle > 0
            if parked:
                self._idle -= 1
        if parked:
            self._items.put(item)
        else:
            threading.Thread(target=self._loop, args=(item,), name="http", daemon=True).start()

    def _loop(self, item: HttpConnection) -> None:
        while True:
            self._run(item)
            with self._lock:
                if self._idle >= _PARKED_THREADS:
                    return
                self._idle += 1
            item = self._items.get()


class ConnectionWorker(Worker):  # type: ignore[misc]
    """Set as gunicorn's ``worker_class``. The settings ``threads`` and
    ``worker_connections`` have no meaning here, `max_connections` of ours has.
    """

    alive: bool  # until a signal or max_requests says otherwise

    @classmethod
    def check_config(cls, cfg: Any, log: Any) -> None:
        problem = ""
        if cfg.is_ssl:
            problem = "does not speak TLS: use worker_class = 'gthread', or a proxy in front"
        elif getattr(cfg, "protocol", "http") != "http":
            problem = "speaks HTTP only: use worker_class = 'gthread' for other protocols"
        if problem:
            log.error("The worker class %s %s", cls.__name__, problem)
            sys.exit(1)

    def init_process(self) -> None:
        raise_fd_limit()  # a connection is a descriptor, and so is each channel and segment
        self.settings = config.load()
        self.connections: set[HttpConnection] = set()
        self.threads = _Threads(self._serve)
        self.lock = threading.Lock()  # a socket is either shut down or closed, never both
        self.refused: deque[socket.socket] = deque()
        self.spare: int | None = None  # a descriptor whose place one who is refused gets
        self._take_spare()
        self.paused_until = 0.0  # no connections are accepted
        self.short_of_descriptors = False
        gauges.provide_connections(lambda: len(self.connections))
        super().init_process()

    def run(self) -> None:
        self.service = self._make_service()
        with selectors.DefaultSelector() as selector:
            selector.register(self.PIPE[0], selectors.EVENT_READ)
            for listener in self.sockets:
                listener.setblocking(False)
            self._listen(selector)
            self._accept_until_stopped(selector)
        self.service.stop()
        for listener in self.sockets:
            listener.close()
        self._finish()

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

    # The main thread

    def _listen(self, selector: selectors.BaseSelector) -> None:
        for listener in self.sockets:
            selector.register(listener, selectors.EVENT_READ, listener.getsockname())

    def _pause(self, selector: selectors.BaseSelector) -> None:
        """Accept nothing for a moment: no descriptor is left."""
        if not self.short_of_descriptors:
            self.short_of_descriptors = True
            self.log.warning("No descriptor is left for connections: %d", len(self.connections))
        for listener in self.sockets:
            selector.unregister(listener)
        self.paused_until = monotonic() + _PAUSE_S

    def _resume(self, selector: selectors.BaseSelector) -> None:
        self.paused_until = 0.0
        self._close_refused()
        self._listen(selector)

    def _accept_until_stopped(self, selector: selectors.BaseSelector) -> None:
        due = 0.0
        while self.alive:
            now = monotonic()
            if now >= due:
                due = now + _TICK_S
                self.notify()
                self._cut_overdue(now)
                self._close_refused()
                if self.ppid != os.getppid():
                    self.log.info("Parent changed, shutting down: %s", self)
                    return
            if self.paused_until and now >= self.paused_until:
                self._resume(selector)
            for key, _ in selector.select(min(due, self.paused_until or due) - now):
                if key.data is None:
                    self._drain_pipe()
                elif not self.paused_until and not self._accept(key.fileobj, key.data):
                    self._pause(selector)

    def _drain_pipe(self) -> None:
        try:
            os.read(self.PIPE[0], 4096)
        except BlockingIOError:
            pass

    def _accept(self, listener: Any, address: environs.Address) -> bool:
        """Take a connection; False: there is no descriptor for one."""
        # One at a time, and the later the more connections there are already: the other
        # workers woke up as well, and long-lived connections should be spread evenly.
        if self.cfg.workers > 1 and self.connections:
            sleep(min(len(self.connections) * _ACCEPT_DELAY_S, _MAX_ACCEPT_DELAY_S))
        try:
            sock, client = listener.accept()
        except OSError as ex:  # taken by another worker, gone already, or no descriptor left
            if ex.errno not in _NO_DESCRIPTOR:
                return True
            if not self._end_longest_idle():
                self._refuse_in_spare_place(listener)
            return False
        self.short_of_descriptors = False
        if len(self.connections) >= self.settings.max_connections and not self._end_longest_idle():
            self._refuse(sock)
            return True
        connection = HttpConnection(self.service, sock, client, address)
        with self.lock:
            self.connections.add(connection)
        try:
            self.threads.submit(connection)
        except RuntimeError:  # no thread to be had
            with self.lock:
                self.connections.discard(connection)
            self._refuse(sock)
        return True

    def _end_longest_idle(self) -> bool:
        """Have the connection that has been idle the longest close; False: none is, for long."""
        with self.lock:
            idle = [(c.idle_until, n, c) for n, c in enumerate(self.connections) if c.idle_until]
            latest = monotonic() + self.settings.idle_timeout_s - self.settings.crowded_idle_s
            until, _, connection = min(idle, default=(inf, 0, None))
            if connection is None or until > latest:
                return False
            connection.give_way()
        return True

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
        answer = refusal(503, "too many connections (max_connections)", "Retry-After: 1")
        try:
            sock.send(answer, socket.MSG_DONTWAIT)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        # Closed on the next tick: closing over unread data would take the answer back.
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

    def _cut_overdue(self, now: float) -> None:
        """Shut down what has waited too long for its client."""
        with self.lock:
            for connection in self.connections:
                connection.cut_if_overdue(now)

    def _finish(self) -> None:
        """Let the connections end what they have begun."""
        stop_at = monotonic() + self.cfg.graceful_timeout
        while True:
            now = monotonic()
            self.notify()
            self._cut_overdue(now)
            with self.lock:
                if not self.connections:
                    break
            if now >= stop_at:
                self.log.warning("Connections left behind at exit: %d", len(self.connections))
                break
            sleep(_STOPPING_TICK_S)
        self._close_refused()

    # The connections' threads

    def _serve(self, connection: HttpConnection) -> None:
        try:
            connection.serve()
        except Exception:
            self.log.exception("Error on a connection")
        finally:
            with self.lock:
                self.connections.discard(connection)
                connection.sock.close()
