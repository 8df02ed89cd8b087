"""Handover (`shmserve reload`): a new generation of the service takes the place of the old.

This process is a fork of the gunicorn master, made on SIGUSR2. The steps:

- The handover starts another master, and passes all listening sockets to it as systemd would.
- The new generation has its own run directory. It loads all models and reports through a pipe that
  it serves, or why it will not.
- If the new generation serves, the old master is told to stop, as for any other reason. If not,
  nothing has happened.
- A keeper, if there is one, is told of the new master and stays. Otherwise systemd is told the new
  main process. Without a keeper and without systemd, the reload is refused.

Ends of processes say the rest: a new generation whose handover has ended gives up, and the end of
a new generation is reported.

The run directory of a generation lies in `run_dir` (SHMSERVE_GENERATION names it to its
processes). So each generation has its own locks, epoch, registry, pool and sockets. The link
`serving` in `run_dir` names the generation that serves. The link decides:

- when HTTP workers begin to accept
- which supervisor speaks to systemd (`supervisor.announce`), has the client socket and writes the
  history
- which generation `shmserve show` asks

Before the link is set, nothing of the old generation has changed, so the new generation may die of
anything. If the handover process dies, the new generation ends unless it serves already. The new
generation also ends if the old one is told to stop. If the old master is killed instead, and a
keeper holds the service, the new generation goes on, and serves as soon as its models are loaded.
The generation that serves removes the files of HTTP's Unix sockets when it stops
(`launch.stopping`).

No stopped process delays a reload. The handover kills processes of either generation that have been
stopped for `STOPPED_S` (`generation_processes`); the old master kills a stopped handover (`watch`).
Other processes replace the killed ones, or the reload fails. The handover reports a failure before
it removes files and processes of the failed generation.
"""

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
from shmserve.log_fields import log_fields
from shmserve.supervisor.generations import activation, keeper
from shmserve.supervisor.generations.generation_processes import (
    GenerationProcesses,
    StoppedWatch,
)
from shmserve.transport import rundir
from shmserve.transport.notify import Notifier
from shmserve.transport.processes import describe_status, pidfd_open, send_signal

_log = logging.getLogger(__name__)

_BEYOND_LOAD_S = 60.0  # for the start of a generation, beyond the loading of models
_EXTEND_EVERY_S = 20.0
_LOOK_S = 1.0
_EXTENSION = "EXTEND_TIMEOUT_USEC=60000000"
_END_S = 10.0  # for processes to end after SIGTERM
_NO_KEEPER = (
    "gunicorn was started directly, so its end would be the end of the service for whoever did"
    " that; start it with `shmserve serve`"
)


class Old(Struct, frozen=True):
    """The generation that serves, as its master knows it.

    Attributes:
        stopping_fd: eventfd that the master writes when it stops.
        http: HTTP sockets, by name and descriptor.
        grpc_fds: gRPC sockets that systemd has passed.
        environ: environment that the master was started with.
        keeper_fd: the keeper's pipe; -1 if gunicorn was started directly.
        keeper_pid: pid of the keeper; 0 if gunicorn was started directly.
    """

    settings: Settings
    master_fd: int
    stopping_fd: int
    http: Sequence[tuple[str, int]]
    grpc_fds: Sequence[int]
    environ: dict[str, str]
    keeper_fd: int = -1
    keeper_pid: int = 0


def given_up(report: int) -> bool:
    """Return whether no process reads the pipe `report` any more."""
    poll = select.poll()
    poll.register(report, 0)
    return bool(poll.poll(0))


def watch(base: str, stopped: StoppedWatch) -> None:
    """Kill a handover that is stopped, from a master. Called at each of the master's signs of
    life."""
    if (holder := rundir.lock(base, "handover").holder_pidfd()) is not None:
        pid, pidfd = holder
        stopped.look({pid: pidfd})
        os.close(pidfd)


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
        about = log_fields(pid=lock.holder())
        _log.error("reload refused: another one is under way", extra=about)
        return False
    notifier = Notifier(old.environ.get("NOTIFY_SOCKET", ""))
    generation = f"g{os.getpid()}"
    if old.keeper_fd < 0 and not notifier.address:
        return _refuse(base, generation, _NO_KEEPER, notifier)
    rundir.drop_generation(base, generation)  # of an earlier process with the same pid
    reading, writing = os.pipe()
    pid = _start(old, generation, writing)
    os.close(writing)
    pidfd = pidfd_open(pid)
    assert pidfd is not None
    _log.info("reload begun", extra=log_fields(generation=generation, pid=pid))
    processes = GenerationProcesses(os.path.join(base, generation), pid)
    report = "the service ends"
    if _tell_keeper(old, pid):
        report = _await(reading, pidfd, old, notifier, processes)
    if report == rundir.SERVES:
        report = _let_serve(old, base, generation, pid)
    if report == rundir.SERVES:
        if old.keeper_fd < 0:
            notifier.send(f"MAINPID={pid}")
        _log.info("reload done", extra=log_fields(generation=generation))
        rundir.hand_over(base, f"{generation} {rundir.SERVES}")
        _end_old(old, base)
        return True
    _refuse(base, generation, report, notifier)
    _end(base, generation, pid, pidfd, processes)
    return False


