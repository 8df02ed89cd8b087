"""Keeper: the process that `shmserve serve` becomes, and the parent of the gunicorn masters.

    python -m shmserve.supervisor.generations.keeper TITLE RUN_DIR LIMIT_S AGAIN COMMAND...

A container ends with pid 1. supervisord, systemd and shells take the end of their child for the end
of the service. A handover (`supervisor.generations.handover`) ends the old master. So the child is
the keeper, which outlives every generation.

The keeper does five things:

- It starts COMMAND, the first master.
- It passes signals on to the master that serves, and signals to end the service to all masters.
- It reaps: as pid 1, or as the child subreaper that `shmserve serve` has made of this process.
- It kills a master that serves and gives no sign of life for LIMIT_S.
- It ends when no master is left, with the status of the master that served last. If that master was
  killed, the keeper starts the service again instead.

Masters inherit the writing end of a pipe, and the keeper's pid (`VARIABLE`, `passed_on`). A
handover writes the pid of the new master to the pipe when that master has been started. Once the
new master serves, the handover writes the pid again: the status of older masters no longer matters.
The keeper reads the pipe when a signal arrives, and at each look for signs of life.

If the keeper is killed, the kernel kills masters that are its children. A master whose parent is
still a handover sees the reading end closed (`launch.beat`).

**A killed master.** The kernel, an operator, or the keeper (for silence) may kill a master. If a
reload is under way, the new generation goes on, and serves when its models are loaded. Otherwise
all other processes end within 5 s, and the keeper kills what is left after 10 s. Then the keeper
runs AGAIN, a command line that starts the present version of the server. Two cases end the keeper
instead, with the status of the master:

- A service manager has passed sockets or wants notifications, as systemd does. It restarts the
  service itself, with the sockets and the memory that it keeps.
- The service was started again less than a minute ago.

A master that dies of SIGTERM, SIGINT or SIGQUIT, or ends by itself with any status, was not killed
in this sense. If the keeper has passed on the signal, the master has ended cleanly. A master that
ends unasked with status 0 and leaves descendants behind is an error (status 1), so gunicorn's
`daemon` is refused (`supervisor.foreground`).

The only import from the server is a small one (`core.control.silence`), and the keeper has no
thread, log, lock or socket. So the process needs no restart for a new version of the server, and
little memory.

The keeper stays systemd's main process. READY=1 and WATCHDOG=1 come from the supervisor that
serves (`NotifyAccess=all`). Without a keeper (gunicorn was started directly) systemd is told each
new main process. Without `NOTIFY_SOCKET` as well, a reload by handover is refused.
"""

import contextlib
import os
import shlex
import signal
import sys
import time

from setproctitle import setproctitle

from shmserve.core.control.silence import Silence, period_s

VARIABLE = "_SHMSERVE_KEEPER_FD"  # underscore, because `SHMSERVE_...` would be a setting

_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}
_PASSED = {
    *_ENDING,
    *(signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU),
}
_HEARD = {*_PASSED, signal.SIGCHLD, signal.SIGALRM}
_MANAGED = ("NOTIFY_SOCKET", "LISTEN_PID")  # variables of service managers
_PIPE_BYTES = 4096
_BEAT_BYTES = 8  # at the beginning of a lock file (`transport.processes.FileLock`)
_LAST_S = 10.0  # processes of a master that was killed end within 5 s
_SAY_S = 1.0  # longest wait for a line to go out
_ALARM_S = 0.05  # repeats the alarm, in case the first came before the write began
_KILL_EVERY_S = 0.1
_AGAIN_S = 60.0  # shortest time between two starts of the service


