"""The run directory: what the files in it are called, and its life with the service.

    master.lock       held by the gunicorn master for the life of the service; in state_dir, too
    supervisor.lock   held by the supervisor
    coordinator.lock  held by the coordinator
    grpc-<number>.lock, grpc-bind.lock   held by a gRPC process that listens; while one binds
    exporter-0.lock   held by the process that exports, if there is one
    epoch             8 hexadecimal digits, written at service start
    coordinator.sock  where every process has its link
    exporter.sock     where processes send spans
    <process>.sock    an executor's endpoint
    registry.page, registry.msgpack   see shmserve.shm.registry_page
    history           the metrics page's, where there is no other state_dir
    totals.msgpack    what ended processes counted: shmserve.coordinator.stats.counter_totals
    registry.models   see shmserve.coordinator.state.checkpoint
    <file>.new        room for the next content of these, too: shmserve.shm.replaced_file
    single/           models that are no repository's, laid out: shmserve.supervisor.single_models
    overrides/        a folder for each load request that brings a configuration or files
    g<number>/        the same of a generation that a reload has started
    serving           link to the one that serves; absent: the first does, which is this directory
    handover.lock, handover   held by the process that hands over; what came of it, in a line

Lock files stay for good (removing one would let two processes hold it), and so does the history;
everything else is removed when the service starts and when it stops.

Cleaners of /tmp may empty the directory. A lock of the directory and young files keep cleaners
away. A process that gives signs of life also looks whether its lock file still has its name. If the
name is gone, coordinator and gRPC processes end, and their successors make new files; the master
ends the service. The supervisor's lock is one file for the life of the service. The master and its
forks keep that file open, and each supervisor inherits it, so there are never two supervisors.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat

from shmserve.config import GENERATION
from shmserve.errors import ConfigError
from shmserve.transport.processes import FileLock

COORDINATOR_SOCKET = "coordinator.sock"
EXPORTER_SOCKET = "exporter.sock"
EPOCH_FILE = "epoch"
TOTALS_FILE = "totals.msgpack"
_HANDOVER = "handover"
SERVES = "serves"  # what a generation says that has taken over
_SERVING = "serving"
OVERRIDE_CONFIG = "config.json"  # in a folder of `overrides`, beside the model's own folder
_ENDPOINT = re.compile(r"executor-[0-9]+-[0-9a-f]+\.sock")
_OVERRIDES = re.compile(r"[a-z]+-[0-9]+-[0-9a-f]+-[0-9]+")
_LONGEST_NAME = len("/executor-00000-0000.sock")
_SOCKET_PATH_LIMIT = 107  # sun_path of a Unix-domain socket, without its NUL


def lock(run_dir: str, role: str, fd: int = -1) -> FileLock:
    """The lock of a role that exists once: master, supervisor, coordinator. `fd`: inherited."""
    return FileLock(os.path.join(run_dir, f"{role}.lock"), fd)


def prepare(run_dir: str) -> None:
    """Make the run directory, or check that the one there is ours alone.

    Raises:
        ConfigError: it belongs to somebody else, is open to others, or its path is too long.
    """
    if len(os.fsencode(run_dir)) + _LONGEST_NAME > _SOCKET_PATH_LIMIT:
        most = _SOCKET_PATH_LIMIT - _LONGEST_NAME
        raise ConfigError(f"run_dir: {run_dir} is too long for sockets in it: {most} bytes at most")
    try:
        os.makedirs(os.path.dirname(run_dir) or "/", exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(run_dir, 0o700)
        info = os.lstat(run_dir)
    except OSError as ex:
        why = f"cannot be made: {ex.strerror}; set another (SHMSERVE_RUN_DIR)"
        raise ConfigError(f"run_dir: {run_dir} {why}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        why = "is not a directory of the user that runs the server; set another (SHMSERVE_RUN_DIR)"
        raise ConfigError(f"run_dir: {run_dir} {why}")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"run_dir: {run_dir} is open to other users: its mode must be 0700")


def prepare_state(state_dir: str) -> None:
    """Make the state directory, or check that files can be made in the one there.

    Raises:
        ConfigError: they cannot.
    """
    try:
        os.makedirs(state_dir, 0o700, exist_ok=True)
    except OSError as ex:
        raise ConfigError(f"state_dir: {state_dir} cannot be made: {ex.strerror}") from None
    if not os.access(state_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"state_dir: {state_dir} cannot be written by the server's user")


def lock_state(state_dir: str, run_dir: str) -> FileLock | None:
    """Have the state directory alone, as the run directory is had; None: there is no need, because
    it is that one, or files cannot be made or locked there.

    Raises:
        ConfigError: another service has it, as its state directory or its run directory.
    """
    try:
        if os.path.samefile(state_dir, run_dir):
            return None
        held = lock(state_dir, "master")
        taken = held.acquire()
    except OSError:  # the history's file says what is wrong, and a service is worth more than that
        return None
    if not taken:
        pid = held.holder()
        raise ConfigError(f"state_dir: {state_dir} is in use by another server (pid {pid})")
    return held


def serving(base: str) -> str:
    """The run directory of the generation that serves."""
    try:
        return os.path.join(base, os.readlink(os.path.join(base, _SERVING)))
    except OSError:
        return base


def serve(base: str, generation: str) -> None:
    """From now on this generation serves; empty: the one of `base` itself."""
    link = os.path.join(base, _SERVING)
    if not generation:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(link)
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(link + ".new")
    os.symlink(generation, link + ".new")
    os.replace(link + ".new", link)


def hand_over(base: str, line: str) -> None:
    """Write down what has come of a handover."""
    path = os.path.join(base, _HANDOVER)
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(line)
    os.replace(path + ".new", path)


def handed_over(base: str) -> str:
    """What came of the last one: its generation, and `SERVES` or why not; empty: there was none."""
    try:
        with open(os.path.join(base, _HANDOVER), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def generations(base: str) -> list[str]:
    """Names of the generations that reloads have started and that have left something."""
    return list(filter(GENERATION.fullmatch, os.listdir(base)))


def drop_generation(base: str, generation: str) -> None:
    """Remove all that one that has ended has left."""
    shutil.rmtree(os.path.join(base, generation), ignore_errors=True)


def clean(run_dir: str) -> None:
    """Remove everything of a service that has ended, except lock files."""
    clean_sockets(run_dir)
    for name in os.listdir(run_dir):
        temporary = name.endswith(".new") or name.startswith("registry.")
        if temporary or name in (EPOCH_FILE, TOTALS_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(run_dir, name))
    shutil.rmtree(overrides(run_dir), ignore_errors=True)
    shutil.rmtree(os.path.join(run_dir, "single"), ignore_errors=True)


def keep_from_cleaners(run_dir: str) -> int:
    """Have what removes old files of /tmp leave this directory alone: systemd-tmpfiles heeds a
    lock of it. Returns the descriptor that has the lock."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without such locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def touch(run_dir: str) -> None:
    """Make all that is there young, for cleaners that heed no lock."""
    for folder, folders, files in os.walk(run_dir):  # a link to a folder is one of those
        for path in (folder, *(os.path.join(folder, name) for name in (*folders, *files))):
            with contextlib.suppress(OSError):  # it has just gone
                os.utime(path, follow_symlinks=False)


