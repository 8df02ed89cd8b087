"""The service's start and stop as the gunicorn master sees them, and starting a supervisor.

Light on purpose: the master imports this and nothing else of the server. It holds no
thread, no mapping; what it has is a lock (so that one service owns the run directory), a
pidfd of itself (so that everybody notices its end), gRPC's addresses (nobody listens on those
sockets: they keep others out) and this module's state, which a reload of gunicorn.conf.py does
not touch.

The order of a start: `prepare`, `claim`, gunicorn listens, `begin`. What cannot work is found
before anything is launched.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from shmserve import config, ids, model_places
from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.supervisor import activation, single_models
from shmserve.transport import listen_addresses, rundir
from shmserve.transport.processes import FileLock, has_ended, pidfd_open, send_signal, spawn_role

_log = logging.getLogger(__name__)

_PREDECESSOR_S = 10.0  # beyond the drain: for the processes of an earlier service to end
_LAUNCH_S = 15.0
# Meant for the master: whoever else has them would take its sockets or speak in its name.
_MASTER_ONLY = (
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
)


class _LaunchState:
    """What the master knows; its forks (HTTP workers) inherit it."""

    settings: Settings | None = None
    lock: FileLock | None = None
    state_lock: FileLock | None = None  # of the directory that the history is in
    supervisor: FileLock | None = None  # whose file stays the one of the service's start
    master_fd: int = -1
    notify_socket: str = ""
    ending: bool = False
    run_dir_fd: int = -1
    grpc_fds: tuple[int, ...] = ()  # listening sockets that systemd has passed
    grpc_places: tuple[socket.socket, ...] = ()  # addresses that are kept for gRPC processes
    watchdog_usec: int = 0
    begun: float = 0.0  # when `prepare` was called


_state = _LaunchState()


def settings() -> Settings:
    """The service's settings, read once: a reload replaces HTTP workers, nothing else.

    Raises:
        ConfigError: a setting that cannot work, or that gunicorn could not read.
    """
    if _state.settings is None:
        found = config.load()
        listen_addresses.check_http(found)
        _state.settings = found
    return _state.settings


def changed_on_disk() -> bool:
    """Whether the settings would read differently now."""
    try:
        return config.load() != _state.settings
    except ConfigError:
        return True


def supervisor_lock(settings: Settings) -> FileLock:
    """The supervisor's lock, by the file that it was when the service began: whatever becomes of
    its name, there are never two supervisors."""
    return _state.supervisor or rundir.lock(config.run_dir(settings), "supervisor")


def beat() -> None:
    """The master's sign of life. Ends the service if its run directory is not its own any more."""
    lock = _state.lock
    if lock is None or not lock.held or lock.beat() or _state.ending:
        return
    _state.ending = True
    _log.critical("run_dir: its files have been removed, so another server could use it: ending")
    os.kill(os.getpid(), signal.SIGTERM)


def master_fd() -> int:
    """The master's pidfd, as inherited by its forks; -1: no service has been begun."""
    return _state.master_fd


def prepare(settings: Settings) -> None:
    """Have the run directory for this gunicorn master's service.

    Raises:
        ConfigError: a setting that cannot work, or another service in one of its directories.
    """
    _state.begun = time.monotonic()
    for entry in settings.model_repository:
        _, path = model_places.single_of(entry) or ("", entry)
        if not model_places.is_remote(path) and not os.path.isdir(path):
            raise ConfigError(f"model_repository: {path!r} is not a directory")
    run_dir = config.run_dir(settings)
    _state.grpc_fds = activation.take_grpc(os.environ)
    if _state.grpc_fds and settings.grpc_server != "http2":
        raise ConfigError("grpc_server: only 'http2' can serve on a socket that systemd passes")
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
    if settings.dashboard:
        _state.state_lock = rundir.lock_state(config.state_dir(settings), run_dir)
    _state.settings, _state.lock = settings, lock
    _state.run_dir_fd = rundir.keep_from_cleaners(run_dir)
    _await_predecessors(run_dir, settings.drain_timeout_s + _PREDECESSOR_S)
    rundir.clean(run_dir)
    single_models.lay_out(settings)
    _state.supervisor = rundir.lock(run_dir, "supervisor")
    _state.supervisor.pin()
    rundir.write_epoch(run_dir, ids.new_epoch())
    # gunicorn would announce readiness before any model is loaded; the supervisor does it.
    _state.notify_socket = os.environ.pop("NOTIFY_SOCKET", "")
    _state.watchdog_usec = int(os.environ.pop("WATCHDOG_USEC", "") or 0)
    own = pidfd_open(os.getpid())
    assert own is not None
    _state.master_fd = own