def main() -> int:
    title, run_dir, limit_s, again, *command = sys.argv[1:]
    setproctitle(title)
    # An ignored SIGCHLD is inherited, and then the kernel reaps before a status can be read.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Blocked signals wait for `sigwait`; the kernel drops others of pid 1 without a handler.
    # `sigtimedwait` returns no true signal if a stop of this process outlasts the limit.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    managed = not os.environ.keys().isdisjoint(_MANAGED)
    started_again_at: float | None = None
    others = _children()  # of the program that became the keeper, such as a shell
    while True:
        masters, reading = _start(command, mask)
        _keep(masters, reading, _SignOfLife(run_dir, float(limit_s)))
        os.close(reading)
        none_left = _end_descendants(masters, others)
        now = time.monotonic()
        lately = started_again_at is not None and now - started_again_at < _AGAIN_S
        if masters.was_killed and lately:
            _say(f"the main process was killed again (signal {-masters.status}): ending")
        if managed or lately or not masters.was_killed:
            break
        _say(f"the main process was killed (signal {-masters.status}): starting the service again")
        command, started_again_at = shlex.split(again), now
    if not none_left and not masters.status and not masters.ending:
        _say("the main process ended, and what it had left behind was killed")
        return 1
    return 128 - masters.status if masters.status < 0 else masters.status


def _start(command: list[str], mask: set[int]) -> "tuple[_Masters, int]":
    """Start the first master. Return the masters, and the reading end of their pipe, which does
    not block."""
    reading, writing = os.pipe()
    keeper = os.getpid()
    master = os.fork()
    if not master:
        _become(command, keeper, writing, mask)
    _close_all_but(reading)
    os.set_blocking(reading, False)
    return _Masters(master), reading


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
    """Write a line to stderr, or give up: nobody may read stderr, and the keeper must go on."""
    ticks = signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, _give_up)
    with contextlib.suppress(OSError):  # a tick is pending
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    with contextlib.suppress(OSError):
        signal.setitimer(signal.ITIMER_REAL, _SAY_S, _ALARM_S)
        os.write(2, f"shmserve: {text}\n".encode())
    with contextlib.suppress(OSError):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    signal.setitimer(signal.ITIMER_REAL, *ticks)


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
        serving: the master that serves, or comes to serve if the one before was killed.
        status: exit code of the master that served last, negative for a signal.
        ending: signals to end the service that the keeper has passed on.
    """

    def __init__(self, first: int) -> None:
        self.pids = [first]
        self.serving = first
        self.status = 0
        self.ending: list[int] = []
        self._served = {first}
        self._superseded: set[int] = set()

    @property
    def must_beat(self) -> bool:
        """Return whether the master must give signs of life: it serves, and no signal to end was
        passed on."""
        return self.serving in self.pids and self.serving in self._served and not self.ending

    @property
    def was_killed(self) -> bool:
        """Return whether the service has ended because its master was killed."""
        return self.status < 0 and -self.status not in _ENDING and not self.ending

    def told(self, pid: int) -> None:
        """Note a pid from a handover: of a new master or, the second time, of a serving one."""
        if pid in self.pids:
            self._superseded.update(self.pids[: self.pids.index(pid)])
            self._served.add(pid)
            self.serving = pid
        elif _is_descendant(pid):
            self.pids.append(pid)
            if self.ending:  # the signal came in the middle of a handover
                _send(pid, self.ending[-1])

    def signal(self, number: int) -> None:
        """Pass a signal on: to all masters if the service must end, else to the master that
        serves."""
        if number in _ENDING:
            self.ending.append(number)
        for pid in self.pids:
            if number in _ENDING or pid == self.serving:
                _send(pid, number)

    def ended(self, pid: int, code: int) -> None:
        """Note the end of a process, which may be no master."""
        if pid not in self.pids:
            return
        self.pids.remove(pid)
        # The end of a new master that never came to serve says nothing, unless it was told to end.
        if (pid in self._served or self.ending) and pid not in self._superseded:
            # A master dies of SIGTERM itself while gunicorn is still imported: a clean stop, too.
            self.status = 0 if -code in self.ending else code
        if pid == self.serving and self.pids and self.pids[-1] not in self._superseded:
            self.serving = self.pids[-1]
        self._served.discard(pid)
        self._superseded.discard(pid)


class _SignOfLife:
    """Sign of life of the master that serves (`launch.beat`), in its lock file.

    Attributes:
        look_s: seconds between two looks.
    """

    def __init__(self, run_dir: str, limit_s: float) -> None:
        self._run_dir = run_dir
        self._limit_s = limit_s
        self.look_s = period_s(limit_s)
        self._silence = Silence(self.look_s)

    def missing(self) -> bool:
        """Return whether the master has been silent for longer than the limit. A master without
        any sign of life is not judged: gunicorn runs with `timeout` 0, or still starts."""
        beat = self._beat()
        silent_s = self._silence.seconds(beat, time.monotonic())
        return any(beat) and silent_s > self._limit_s

    def _beat(self) -> bytes:
        generation = ""
        with contextlib.suppress(OSError):  # the first generation, in the run directory itself
            generation = os.readlink(os.path.join(self._run_dir, "serving"))
        try:
            path = os.path.join(self._run_dir, generation, "master.lock")
            with open(path, "rb") as file:
                return file.read(_BEAT_BYTES)
        except OSError:
            return b""


def _keep(masters: _Masters, pipe_fd: int, life: _SignOfLife) -> None:
    """Follow the generations until no master is left. `pipe_fd` does not block."""
    signal.setitimer(signal.ITIMER_REAL, life.look_s, life.look_s)
    while masters.pids:
        number = signal.sigwait(_HEARD)
        for pid in _newer(pipe_fd):
            masters.told(pid)
        if number in _PASSED:
            masters.signal(number)
            continue
        for pid, code in _reap().items():
            masters.ended(pid, code)
        if life.missing() and masters.must_beat:
            _say("the main process gives no sign of life: killing it")
            _send(masters.serving, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _newer(pipe_fd: int) -> list[int]:
    """Return pids of masters that handovers have written since the last call."""
    try:
        return [int(line) for line in os.read(pipe_fd, _PIPE_BYTES).split()]
    except BlockingIOError:
        return []


def _is_descendant(pid: int) -> bool:
    """Return whether the process exists and descends from this one."""
    while pid > 1:
        pid = _parent(pid)
        if pid == os.getpid():
            return True
    return False


def _parent(pid: int) -> int:
    """Return the pid of the parent; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _reap() -> dict[int, int]:
    """Reap all ended children, adopted or not. Return codes by pid, negative for signals."""
    codes = {}
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:  # no child is left
        pass
    return codes


