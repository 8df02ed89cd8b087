"""Keeper: the process that `shmserve serve` becomes, and the parent of the gunicorn masters.

    python -m shmserve.supervisor.generations.keeper TITLE COMMAND...

A container ends with pid 1. supervisord, systemd and shells take the end of their child for the end
of the service. A handover (`supervisor.generations.handover`) ends the old master. So the child is
the keeper, which outlives every generation.

The keeper does four things:

- It starts COMMAND, the first master.
- It passes signals on to the master that serves.
- It reaps: as pid 1, or as the child subreaper that `shmserve serve` has made of this process.
- It ends when no master is left, with the status of the master that served last.

Masters inherit the writing end of a pipe, and the keeper's pid (`VARIABLE`, `passed_on`). A
handover writes the pid of the new master to the pipe before it lets that master serve, so the
newest pid is the master to signal. Once the new master serves, the handover writes the pid again:
the status of older masters no longer matters. The keeper reads the pipe only when a signal
arrives, because only then is the answer needed.

If the keeper is killed, the kernel kills masters that are its children. A master whose parent is
still a handover sees the reading end closed (`launch.beat`).

This file imports no other file of the server, and the keeper has no thread, log, lock or socket.
So the process needs no restart for a new version of the server, and little memory.

A master that dies of the signal by which the keeper ended the service has ended cleanly. A master
that ends unasked with status 0 and leaves descendants behind is an error (status 1), so gunicorn's
`daemon` is refused (`supervisor.foreground`). A signal to end the service that arrives between two
masters is passed on to the remaining master.

The keeper stays systemd's main process. READY=1 and WATCHDOG=1 come from the supervisor that
serves (`NotifyAccess=all`). Without a keeper (gunicorn was started directly) systemd is told each
new main process. Without `NOTIFY_SOCKET` as well, a reload by handover is refused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from setproctitle import setproctitle

VARIABLE = "_SHMSERVE_KEEPER_FD"  # underscore, because `SHMSERVE_...` would be a setting

_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}
_PASSED = {
    *_ENDING,
    *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU),
}
_HEARD = {*_PASSED, signal.SIGCHLD}
_PIPE_BYTES = 4096
_LAST_S = 10.0  # processes of a master that was killed end within 5 s
_SAY_S = 1.0  # longest wait for a line to go out
_AGAIN_S = 0.05  # repeats the alarm, in case the first came before the write began


def main() -> int:
    title, *command = sys.argv[1:]
    setproctitle(title)
    # An ignored SIGCHLD is inherited, and then the kernel reaps before a status can be read.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked signals wait for `sigwait`; the kernel drops others of pid 1 that have no handler.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    reading, writing = os.pipe()
    keeper = os.getpid()
    master = os.fork()
    if not master:
        _become(command, keeper, writing, mask)
    _close_all_but(reading)
    os.set_blocking(reading, False)
    masters = _Masters(master)
    _keep(masters, reading)
    if not _await_descendants() and not masters.status and not masters.ending:
        _say("the main process ended, and what it had started goes on: killing it")
        return 1
    return 128 - masters.status if masters.status < 0 else masters.status


def passed_on(writing: int, keeper: int) -> str:
    """Return the value of `VARIABLE` for a master: the pipe's descriptor and the keeper's pid."""
    return f"{writing}:{keeper}"


def _become(command: list[str], keeper: int, writing: int, mask: set[int]) -> None:
    """Become the master, in the child. The master's own session, which handovers also make, has a
    terminal's Ctrl-C come once: through the keeper."""
    try:
        os.setsid()
        os.set_inheritable(writing, True)
        os.environ[VARIABLE] = passed_on(writing, keeper)
        if os.environ.get("LISTEN_PID") == str(keeper):  # sockets are for this process
            os.environ["LISTEN_PID"] = str(os.getpid())
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(command[0], command)
    except OSError as ex:
        _say(f"{command[0]} cannot be started: {ex.strerror}")
    finally:
        os._exit(127)


def _say(text: str) -> None:
    """Write a line to stderr, or give up: nobody may read stderr, and the keeper must end."""
    signal.signal(signal.SIGALRM, _give_up)
    with contextlib.suppress(OSError):
        signal.setitimer(signal.ITIMER_REAL, _SAY_S, _AGAIN_S)
        os.write(2, f"shmserve: {text}\n".encode())
    with contextlib.suppress(OSError):
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _give_up(*_: object) -> None:
    raise TimeoutError


def _close_all_but(kept_fd: int) -> None:
    """Close sockets and memory that were passed to the master. A listening socket left open here
    would take connections after the service has stopped listening."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != kept_fd:
            try:
                os.close(fd)
            except OSError:  # the descriptor that has listed the folder is closed already
                continue


class _Masters:
    """The gunicorn masters that have not ended, and what becomes of the service.

    Attributes:
        pids: the newest last. The keeper alone reaps them, so no pid is used again before.
        status: exit code of the master that served last, negative for a signal.
        ending: signals to end the service that the keeper has passed on.
    """

    def __init__(self, first: int) -> None:
        self.pids = [first]
        self.status = 0
        self.ending: list[int] = []
        self._superseded: set[int] = set()

    def told(self, pid: int) -> None:
        """Note a pid from a handover: a new master or, the second time, that this master
        serves."""
        if pid in self.pids:
            self._superseded.update(self.pids[: self.pids.index(pid)])
        elif _is_descendant(pid):
            self.pids.append(pid)

    def signal(self, number: int) -> None:
        """Pass a signal on to the newest master."""
        if number in _ENDING:
            self.ending.append(number)
        if self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[-1], number)

    def ended(self, pid: int, code: int) -> None:
        """Note the end of a process, which may be no master."""
        if pid not in self.pids:
            return
        self.pids.remove(pid)
        if pid in self._superseded:
            self._superseded.remove(pid)
        else:
            # A master dies of SIGTERM itself while gunicorn is still imported: a clean stop, too.
            self.status = 0 if -code in self.ending else code
        # The signal may have reached a master in the middle of a handover, or a new master that
        # was never let serve. The service must end in both cases.
        if self.ending:
            self.signal(self.ending[-1])


def _keep(masters: _Masters, pipe_fd: int) -> None:
    """Follow the generations until no master is left. `pipe_fd` does not block."""
    while masters.pids:
        number = signal.sigwait(_HEARD)
        for pid in _newer(pipe_fd):
            masters.told(pid)
        if number != signal.SIGCHLD:
            masters.signal(number)
            continue
        for pid, code in _reap().items():
            masters.ended(pid, code)


def _newer(pipe_fd: int) -> list[int]:
    """Return pids of masters that handovers have written since the last call."""
    try:
        return [int(line) for line in os.read(pipe_fd, _PIPE_BYTES).split()]
    except BlockingIOError:
        return []


def _is_descendant(pid: int) -> bool:
    """Return whether the process exists and descends from this one."""
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return False
        if pid == os.getpid():
            return True
    return False


def _reap() -> dict[int, int]:
    """Reap all children that have ended, adopted children included. Return exit codes by pid,
    negative for signals."""
    codes = {}
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:  # no child is left
        pass
    return codes


def _await_descendants() -> bool:
    """Let the rest of the service end: the end of pid 1 would kill other processes half-way.
    Return False if processes are left after `_LAST_S`, or when another signal says to end."""
    deadline = time.monotonic() + _LAST_S
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid:
            continue
        heard = signal.sigtimedwait({signal.SIGCHLD, *_ENDING}, remaining_s)
        if heard is not None and heard.si_signo in _ENDING:
            return False
    return False


if __name__ == "__main__":
    sys.exit(main())
