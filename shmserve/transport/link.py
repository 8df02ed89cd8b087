"""Link of a process to the coordinator: one background thread that reconnects until closed.

All questions and messages of a process to the coordinator go through the link, which is off the
path of inference requests. Callers never touch the socket: they append to a bounded outbox and
wake the thread, so a slow coordinator blocks no caller (grants wait, with a deadline).

After a restart of the coordinator, the hello tells the new coordinator how much of the pool this
process holds and, for an executor, its loaded model. Give-backs made without a connection are
therefore dropped, and grants that are still awaited are asked again.

Callbacks run on the link's thread: they must not wait for a grant or an answer.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from shmserve import errors
from shmserve.log_fields import log_fields
from shmserve.observe import logs
from shmserve.protocol.control import link_messages, messages
from shmserve.protocol.control.messages import ANSWERS, FromCoordinator, ToCoordinator
from shmserve.protocol.control.settings_messages import LogChanged
from shmserve.transport import rundir
from shmserve.transport.channel import MAX_MESSAGE, Channel, close_all
from shmserve.transport.pending_requests import Late, Make, Outbox, PendingRequests

_log = logging.getLogger(__name__)

_CONNECT_S = 1.0
_WELCOME_S = 5.0
_SEND_S = 5.0
_RETRY_FIRST_S, _RETRY_CAP_S = 0.02, 0.5
_RETRY_PART = 16  # part of the time without a coordinator: the delay with which a new one is found
_CLOSE_S = 2.0
_QUIET_S = 3600.0  # messages of both sides, and the end of the connection, end this wait at once
ARENA_WAIT_S = 2.0


class LinkHandlers(Struct, frozen=True):
    """Callbacks for the coordinator's messages, all run on the link's thread.

    Attributes:
        on_trim: gives back so many bytes of the pool.
        on_stats: returns the rows of a table.
        held_bytes: returns how many bytes of the pool the process holds.
        on_stop: ends the process, for a reason.
        loaded: returns the model that an executor has loaded.
        acquired: returns the ticket of the resources that the process holds; 0: none.
        on_message: gets messages without a handler of their own.
        on_fds: gets messages with descriptors, and must close the descriptors.
    """

    on_trim: Callable[[int], None] = lambda nbytes: None
    on_stats: Callable[[str], dict[str, Any]] = lambda what: {}
    held_bytes: Callable[[], int] = lambda: 0
    on_stop: Callable[[str], None] = lambda reason: None
    loaded: Callable[[], link_messages.Loaded | None] = lambda: None
    acquired: Callable[[], int] = lambda: 0
    on_message: Callable[[FromCoordinator], None] = lambda message: None
    on_fds: Callable[[FromCoordinator, list[int]], None] = lambda message, fds: close_all(fds)


class Link:
    """Connection of a process to the coordinator.

    Args:
        run_dir: folder of the coordinator's socket.
        role, process, instance: this process's role and id, and the model instance of an executor.
        handlers: callbacks for messages.
        first_bytes: size of the first segment of the process's arena; 0: the coordinator decides.
    """

    def __init__(
        self,
        run_dir: str,
        role: str,
        process: str,
        handlers: LinkHandlers,
        instance: str = "",
        first_bytes: int = 0,
    ) -> None:
        self._path = os.path.join(run_dir, rundir.COORDINATOR_SOCKET)
        self._role = role
        self._process = process
        self._instance = instance
        self._first_bytes = first_bytes
        self._handlers = handlers
        self._lock = threading.Lock()  # guards outbox and pending requests
        self._outbox = Outbox()
        self._pending = PendingRequests()
        self._tickets = itertools.count(1)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._channel: Channel | None = None  # of the present connection
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shmserve-link", daemon=True)
        # whether give-backs count: from a hello on, which says how much is held
        self._counting = False
        self.connected = False
        self.epoch = ""
        self.pool_bytes = 0  # as the coordinator says; 0 before the first welcome
        self._arena_bytes = 0
        self._welcomed = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send the rest of the outbox if connected, then end the thread.

        A process that has only just started may not have been welcomed yet. If its outbox holds
        messages, it waits a little for the welcome: the reason why a model cannot be loaded must
        not be lost.
        """
        if self._outbox and self._thread.is_alive() and not self._closing.is_set():
            self._welcomed.wait(_CLOSE_S)
        self._closing.set()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def send(self, message: ToCoordinator, fds: Sequence[int] = ()) -> None:
        """Queue a message. It is kept while there is no connection.

        A message with fds is for one coordinator only, so it is dropped without a connection. The
        link copies the fds; the caller keeps the originals.

        Raise ProtocolViolation if the message is longer than a channel carries.
        """
        _check_size(message)
        with self._lock:
            if self.connected or not fds:
                self._outbox.append(message, fds)
        # the link's thread looks before it waits
        if threading.current_thread() is not self._thread:
            self._wake()

    def flush(self) -> None:
        """Send all queued messages now. For callbacks, which run on the link's thread. Raise
        PeerDied or DeadlineExceeded if the coordinator takes nothing."""
        if self._channel is not None:
            self._flush(self._channel)

    def ask(
        self, make: Make, timeout_s: float, late: Late | None = None
    ) -> tuple[FromCoordinator, list[int]]:
        """Ask the coordinator and wait for the answer. The caller owns the answer's fds.

        `late` gets an answer that comes after the timeout, if the same coordinator gives it.

        Raise Unavailable if no answer comes within `timeout_s`. Raise ProtocolViolation if the
        message is longer than a channel carries.
        """
        ticket = next(self._tickets)
        message = make(ticket, False)
        _check_size(message)
        with self._lock:
            request = self._pending.open(ticket, make, late)
            if self.connected:  # without a connection, the next hello asks
                self._outbox.append(message)
        self._wake()
        request.answered.wait(timeout_s)
        with self._lock:
            if request.answer is None:
                self._pending.close(request, self.connected)
        if request.answer is None:
            raise errors.Unavailable(f"the coordinator did not answer within {timeout_s:g} s")
        return request.answer, request.fds

    def give_back(self, nbytes: int) -> None:
        """Return pool budget; never blocks, never fails."""
        with self._lock:
            if self._counting:  # without a connection, the next hello tells
                self._outbox.append(link_messages.GiveBack(nbytes))
        self._wake()

    def grant(self, nbytes: int, timeout_s: float) -> bool:
        """Ask for pool budget. Return False if it was refused, or no answer came within
        `timeout_s`."""

        def late(answer: FromCoordinator) -> None:
            if isinstance(answer, link_messages.Granted) and answer.granted:
                self.give_back(nbytes)

        try:
            answer, fds = self.ask(
                lambda ticket, _: link_messages.Grant(ticket, nbytes), timeout_s, late
            )
        except errors.Unavailable:
            return False
        close_all(fds)
        if not isinstance(answer, link_messages.Granted):
            raise errors.ProtocolViolation(f"a {type(answer).__name__} in answer to a Grant")
        if not answer.granted:
            about = log_fields(process=self._process, reason=answer.reason)
            _log.info("pool budget refused", extra=about)
        return answer.granted

    def arena_bytes(self) -> int:
        """Return the size that the coordinator wants for an arena's first segment, in bytes.

        Waits for the first welcome, at most `ARENA_WAIT_S`. Return 0 if none has come.
        """
        self._welcomed.wait(ARENA_WAIT_S)
        return self._arena_bytes

    # ---------------------------------------------------------- the link's thread

    def _run(self) -> None:
        alone_since = time.monotonic()
        while not self._closing.is_set():
            pause = 0.0
            try:
                channel = Channel.connect(self._path, _CONNECT_S)
            except errors.PeerDied:
                self._closing.wait(_retry_s(time.monotonic() - alone_since))
                continue
            try:
                self._serve(channel)
            except errors.PeerDied:
                pass
            except (errors.DeadlineExceeded, errors.ProtocolViolation) as ex:
                about = log_fields(process=self._process, error=ex)
                _log.warning("link broken", extra=about)
                pause = _RETRY_CAP_S
            except Exception:  # any error: without its link the process is lost
                _log.exception("link broken", extra=log_fields(process=self._process))
                pause = _RETRY_CAP_S
            finally:
                if self.connected:
                    alone_since = time.monotonic()
                self._disconnected()
                self._channel = None
                channel.close()
            self._closing.wait(pause or _retry_s(time.monotonic() - alone_since))

    def _serve(self, channel: Channel) -> None:
        self._channel = channel
        self._greet(channel)
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while True:
            self._flush(channel)
            if self._closing.is_set():
                return
            for fd, _ in poll.poll(_QUIET_S * 1000):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                else:
                    data, fds = channel.receive(_SEND_S)
                    self._handle(_decoded(data, fds), fds)

    def _greet(self, channel: Channel) -> None:
        with self._lock:
            self._counting = True
        hello = link_messages.Hello(
            version=messages.VERSION,
            role=self._role,
            process=self._process,
            pid=os.getpid(),
            held_bytes=self._handlers.held_bytes(),
            loaded=self._handlers.loaded(),
            instance=self._instance,
            acquired=self._handlers.acquired(),
            first_bytes=self._first_bytes,
        )
        self._send(channel, hello)
        data, fds = channel.receive(_WELCOME_S)
        close_all(fds)
        welcome = messages.decode_from_coordinator(data)
        if not isinstance(welcome, link_messages.Welcome) or welcome.version != messages.VERSION:
            raise errors.ProtocolViolation("the coordinator speaks another version")
        with self._lock:
            self.epoch, self._arena_bytes = welcome.epoch, welcome.arena_bytes
            self.pool_bytes = welcome.pool_bytes
            self._welcomed.set()
            self.connected = True
            for question in self._pending.again():
                self._outbox.append(question)
        self._handlers.on_message(welcome)

    def _flush(self, channel: Channel) -> None:
        while True:
            with self._lock:
                entry = self._outbox.first()
            if entry is None:
                return
            self._send(channel, *entry)
            with self._lock:  # only now: a message that could not be sent stays
                self._outbox.sent(entry)

    def _send(self, channel: Channel, message: ToCoordinator, fds: Sequence[int] = ()) -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLOUT)
        if not poll.poll(_SEND_S * 1000):
            raise errors.DeadlineExceeded(f"the coordinator took nothing for {_SEND_S:g} s")
        channel.send(messages.encode(message), fds)

    def _handle(self, message: FromCoordinator, fds: list[int]) -> None:
        handlers = self._handlers
        try:
            if isinstance(message, ANSWERS):
                self._answered(message, fds)
            elif fds:
                handlers.on_fds(message, fds)
            elif isinstance(message, link_messages.Trim):
                handlers.on_trim(message.nbytes)
            elif isinstance(message, link_messages.AskStats):
                self.send(link_messages.Stats(message.ticket, handlers.on_stats(message.what)))
            elif isinstance(message, LogChanged):
                logs.apply(message.log)
            elif isinstance(message, link_messages.Stop):
                handlers.on_stop(message.reason)
            else:
                handlers.on_message(message)
        except Exception:  # a bug in a callback must not cost the process its link
            _log.exception("link callback failed", extra=log_fields(process=self._process))

    def _answered(self, message: Any, fds: list[int]) -> None:
        with self._lock:
            request = self._pending.take(message.ticket)
            if request is not None and not request.abandoned:
                request.answer, request.fds = message, fds
                request.answered.set()
                return
        close_all(fds)
        if request is not None and request.late is not None:
            request.late(message)

    def _disconnected(self) -> None:
        with self._lock:
            self.connected = self._counting = False
            self._pending.disconnected()
            self._outbox.disconnected()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def __del__(self) -> None:
        os.close(self._wake_fd)


def _retry_s(alone_s: float) -> float:
    return min(max(alone_s / _RETRY_PART, _RETRY_FIRST_S), _RETRY_CAP_S)


def _check_size(message: ToCoordinator) -> None:
    size = len(messages.encode(message))
    if size > MAX_MESSAGE:  # an error while sending would block the outbox for good
        raise errors.ProtocolViolation(f"a {type(message).__name__} of {size} bytes is too long")


def _decoded(data: memoryview, fds: list[int]) -> FromCoordinator:
    try:
        message: FromCoordinator = messages.decode_from_coordinator(data)
    except errors.UnreadableMessage:
        close_all(fds)
        raise
    return message
