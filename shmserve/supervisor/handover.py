"""`shmserve reload`: a new generation of the service takes the place of this one.

The process here is a fork of the gunicorn master, made by its signal SIGUSR2. It starts another
master, to which it passes all listening sockets as systemd would; that one's generation has a run
directory of its own, loads all models, and says in a pipe that it serves, or why it will not. Then
the old master is told to stop, as for any other reason, or nothing has happened. Ends of processes
tell all that is not said: a new generation whose handover has ended gives up, and one that ends is
reported.
"""

from __future__ import annotations

import fcntl
import logging
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from msgspec import Struct
from setproctitle import setproctitle

from shmserve import config
from shmserve.config import COMMAND_VARIABLE, GENERATION_VARIABLE, Settings
from shmserve.supervisor import activation
from shmserve.transport import rundir
from shmserve.transport.notify import Notifier
from shmserve.transport.processes import describe_status, has_ended, pidfd_open, send_signal

_log = logging.getLogger(__name__)

_BEYOND_LOAD_S = 60.0  # for a generation to be there, beside its models
_EXTEND_EVERY_S = 20.0
_EXTENSION = "EXTEND_TIMEOUT_USEC=60000000"
_END_S = 10.0  # for processes that are told to end
_REPORT_BYTES = 4096


class Old(Struct, frozen=True):
    """The generation that serves, as its master knows it: an eventfd that it writes when it stops,
    its HTTP sockets by name and descriptor, those of gRPC, and the environment that it was started
    with."""

    settings: Settings
    master_fd: int
    stopping_fd: int
    http: Sequence[tuple[str, int]]
    grpc_fds: Sequence[int]
    environ: dict[str, str]


def given_up(report: int) -> bool:
    """In a new generation: whether nobody waits any more for what it says there."""
    poll = select.poll()
    poll.register(report, 0)
    return bool(poll.poll(0))


def run(old: Old) -> NoReturn:
    """Hand over, in a fork of the master. Does not return."""
    status = 1
    try:
        status = 0 if _hand_over(old) else 1
    except Exception:
        _log.exception("reload failed")
    finally:
        logging.shutdown()
        os._exit(status)


def _hand_over(old: Old) -> bool:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    base = config.base_dir(old.settings)
    setproctitle(f"shmserve: handover ({base})")
    lock = rundir.lock(base, "handover")
    if not lock.acquire():
        _log.error("reload refused: another one is under way pid=%s", lock.holder())
        return False
    notifier = Notifier(old.environ.get("NOTIFY_SOCKET", ""))
    generation = f"g{os.getpid()}"
    rundir.drop_generation(base, generation)  # of an earlier process of this number
    reading, writing = os.pipe()
    pid = _start(old, generation, writing)
    os.close(writing)
    pidfd = pidfd_open(pid)
    assert pidfd is not None
    _log.info("reload begun generation=%s pid=%d", generation, pid)
    said = _await(reading, pidfd, old, notifier)
    if said == rundir.SERVES:
        said = _let_serve(base, generation)
    if said == rundir.SERVES:
        notifier.send(f"MAINPID={pid}")
        _log.info("reload done: generation=%s serves", generation)
        rundir.hand_over(base, f"{generation} {rundir.SERVES}")
        send_signal(old.master_fd, signal.SIGTERM)
        # Another reload waits for that by this process's lock
        has_ended(old.master_fd, 3 * old.settings.drain_timeout_s + _END_S)
        return True
    _log.error("reload failed, the generation before serves on reason=%s", said)
    notifier.send(f"STATUS=reload failed, serving as before: {said}")
    _end(base, generation, pid, pidfd)
    rundir.hand_over(base, f"{generation} failed: {said}")
    return False


def _let_serve(base: str, generation: str) -> str:
    """`SERVES`, or why it cannot."""
    try:
        rundir.serve(base, generation)
    except OSError as ex:
        return f"run_dir: {ex.strerror}"
    return rundir.SERVES


def _start(old: Old, generation: str, report: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        passed = [*old.http, *((activation.GRPC, fd) for fd in old.grpc_fds)]
        passed.append((activation.REPORT, report))
        # Where none of these is moved to, to tell of an exec that fails
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, 3 + len(passed))
        environ = {**old.environ, GENERATION_VARIABLE: generation}
        called = shlex.split(environ.get(COMMAND_VARIABLE, ""))
        command = called or [sys.executable, *sys.orig_argv[1:]]
        activation.exec_with(command, environ, passed)
    except OSError as ex:
        os.write(report, f"it cannot be started: {ex.strerror}".encode())
    finally:
        os._exit(1)


def _await(reading: int, pidfd: int, old: Old, notifier: Notifier) -> str:
    """What the new generation says, or what is to be said of it."""
    limit_s = old.settings.load_timeout_s + _BEYOND_LOAD_S
    deadline = time.monotonic() + limit_s
    poll = select.poll()
    for fd in (reading, pidfd, old.master_fd, old.stopping_fd):
        poll.register(fd, select.POLLIN)
    while time.monotonic() < deadline:
        notifier.send(_EXTENSION, "STATUS=reloading: the next generation loads its models")
        ready = {fd for fd, _ in poll.poll(_EXTEND_EVERY_S * 1000)}
        if ready & {old.master_fd, old.stopping_fd}:
            return "the service ends"
        said = os.read(reading, _REPORT_BYTES).decode(errors="replace") if reading in ready else ""
        if said:
            return " ".join(said.split())
        if pidfd in ready or reading in ready:
            return "its master ended before it served; the log says more"
    return f"it did not serve within {limit_s:g} s (load_timeout_s)"


def _end(base: str, generation: str, pid: int, pidfd: int) -> None:
    """Nothing is left of a generation that did not come to serve."""
    send_signal(pidfd, signal.SIGTERM)
    if not has_ended(pidfd, _END_S):
        send_signal(pidfd, signal.SIGKILL)
        has_ended(pidfd, _END_S)
    ended, status = os.waitpid(pid, os.WNOHANG)
    how = describe_status(os.waitstatus_to_exitcode(status) if ended else None)
    _log.info("the new generation's master has ended: %s", how)
    run_dir = os.path.join(base, generation)
    for role in ("supervisor", "coordinator"):
        holder = rundir.lock(run_dir, role).holder_pidfd() if os.path.isdir(run_dir) else None
        if holder is not None:
            has_ended(holder[1], _END_S)
    rundir.drop_generation(base, generation)
