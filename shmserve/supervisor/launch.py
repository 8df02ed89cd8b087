"""Start and stop of the service in the gunicorn master, and the start of a supervisor.

The module is light on purpose: the master imports nothing else of the server, and holds no thread
(the supervisor writes its log) and no mapping. The master holds:

- a lock, so that one service owns the run directory
- a pidfd of itself, by which all processes notice its end
- the keeper's pipe
- the addresses of gRPC and of the agent, bound but not listened on, to keep other services away
- the socket of its log
- the state in `master_state`

The order of a start: `prepare`, `claim`, gunicorn listens, `begin`. Errors in settings and
addresses are found before anything is launched.

The supervisor is no child of gunicorn: gunicorn reaps all its children, and takes exit codes 3 and
4 of any child for its own failure. So the supervisor is forked twice.

A start in full:

- `on_starting` makes the run directory, takes `master.lock`, and checks that every address is
  free. The addresses of gRPC and of the agent are bound and never listened on: only processes that
  share them (SO_REUSEPORT) can have them. A start that fails here has launched nothing.
- gunicorn listens, and `when_ready` launches the supervisor, with the sockets that systemd has
  passed for gRPC. The supervisor starts the coordinator.
- The coordinator reads the model repository and tells the supervisor which executors should run.
  Each executor loads its model and reports.
- When every required model (`ready_requires`) is loaded and a gRPC process listens, the snapshot
  says `ready`, /v2/health/ready turns 200, systemd gets READY=1, and the log says what runs where.

A stop: SIGTERM to the master. HTTP workers finish their requests (`drain_timeout_s`). The hook
`on_exit` then stops the supervisor (`supervisor.service`). SIGHUP replaces HTTP workers only.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from shmserve import config, ids, model_places, single_models
from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.log_fields import log_fields
from shmserve.observe import last_words, log_output
from shmserve.supervisor.generations import activation, handover
from shmserve.supervisor.master_state import MasterState
from shmserve.transport import cgroups, listen_addresses, rundir
from shmserve.transport.listen_addresses import ListenAddress
from shmserve.transport.processes import (
    FileLock,
    has_ended,
    missing_memory,
    raise_fd_limit,
    raise_file_limit,
    send_signal,
    spawn,
)
from shmserve.transport.trust import tls

_log = logging.getLogger(__name__)

_PREDECESSOR_S = 10.0  # time after the drain for processes of an earlier service to end
_LAUNCH_S = 15.0
_TURN_S = 0.02
_BEAT_S = 1.0
SUPERVISOR = [sys.executable, "-P", "-m", "shmserve.supervisor"]  # command
# Variables for the master only: by these, another process would take the master's sockets or
# report in the master's name.
_MASTER_ONLY = (
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)


_state = MasterState()


def settings() -> Settings:
    """Return the service's settings, read once: SIGHUP replaces HTTP workers, nothing else."""
    return _state.settings or _state.read_settings()


def changed_on_disk() -> bool:
    """Return whether the settings would read differently now, or could not be read."""
    try:
        return config.load() != _state.settings
    except ConfigError:
        return True


def supervisor_lock(settings: Settings) -> FileLock:
    """Return the supervisor's lock, on the file of the service's start. Two supervisors never run
    at once, even if the file is removed."""
    return _state.supervisor or rundir.lock(config.run_dir(settings), "supervisor")


def beat() -> None:
    """Give the master's sign of life, and end the master if its generation must end.

    A generation ends if its run directory has been removed, if another generation serves in its
    place, or if the reload that started it was given up. If the keeper is gone, the master exits
    at once: the keeper's parent takes the service for ended.
    """
    if _state.keeper_fd >= 0 and not _state.tied:
        _tie_to_keeper()
    lock = _state.lock
    if lock is None or not lock.held or _state.ending or _state.settings is None:
        return
    for awaited in _state.also:
        if not awaited.held:
            with contextlib.suppress(OSError):  # tolerated, as in `rundir.lock_state`
                awaited.acquire()
    handover.watch(config.base_dir(_state.settings), _state.handover_watch)
    # read before `serves`, which a handover grants before it ends
    given_up = any(map(handover.given_up, _state.report))
    if serves(_state.settings):
        _state.let_go_of_report()
    elif not _state.report:
        _state.end(logging.INFO, "another generation serves")
    elif given_up:
        _state.end(logging.ERROR, "the reload has been given up")
    if not lock.beat():
        reason = "run_dir: its files have been removed, so another server could use it"
        _state.end(logging.CRITICAL, reason)