def overrides(run_dir: str, name: str = "") -> str:
    """Where what came with a load request lies, or the folder of all of them."""
    return os.path.join(run_dir, "overrides", name) if name else os.path.join(run_dir, "overrides")


def is_overrides(name: str) -> bool:
    """Whether a name can be that of such a folder."""
    return _OVERRIDES.fullmatch(name) is not None


def clean_sockets(run_dir: str) -> None:
    """Remove the sockets of processes that have ended."""
    for name in os.listdir(run_dir):
        # Only ours: gunicorn may have its HTTP socket in this directory, too.
        if name in (COORDINATOR_SOCKET, EXPORTER_SOCKET) or _ENDPOINT.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(run_dir, name))


def endpoint(run_dir: str, process: str) -> str:
    return os.path.join(run_dir, f"{process}.sock")


def clean_endpoint(run_dir: str, process: str) -> None:
    """Remove the socket of an executor that ended without doing so."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(endpoint(run_dir, process))


def write_epoch(run_dir: str, epoch: str) -> None:
    path = os.path.join(run_dir, EPOCH_FILE)
    with open(path + ".new", "w", encoding="ascii") as file:
        file.write(epoch)
    os.replace(path + ".new", path)


def read_epoch(run_dir: str) -> str:
    """The service's epoch; empty: no service has been started here."""
    try:
        with open(os.path.join(run_dir, EPOCH_FILE), encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""
