"""Executor template: forks executors (the supervisor's side of
`shmserve.executor.process.template`).

A fork takes milliseconds and shares imported modules. If the template has ended or does not
answer, executors are exec'ed, as executors on a GPU always are.
"""

import logging
import os
import select
import socket
from math import inf

from msgspec import Struct

from shmserve.core.control.lifecycle import Restarts
from shmserve.log_fields import log_fields
from shmserve.observe import last_words
from shmserve.supervisor.processes.children import Child
from shmserve.transport.processes import spawn

_log = logging.getLogger(__name__)

_READY_S = 30.0  # longest import; then the template is killed and executors are exec'ed
_ANSWER_S = 5.0  # longest wait for an executor's pid


class Forked(Struct):
    """Executor forked by the template: a child of this process once its parent has ended."""

    pid: int

    def wait(self, timeout: float) -> int | None:
        """Return the exit status, as `subprocess` does, once the pidfd has shown the end."""
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:  # a child of an earlier supervisor
            return None


class ExecutorTemplate:
    """Keeps a template running. `command`: command line to exec; arguments are appended. Empty: no
    template."""

    def __init__(self, command: list[str], master_fd: int) -> None:
        self._command = command
        self._master_fd = master_fd
        self._child: Child | None = None
        self._socket: socket.socket | None = None
        self._ready = False
        self._given_up = False  # killed, and not ended yet
        self._due = 0.0
        # a template that is never ready is not stable
        self._restarts = Restarts(stable_s=2 * _READY_S)

    def start(self, now: float) -> Child | None:
        """Start the template if due. Return the new child, whose end must be watched, or None."""
        if self._child is not None or not self._command or now < self._due:
            return None
        own_end, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with template_end:
            arguments = [
                "--master-fd",
                str(self._master_fd),
                "--socket-fd",
                str(template_end.fileno()),
            ]
            try:
                popen = spawn(
                    [*self._command, *arguments], keep=(self._master_fd, template_end.fileno())
                )
            except OSError as ex:
                _log.error("executor template not started", extra=log_fields(error=ex))
                own_end.close()
                self._due = self._restarts.ended(now, at_once=False)
                return None
        self._socket = own_end
        self._child = Child.of("executor template", popen, now)
        self._restarts.started(now)
        return self._child

    def next_due(self) -> float:
        """Return when (monotonic) `start` has something to do; inf if never."""
        return self._due if self._child is None and self._command else inf

    def ended(self, child: Child, now: float) -> bool:
        """Note a child's end, and schedule a restart. Return False for another process."""
        if child is not self._child or self._socket is None:
            return False
        self._socket.close()
        self._child, self._socket = None, None
        self._ready = self._given_up = False
        self._due = self._restarts.ended(now)
        about = log_fields(pid=child.pid, status=child.reap())
        _log.info("executor template ended", extra=about)
        return True

    def is_coming(self, now: float) -> bool:
        """Return whether a started template is still importing modules, so that waiting pays. Kill
        a template that imports for more than `_READY_S`."""
        if self._child is None or self._ready or self._given_up:
            return False
        self._ready = self._received(0.0) == b"ready"
        if not self._ready and now - self._child.started_at >= _READY_S:
            self._give_up(self._child)
        return not self._ready and not self._given_up

    def fork(self, process: str, instance: bytes) -> Forked | None:
        """Fork an executor with `process` as id and `instance` as standard input. None: failed."""
        if self._socket is None or self._child is None or not self._ready:
            return None
        # The executor begins at a byte in this pipe, sent once its pid is known here, and ends at
        # EOF.
        go_read, go_write = os.pipe2(os.O_CLOEXEC)
        try:
            with last_words.as_stdin(instance) as stdin:
                fds = [stdin.fileno(), go_read]
                socket.send_fds(self._socket, [process.encode()], fds)
            answer = self._received(_ANSWER_S)
            if answer.isdigit():
                os.write(go_write, b"w")
                return Forked(int(answer))
        except OSError as ex:
            _log.error("executor not forked", extra=log_fields(process=process, error=ex))
        finally:
            os.close(go_read)
            os.close(go_write)
        self._give_up(self._child)
        return None

    def close(self) -> None:
        """End the template for good."""
        self._command = []
        if self._socket is not None:
            self._socket.shutdown(socket.SHUT_RDWR)

    def _give_up(self, child: Child) -> None:
        """Kill a template that does not answer. Another is started once it has ended."""
        self._ready, self._given_up = False, True
        child.kill()

    def _received(self, timeout_s: float) -> bytes:
        """Return the template's next message; empty after the time, or the template's end."""
        assert self._socket is not None
        poll = select.poll()  # `select` takes no number above 1023, which regions may fill
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return b""
        try:
            return self._socket.recv(64)
        except OSError:  # the template was killed with a message unread
            return b""