def _tie_to_keeper() -> None:
    """Have the kernel end the master with its keeper, as soon as the keeper is its parent. So even
    a master that hangs ends. Other processes see the master's end, and end within 5 s."""
    if os.getppid() == _state.keeper_pid:
        _state.tie()
    # the keeper ended before `tie`, or is not the parent yet
    if handover.given_up(_state.keeper_fd):
        _log.critical("the keeper was killed: ending")
        log_output.end()
        os._exit(1)


def master_fd() -> int:
    """Return the master's pidfd, which forks inherit; -1 if no service has been begun."""
    return _state.master_fd


def prepare(settings: Settings) -> None:
    """Take the run directory for the service of this gunicorn master. Raise ConfigError if a
    setting cannot work, or another service has a directory of this service."""
    for warning in _state.warnings:
        _log.warning("%s", warning)
    little = cgroups.too_little_memory(cgroups.memory_limit())
    for problem in filter(None, (raise_file_limit(), raise_fd_limit(), missing_memory(), little)):
        raise ConfigError(problem)
    for problem in model_places.missing_folders(settings):
        raise ConfigError(problem)
    run_dir = config.run_dir(settings)
    _state.take_passed()
    if _state.grpc_fds and not settings.grpc_processes:
        raise ConfigError("grpc_processes: 0, but systemd passes a socket for gRPC")
    rundir.prepare(run_dir)
    if settings.dashboard and settings.state_dir:
        rundir.prepare_state(config.state_dir(settings))
    lock = rundir.lock(run_dir, "master")
    if not lock.acquire():
        raise ConfigError(
            f"run_dir: {run_dir} is in use by another server (pid {lock.holder()});"
            " set another (SHMSERVE_RUN_DIR)"
        )
    _state.own_folders(settings, lock, _folder_locks(settings, run_dir))
    limit_s = settings.drain_timeout_s + _PREDECESSOR_S
    for name in rundir.generations(run_dir):
        _await_predecessors(os.path.join(run_dir, name), limit_s)
        rundir.drop_generation(run_dir, name)
    _await_predecessors(run_dir, limit_s)
    rundir.clean(run_dir)
    if run_dir == config.base_dir(settings):
        rundir.serve(run_dir, "")
    single_models.lay_out(settings)
    _state.be_master(run_dir)
    rundir.write_epoch(run_dir, ids.new_epoch())
    limits_s = settings.load_timeout_s, settings.drain_timeout_s
    rundir.write_reload(run_dir, rundir.ReloadTerms(settings.reload, *limits_s))


def _folder_locks(settings: Settings, run_dir: str) -> tuple[FileLock, ...]:
    """Lock further directories of the service, beside the run directory; raises as `prepare`."""
    base, state_dir = config.base_dir(settings), config.state_dir(settings)
    if run_dir == base:
        for name in rundir.generations(base):
            if (pid := rundir.lock(os.path.join(base, name), "master").holder()) is not None:
                raise ConfigError(f"run_dir: {base} is in use by another server (pid {pid})")
        lock = rundir.lock_state(state_dir, run_dir) if settings.dashboard else None
        return () if lock is None else (lock,)
    # The predecessor holds these locks until it ends: `beat` takes them then.
    folders = {os.path.realpath(folder) for folder in (base, state_dir) if os.path.isdir(folder)}
    return tuple(rundir.lock(folder, "master") for folder in folders)


def serves(settings: Settings) -> bool:
    """Return whether the generation of this process serves."""
    return rundir.serving(config.base_dir(settings)) == config.run_dir(settings)


def follows() -> bool:
    """Return whether a predecessor waits for this generation to serve."""
    return bool(_state.report)


def await_turn(settings: Settings, waits: Callable[[], bool]) -> None:
    """Block an HTTP worker until its generation serves, or until `waits` returns False. On sockets
    passed to the master, also wait until models are loaded or cannot be: clients wait meanwhile
    instead of being refused."""
    from shmserve.supervisor.generations.takeover import LoadingWatch

    models = LoadingWatch(config.run_dir(settings), _state.begun + settings.load_timeout_s)
    while waits() and not (serves(settings) and (models.settled() or not _state.passed)):
        time.sleep(_TURN_S)


def failed(message: str) -> NoReturn:
    """End a start after an error: tell the operator, and the predecessor, which serves on."""
    for fd in _state.report:
        os.write(fd, message.encode()[: activation.REPORT_BYTES])
    sys.exit("\n".join(f"shmserve: {line}" for line in message.splitlines()))