def _refuse(base: str, generation: str, reason: str, notifier: Notifier) -> bool:
    """Tell log, systemd and `shmserve reload` that the old generation serves on. Return False."""
    _log.error("reload failed, the generation before serves on", extra=log_fields(reason=reason))
    notifier.send(f"STATUS=reload failed, serving as before: {reason}")
    rundir.hand_over(base, f"{generation} failed: {reason}")
    return False


def _let_serve(old: Old, base: str, generation: str, pid: int) -> str:
    """Let the new generation serve, and tell the keeper. Return `SERVES`, or the reason for a
    failure."""
    try:
        rundir.serve(base, generation)
    except OSError as ex:
        return f"run_dir: {ex.strerror}"
    _tell_keeper(old, pid)  # the new master notices the keeper's end as well
    return rundir.SERVES


def _tell_keeper(old: Old, pid: int) -> bool:
    """Tell the keeper, if there is one, of a new master or, the second time, that this master
    serves. Return False if the keeper has ended."""
    try:
        if old.keeper_fd >= 0:
            os.write(old.keeper_fd, f"{pid}\n".encode())
    except BrokenPipeError:
        return False
    return True


def _start(old: Old, generation: str, report: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        passed = [*old.http, *((activation.GRPC, fd) for fd in old.grpc_fds)]
        passed.append((activation.REPORT, report))
        # Above the numbers that `exec_with` fills, so that a failed exec can be reported
        report = fcntl.fcntl(report, fcntl.F_DUPFD_CLOEXEC, 3 + len(passed))
        environ = {**old.environ, GENERATION_VARIABLE: generation}
        if old.keeper_fd >= 0:  # inherited, and above the same numbers
            fd = fcntl.fcntl(old.keeper_fd, fcntl.F_DUPFD, 3 + len(passed))
            environ[keeper.VARIABLE] = keeper.passed_on(fd, old.keeper_pid)
        command = shlex.split(environ.get(COMMAND_VARIABLE, ""))
        command = command or [sys.executable, *sys.orig_argv[1:]]
        activation.exec_with(command, environ, passed)
    except OSError as ex:
        os.write(report, f"it cannot be started: {ex.strerror}".encode())
    finally:
        os._exit(1)


def _await(
    reading: int, pidfd: int, old: Old, notifier: Notifier, processes: GenerationProcesses
) -> str:
    """Wait for the new generation's report. Return the report, or the reason why none has come."""
    limit_s = old.settings.load_timeout_s + _BEYOND_LOAD_S
    deadline = time.monotonic() + limit_s
    extended_at = -_EXTEND_EVERY_S
    serves = False
    poll = select.poll()
    for fd in (reading, pidfd, old.master_fd, old.stopping_fd):
        poll.register(fd, select.POLLIN)
    while (now := time.monotonic()) < deadline:
        if now - extended_at >= _EXTEND_EVERY_S:
            extended_at = now
            notifier.send(_EXTENSION, "STATUS=reloading: the next generation loads its models")
        stopped = processes.look()
        ready = {fd for fd, _ in poll.poll(_LOOK_S * 1000)}
        if old.stopping_fd in ready or (old.master_fd in ready and old.keeper_fd < 0):
            return "the service ends"
        if old.master_fd in ready:
            _log.error("the master was killed during a reload: the new generation goes on")
            poll.unregister(old.master_fd)
        report = os.read(reading, activation.REPORT_BYTES) if reading in ready else b""
        if report:
            text = " ".join(report.decode(errors="replace").split())
            if text != rundir.SERVES:
                return text
            serves = True
            poll.unregister(reading)
        if serves and pidfd not in ready and not stopped:
            return rundir.SERVES
        if pidfd in ready or (reading in ready and not serves):
            return "its master ended before it served; the log says more"
    return f"it did not serve within {limit_s:g} s (load_timeout_s)"


def _end_old(old: Old, base: str) -> None:
    """End the old generation. This process's lock keeps another reload waiting meanwhile."""
    run_dir = config.run_dir(old.settings)
    processes = GenerationProcesses(run_dir, rundir.lock(run_dir, "master").holder())
    processes.look()
    send_signal(old.master_fd, signal.SIGTERM)
    if not processes.await_end(3 * old.settings.drain_timeout_s + _END_S):
        _log.error("the generation before does not end, killing it")
        processes.kill()
        processes.await_end(_END_S)
    if run_dir != base:
        rundir.drop_generation(base, os.path.basename(run_dir))


def _end(base: str, generation: str, pid: int, pidfd: int, processes: GenerationProcesses) -> None:
    """End a generation that did not come to serve, and remove all its files."""
    processes.look()
    send_signal(pidfd, signal.SIGTERM)
    if not processes.await_end(_END_S):
        processes.kill()
        processes.await_end(_END_S)
    # Not reaped here: the keeper, which may know the pid, reaps it once this process has ended
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    status = ended and (ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
    how = describe_status(status)
    _log.info("the new generation's master has ended: %s", how)
    rundir.drop_generation(base, generation)
