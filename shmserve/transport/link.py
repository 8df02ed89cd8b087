"""A process's link to the coordinator: one background thread that reconnects until closed.

Everything a process asks of or tells the coordinator goes through here; nothing of it is on
a request's way. Callers never touch the socket: they append to a bounded outbox and wake
the thread, so a slow coordinator blocks nobody (grants wait, with a deadline).

After the coordinator was restarted the hello tells it what it must know: what this process
holds of the pool and, for an executor, what it has loaded. Give-backs of the time without a
connection are therefore dropped, and grants that are still waited for are asked again.

Callbacks run on the link's thread: they must not wait for a grant or an answer.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from shmserve.errors import DeadlineExceeded, PeerDied, ProtocolViolation, Unavailable
from shmserve.observe import logs
from shmserve.protocol import messages
from shmserve.protocol.control.link_messages import (
    AskStats,
    GiveBack,
    Granted,
    Hello,
    Loaded,
    Stats,
    Stop,
    Trim,
    Welcome,
)
from shmserve.protocol.control.settings_messages import LogChanged
from shmserve.protocol.messages import ANSWERS, VOID, FromCoordinator, ToCoordinator
from shmserve.transport import rundir
from shmserve.transport.channel import MAX_MESSAGE, Channel
from shmserve.transport.grants import Grants
from shmserve.transport.questions import Make, Questions, close_all

_log = logging.getLogger(__name__)

_CONNECT_S = 1.0
_WELCOME_S = 5.0
_SEND_S = 5.0
_RETRY_FIRST_S, _RETRY_CAP_S = 0.02, 0.5
_CLOSE_S = 2.0
_OUTBOX = 4096
ARENA_WAIT_S = 2.0


class Link:
    """See the module. `on_message` gets what no other callback is for (supervisor, cli)."""

    def __init__(
        self,
        run_dir: str,
        role: str,
        process: str,
        *,
        on_trim: Callable[[int], None],
        on_stats: Callable[[str], dict[str, Any]],
        on_stop: Callable[[str], None] | None = None,
        held_bytes: Callable[[], int],
        loaded: Callable[[], Loaded | None] | None = None,
        instance: str = "",
        on_message: Callable[[FromCoordinator], None] | None = None,
        on_fds: Callable[[FromCoordinator, list[int]], None] | None = None,
    ) -> None:
        self._path = os.path.join(run_dir, rundir.COORDINATOR_SOCKET)
        self._role = role
        self._process = process
        self._on_trim = on_trim
        self._on_stats = on_stats
        self._on_stop = on_stop or (lambda reason: None)
        self._on_message = on_message or (lambda message: None)
        self._on_fds = on_fds or (lambda message, fds: close_all(fds))
        self._questions = Questions()
        self._held_bytes = held_bytes
        self._loaded = loaded or (lambda: None)
        self._instance = instance
        self._lock = threading.Lock()  # guards the three below
        self._outbox: deque[ToCoordinator] = deque(maxlen=_OUTBOX)
        self._riding: dict[int, list[int]] = {}  # fds by id() of their message in the outbox
        self._grants = Grants()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shmserve-link", daemon=True)
        self._counting = False  # give-backs count from the moment a hello told what is held
        self.connected = False
        self.epoch = ""
        self._arena_bytes = 0
        self._welcomed = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send what is in the outbox if connected, then end the thread.

        Who has something to say and was not welcomed yet (it has only just started) waits
        for that a little: why a model cannot be loaded must not be lost.
        """
        if self._outbox and self._thread.is_alive() and not self._closing.is_set():
            self._welcomed.wait(_CLOSE_S)
        self._closing.set()
        self._wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)

    def send(self, message: ToCoordinator, fds: Sequence[int] = ()) -> None:
        """Queue a message; it is kept while there is no connection, unless fds ride along
        (copies of them; the caller's stay its own): those are for one coordinator only.

        Raises:
            ProtocolViolation: it is longer than a channel carries.
        """
        size = len(messages.encode(message))
        if size > MAX_MESSAGE:  # found out while sending, it would block the outbox for good
            raise ProtocolViolation(f"a {type(message).__name__} of {size} bytes is too long")
        with self._lock:
            if not fds:
                self._outbox.append(message)
            elif self.connected:
                self._outbox.append(message)
                self._riding[id(message)] = [os.dup(fd) for fd in fds]
        self._wake()

    def ask(self, make: Make, timeout_s: float) -> tuple[FromCoordinator, list[int]]:
        """Ask and wait for the answer; its fds are the caller's.

        Raises:
            Unavailable: no answer within `timeout_s`.
        """
        number, question = self._questions.open(make)
        if self.connected:  # else it is asked with the next hello; asking twice is harmless
            self.send(make(number, False))
        question.answered.wait(timeout_s)
        self._questions.close(number)
        if question.answer is None:
            raise Unavailable(f"the coordinator did not answer within {timeout_s:g} s")
        return question.answer, question.fds

    def give_back(self, nbytes: int) -> None:
        """Return pool budget; never blocks, never fails."""
        with self._lock:
            if self._counting:  # else the next hello tells
                self._outbox.append(GiveBack(nbytes))
        self._wake()

    def grant(self, nbytes: int, timeout_s: float) -> bool:
        """Ask for pool budget; False: refused, or no answer within `timeout_s`."""
        with self._lock:
            ticket = self._grants.open(nbytes)
            if self.connected:
                self._outbox.append(ticket.question)
        self._wake()
        ticket.wait(timeout_s)
        with self._lock:
            return self._grants.close(ticket, self.connected)

    def arena_bytes(self) -> int:
        """How large an arena's first segment should be: the coordinator's word.

        Waits for the first welcome, at most `ARENA_WAIT_S`; 0: there was none.
        """
        self._welcomed.wait(ARENA_WAIT_S)
        return self._arena_bytes

    # ---------------------------------------------------------- the link's thread

    def _run(self) -> None:
        pause = _RETRY_FIRST_S
        while not self._closing.is_set():
            try:
                channel = Channel.connect(self._path, _CONNECT_S)
            except PeerDied:
                self._closing.wait(pause)
                pause = min(pause * 2, _RETRY_CAP_S)
                continue
            try:
                self._serve(channel)
                pause = _RETRY_FIRST_S
            except PeerDied:
                pause = _RETRY_FIRST_S if self.connected else min(pause * 2, _RETRY_CAP_S)
            except (DeadlineExceeded, ProtocolViolation, msgspec.DecodeError) as ex:
                _log.warning("link broken process=%s error=%s", self._process, ex)
                pause = _RETRY_CAP_S
            except Exception:  # whatever it was: without its link the process is lost
                _log.exception("link broken process=%s", self._process)
                pause = _RETRY_CAP_S
            finally:
                self._disconnected()
                channel.close()
            self._closing.wait(pause)

    def _serve(self, channel: Channel) -> None:
        self._greet(channel)
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while True:
            self._flush(channel)
            if self._closing.is_set():
                return
            for fd, _ in poll.poll(1000):
                if fd == self._wake_fd:
                    os.eventfd_read(self._wake_fd)
                else:
                    data, fds = channel.receive(_SEND_S)
                    self._handle(_decoded(data, fds), fds)

    def _greet(self, channel: Channel) -> None:
        with self._lock:
            self._counting = True
        hello = Hello(
            version=messages.VERSION,
            role=self._role,
            process=self._process,
            pid=os.getpid(),
            held_bytes=self._held_bytes(),
            loaded=self._loaded(),
            instance=self._instance,
        )
        self._send(channel, hello)
        data, fds = channel.receive(_WELCOME_S)
        close_all(fds)
        welcome = messages.decode_from_coordinator(data)
        if not isinstance(welcome, Welcome) or welcome.version != messages.VERSION:
            raise ProtocolViolation("the coordinator speaks another version")
        with self._lock:
            self.epoch, self._arena_bytes = welcome.epoch, welcome.arena_bytes
            self._welcomed.set()
            self.connected = True
            self._outbox.extendleft(self._grants.again())
            self._outbox.extend(self._questions.again())
        self._on_message(welcome)

    def _flush(self, channel: Channel) -> None:
        while True:
            with self._lock:
                if not self._outbox:
                    return
                message = self._outbox[0]
                fds = self._riding.get(id(message), [])
            self._send(channel, message, fds)
            with self._lock:  # only now: what could not be sent stays
                if self._outbox and self._outbox[0] is message:
                    self._outbox.popleft()
                self._riding.pop(id(message), None)
            close_all(fds)

    def _send(self, channel: Channel, message: ToCoordinator, fds: Sequence[int] = ()) -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLOUT)
        if not poll.poll(_SEND_S * 1000):
            raise DeadlineExceeded(f"the coordinator took nothing for {_SEND_S:g} s")
        channel.send(messages.encode(message), fds)

    def _handle(self, message: FromCoordinator, fds: list[int]) -> None:
        if isinstance(message, Granted):
            self._answered(message)
            return
        if isinstance(message, ANSWERS):
            self._questions.answered(message.ticket, message, fds)
            return
        try:
            if fds:
                self._on_fds(message, fds)
            elif isinstance(message, Trim):
                self._on_trim(message.nbytes)
            elif isinstance(message, AskStats):
                self.send(Stats(message.ticket, self._on_stats(message.what)))
            elif isinstance(message, LogChanged):
                logs.apply(message.log)
            elif isinstance(message, Stop):
                self._on_stop(message.reason)
            else:
                self._on_message(message)
        except Exception:  # a callback's fault must not cost the process its link
            _log.exception("link callback failed process=%s", self._process)

    def _answered(self, message: Granted) -> None:
        with self._lock:
            unwanted = self._grants.answered(message)
            if unwanted:
                self._outbox.append(GiveBack(unwanted))
        if not message.granted:
            _log.info("pool budget refused process=%s reason=%s", self._process, message.reason)

    def _disconnected(self) -> None:
        with self._lock:
            self.connected = self._counting = False
            self._grants.disconnected()
            kept = [
                m for m in self._outbox if not isinstance(m, VOID) and id(m) not in self._riding
            ]
            self._outbox.clear()
            self._outbox.extend(kept)
            riding, self._riding = self._riding, {}
        for fds in riding.values():
            close_all(fds)

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def __del__(self) -> None:
        os.close(self._wake_fd)


def _decoded(data: memoryview, fds: list[int]) -> FromCoordinator:
    try:
        message: FromCoordinator = messages.decode_from_coordinator(data)
    except msgspec.DecodeError:
        close_all(fds)
        raise
    return message