def hand_over(http: Sequence[int], environ: dict[str, str]) -> NoReturn:
    """Start a new generation in place of the present one. Called in a fork of the master. `http`:
    descriptors of gunicorn's sockets. `environ`: environment of the master's start."""
    assert _state.settings is not None
    name = activation.BOUND if _has_bound() else "http"
    named = [(name, fd) for fd in http]
    fds = (_state.master_fd, _state.stopping_fd)
    kept = (_state.keeper_fd, _state.keeper_pid)
    handover.run(handover.Old(_state.settings, *fds, named, _state.grpc_fds, environ, *kept))


def _has_bound() -> bool:
    """Return whether gunicorn's sockets were bound by this service, now or before a reload."""
    return _state.bound or not _state.passed


def claim(settings: Settings, http: Iterable[tuple[str, int] | str | int]) -> None:
    """Check that the addresses of gunicorn, gRPC, the agent and `client_socket` are free. Reserve
    the addresses of gRPC and of the agent. Sockets passed to the master are not checked.

    Args:
        http: addresses on which gunicorn listens next, in gunicorn's form.

    Raises:
        ConfigError: addresses that are taken, or that this host does not have. A line for each
            names the address and its holder.
    """
    if _state.bound and not activation.has_all(os.environ, http):
        text = "a reload keeps the addresses of the start; restart the service to change them"
        raise ConfigError(f"http_bind, metrics_bind: {text}")
    problems: list[str] = []
    for setting, place in _wanted(settings, http):
        try:
            if _state.report and setting == "grpc_bind" and place.path:
                reason = "in a reload it has to be a socket that systemd passes"
                raise ConfigError(f"grpc_bind: {place.text} cannot change hands: {reason}")
            if not _state.report:  # in a reload the predecessor listens there
                listen_addresses.require_free(setting, place)
            if setting in ("grpc_bind", "agent_bind"):
                _state.keep_places(listen_addresses.reserve(setting, place))
        except ConfigError as ex:
            problems.append(ex.message)
    if problems:
        raise ConfigError("\n".join(problems))


def _wanted(
    settings: Settings, http: Iterable[tuple[str, int] | str | int]
) -> Iterator[tuple[str, ListenAddress]]:
    """Yield addresses without a passed socket, each behind the name of its setting."""
    if not activation.has_http(os.environ):
        for place in filter(None, map(listen_addresses.of_gunicorn, http)):
            is_metrics = place.text in settings.metrics_bind
            yield "metrics_bind" if is_metrics else "http_bind", place
    elif settings.metrics_bind and not _state.bound:
        raise ConfigError("metrics_bind: cannot be together with HTTP sockets of systemd's")
    if settings.grpc_processes and not _state.grpc_fds:
        for text in settings.grpc_bind:
            yield "grpc_bind", listen_addresses.parse("grpc_bind", text)
    for text in settings.agent_bind:
        yield "agent_bind", listen_addresses.parse("agent_bind", text)
    if settings.client_socket and settings.client_shm_mode != "off":
        socket = f"unix:{settings.client_socket}"
        yield "client_socket", listen_addresses.parse("client_socket", socket)


def forked() -> None:
    """Close the reserved addresses and the keeper's pipe, which only the master needs."""
    _state.let_go_of_places()
    _state.let_go_of_keeper()


def begin(settings: Settings, http: Iterable[str] = ()) -> None:
    """Start the service around this gunicorn master, which is prepared and listens at `http`."""
    arguments = ["--begun", str(_state.begun), "--http"]
    arguments += [tls.with_scheme(settings, listener) for listener in http]
    arguments += ["--grpc", *_grpc_addresses(settings)]
    arguments += ["--stored", *(f"{name}={fd}" for name, fd in _state.stored)]
    ensure(settings, _state.master_fd, arguments)
    _state.let_go_of_stored()


def _grpc_addresses(settings: Settings) -> list[str]:
    """Return the addresses at which clients reach gRPC, and a remark if they speak TLS."""
    addresses = _plain_grpc_addresses(settings)
    return [*addresses, "(TLS)"] if addresses and settings.grpc_tls_cert else addresses