def _end_descendants(masters: _Masters, others: set[int]) -> bool:
    """Let the rest of the service end, and kill what is left after `_LAST_S`, or when a signal says
    to end; leave `others` alone. The end of pid 1 would kill other processes half-way. Return False
    if processes had to be killed."""
    killing, deadline = False, time.monotonic() + _LAST_S
    signal.setitimer(signal.ITIMER_REAL, _KILL_EVERY_S, _KILL_EVERY_S)
    while _left(others):
        number = signal.sigwait(_HEARD)  # other signals had been for the master that has ended
        if number in _ENDING:
            masters.ending.append(number)
        late = time.monotonic() > deadline
        if killing and late:  # stuck in the kernel
            break
        if not killing and (late or number in _ENDING):
            killing, deadline = True, time.monotonic() + _LAST_S
        if killing:
            for pid in _left(others):  # orphans of killed processes become children, too
                _send(pid, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    return not killing


def _left(others: set[int]) -> set[int]:
    """Reap ended children. Return the remaining children, without `others`."""
    _reap()
    return _children() - others


def _children() -> set[int]:
    """Return the pids of all children, adopted or not."""
    own = os.getpid()
    return {int(n) for n in os.listdir("/proc") if n.isdigit() and _parent(int(n)) == own}


if __name__ == "__main__":
    sys.exit(main())