def claim(settings: Settings, http: Iterable[tuple[str, int] | str | int]) -> None:
    """See that all addresses are free, `http` (as gunicorn has them) for gunicorn, which listens
    next, and `client_socket`; keep gRPC's. What was passed is there already.

    Raises:
        ConfigError: an address that is taken or none of this host's; says which, and by whom.
    """
    if settings.grpc_processes and not _state.grpc_fds:
        for text in settings.grpc_bind:
            address = listen_addresses.parse("grpc_bind", text)
            listen_addresses.require_free("grpc_bind", address)
            _state.grpc_places += tuple(listen_addresses.reserve("grpc_bind", address))
    if settings.client_socket and settings.client_shm_mode != "off":
        place = listen_addresses.parse("client_socket", f"unix:{settings.client_socket}")
        listen_addresses.require_free("client_socket", place)
    if activation.has_http(os.environ):
        if settings.metrics_bind:
            raise ConfigError("metrics_bind: cannot be together with HTTP sockets of systemd's")
        return
    for place in filter(None, map(listen_addresses.of_gunicorn, http)):
        is_metrics = place.text in settings.metrics_bind
        listen_addresses.require_free("metrics_bind" if is_metrics else "http_bind", place)


def forked() -> None:
    """In an HTTP worker: the addresses kept for gRPC are the master's."""
    for place in _state.grpc_places:
        place.close()
    _state.grpc_places = ()


def begin(settings: Settings, http: Iterable[str] = ()) -> None:
    """Start the service around this gunicorn master, which is prepared and listens at `http`."""
    told = ["--begun", str(_state.begun), "--http"]
    for address in http:
        encrypted = settings.http_tls_cert and address.startswith("http:")
        told.append(f"https:{address.removeprefix('http:')}" if encrypted else address)
    ensure(settings, _state.master_fd, [*told, "--grpc", *_grpc_addresses(settings)])


def _grpc_addresses(settings: Settings) -> list[str]:
    """Where gRPC is reached."""
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
    """Start a supervisor (with `more` arguments) if none runs; whether one was started.

    Two callers at once are harmless: the second supervisor finds the lock taken and exits.
    """
    lock = supervisor_lock(settings)
    if lock.holder() is not None or has_ended(master_pidfd):
        return False
    arguments = ["--detach", "--process-id", ids.new_process_id("supervisor", os.getpid())]
    arguments += ["--master-fd", str(master_pidfd), "--lock-fd", str(lock.pin())]
    arguments += ["--grpc-fds", *map(str, _state.grpc_fds)]
    if _state.notify_socket:
        arguments += ["--notify-socket", _state.notify_socket]
        arguments += ["--watchdog-usec", str(_state.watchdog_usec)]
    arguments += more
    environ = {k: v for k, v in os.environ.items() if k not in _MASTER_ONLY}
    process = spawn_role(
        "supervisor",
        arguments,
        keep=(master_pidfd, lock.pin(), *_state.grpc_fds),
        environ=environ,
        new_session=True,
    )
    try:
        status = process.wait(_LAUNCH_S)  # of the half that detaches and exits
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    if status != 0:
        _log.error("the supervisor could not be started status=%d", status)
    return status == 0


def end(settings: Settings) -> None:
    """Stop the service: drain, then nothing is left. For the master's exit."""
    if _state.lock is None or not _state.lock.held:
        return  # never begun, or not by this process
    run_dir = config.run_dir(settings)
    limit = settings.drain_timeout_s + _PREDECESSOR_S
    coordinator = rundir.lock(run_dir, "coordinator")  # for when its supervisor died just now
    for role, lock in (("supervisor", supervisor_lock(settings)), ("coordinator", coordinator)):
        holder = lock.holder_pidfd()
        if holder is None:
            continue
        pid, pidfd = holder
        send_signal(pidfd, signal.SIGTERM)
        if not has_ended(pidfd, limit):
            _log.error("the %s did not end within %g s, killing it pid=%d", role, limit, pid)
            send_signal(pidfd, signal.SIGKILL)
            has_ended(pidfd, 5.0)
        os.close(pidfd)
    if _state.lock.intact():
        rundir.clean(run_dir)


def _await_predecessors(run_dir: str, limit_s: float) -> None:
    """The processes of a service whose master was killed end by themselves: wait for them."""
    deadline = time.monotonic() + limit_s
    for role in ("supervisor", "coordinator"):
        while holder := rundir.lock(run_dir, role).holder_pidfd():
            pid, pidfd = holder
            sys.stderr.write(f"shmserve: waiting for an earlier {role} to end (pid {pid})\n")
            ended = has_ended(pidfd, deadline - time.monotonic())
            os.close(pidfd)
            if not ended:
                raise ConfigError(f"run_dir: an earlier {role} does not end (pid {pid})")