def _plain_grpc_addresses(settings: Settings) -> list[str]:
    if not _state.grpc_fds:
        return list(settings.grpc_bind) if settings.grpc_processes else []
    addresses = []
    for fd in _state.grpc_fds:
        with socket.socket(fileno=os.dup(fd)) as sock:
            name = sock.getsockname()
        shown = f"unix:{name}" if isinstance(name, str) else "{}:{}".format(*name[:2])
        addresses.append(shown)
    return addresses


def ensure(settings: Settings, master_pidfd: int, more: Sequence[str] = ()) -> bool:
    """Start a supervisor (with `more` arguments) if none runs. Return whether a supervisor was
    started.

    Two callers at once are harmless: the second supervisor finds the lock taken and exits.
    """
    lock = supervisor_lock(settings)
    if lock.holder() is not None or has_ended(master_pidfd):
        return False
    arguments = ["--detach", "--process-id", ids.new_process_id("supervisor", os.getpid())]
    arguments += ["--master-fd", str(master_pidfd), "--lock-fd", str(lock.pin())]
    log_fds = () if (fd := log_output.relayed_to()) < 0 else (fd,)
    if log_fds:
        arguments += ["--log-fd", str(fd)]
    arguments += _state.supervisor_arguments(settings.load_timeout_s, serves(settings))
    arguments += more
    environ = {k: v for k, v in os.environ.items() if k not in _MASTER_ONLY}
    process = spawn(
        [*SUPERVISOR, *arguments],
        keep=(master_pidfd, lock.pin(), *log_fds, *_state.supervisor_fds),
        stdin=_state.failure,
        environ=environ,
        new_session=True,
    )
    try:
        status = process.wait(_LAUNCH_S)  # first fork, which exits once the second is detached
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    if status != 0:
        _log.error("the supervisor could not be started", extra=log_fields(status=status))
    return status == 0


def stopping(settings: Settings, http: Iterable[object]) -> None:
    """Note that the master stops: from now on a handover lets no other generation serve. Remove the
    service's own files of Unix sockets, unless another generation serves on them. `http`: addresses
    of the master's sockets."""
    os.eventfd_write(_state.stopping_fd, 1)
    if not _has_bound() or not serves(settings):
        return
    for path in http:
        if isinstance(path, str):
            with contextlib.suppress(OSError):
                os.unlink(path)


def end(settings: Settings) -> None:
    """Stop the service: drain, then remove the files of the run directory. Called at the master's
    exit. Exit with status 1 if the service's start has failed."""
    if _state.lock is None or not _state.lock.held:
        return  # no service was begun, or another process began it
    run_dir = config.run_dir(settings)
    limit = settings.drain_timeout_s + _PREDECESSOR_S
    coordinator = rundir.lock(run_dir, "coordinator")  # in case its supervisor has just died
    for role, lock in (("supervisor", supervisor_lock(settings)), ("coordinator", coordinator)):
        holder = lock.holder_pidfd()
        if holder is None:
            continue
        pid, pidfd = holder
        send_signal(pidfd, signal.SIGTERM)
        if not _await_end(_state.lock, pidfd, limit):
            about = log_fields(pid=pid)
            _log.error("the %s did not end within %g s, killing it", role, limit, extra=about)
            send_signal(pidfd, signal.SIGKILL)
            has_ended(pidfd, 5.0)
        os.close(pidfd)
    failure = _state.failure and last_words.read(_state.failure)
    if _state.lock.intact():
        rundir.clean(run_dir)
        base = config.base_dir(settings)
        if serves(settings):
            rundir.serve(base, "")
        if run_dir != base:
            rundir.drop_generation(base, os.path.basename(run_dir))
    if failure:
        sys.exit(f"shmserve: {failure}")


def _await_end(lock: FileLock, pidfd: int, limit_s: float) -> bool:
    """Wait for the end of a process, and give the master's signs of life meanwhile. Return False
    if the process has not ended within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not has_ended(pidfd, min(_BEAT_S, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            return False
        lock.beat()
    return True


def _await_predecessors(run_dir: str, limit_s: float) -> None:
    """Wait for processes of a killed master's service, which end by themselves."""
    deadline = time.monotonic() + limit_s
    for role in ("supervisor", "coordinator"):
        while holder := rundir.lock(run_dir, role).holder_pidfd():
            pid, pidfd = holder
            sys.stderr.write(f"shmserve: waiting for an earlier {role} to end (pid {pid})\n")
            ended = has_ended(pidfd, deadline - time.monotonic())
            os.close(pidfd)
            if not ended:
                raise ConfigError(f"run_dir: an earlier {role} does not end (pid {pid})")
