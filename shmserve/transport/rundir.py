"""The run directory: names of the files, and their life with the service.

    master.lock       held by the gunicorn master for the life of the service; in state_dir, too
    supervisor.lock   held by the supervisor
    coordinator.lock  held by the coordinator
    grpc-<number>.lock, grpc-bind.lock   held by a gRPC process while it listens; while it binds
    exporter-0.lock, fetcher-0.lock   held by exporter and fetcher, where they run
    epoch             8 hexadecimal digits, written at service start
    reload            settings of the master for `shmserve reload`
    coordinator.sock  listening socket for the links of all processes
    exporter.sock     processes send spans here
    <process>.sock    an executor's endpoint
    registry.page, registry.msgpack   see shmserve.shm.registry_page
    history           of the metrics page, without another state_dir
    totals.msgpack    counts of ended processes: shmserve.coordinator.stats.counter_totals
    registry.models   see shmserve.coordinator.state.checkpoint
    <file>.new        room for the next content of a file above: shmserve.shm.replaced_file
    single/           models of `NAME=PATH` entries, laid out: shmserve.single_models
    overrides/        a folder for each load request with a configuration or files
    g<number>/        run directory of a generation that a reload has started
    serving           link to the serving generation; absent: the first, in this directory
    handover.lock     held by the process of a handover
    handover          result of the last handover, in a line

Lock files stay for good (removing one would let two processes hold it). The history and the result
of a handover stay, too. All other files are removed when the service starts and when it stops.

Cleaners of /tmp may empty the directory. A lock of the directory and young files keep cleaners
away. With each sign of life, a process also checks that its lock file still has its name. If the
name is gone, coordinator and gRPC processes end, and their successors make new files; the master
ends the service. The supervisor's lock is one file for the life of the service. The master and its
forks keep the file open, and each supervisor inherits the descriptor. So two supervisors never run
at once.
"""

import contextlib
import fcntl
import os
import re
import shutil
import stat

import msgspec
from msgspec import Struct

from shmserve.config import GENERATION, Settings, base_dir
from shmserve.errors import ConfigError, UnreadableMessage
from shmserve.protocol.control.client_messages import SOCKET_NAME
from shmserve.protocol.decoding import json_decoder
from shmserve.transport.processes import FileLock

COORDINATOR_SOCKET = "coordinator.sock"
EXPORTER_SOCKET = "exporter.sock"
EPOCH_FILE = "epoch"
_RELOAD_FILE = "reload"
TOTALS_FILE = "totals.msgpack"
_HANDOVER = "handover"
SERVES = "serves"  # report of a generation after it has taken over
_SERVING = "serving"
OVERRIDE_CONFIG = "config.json"  # in a folder of `overrides`, beside the model's own folder
_ENDPOINT = re.compile(r"executor-[0-9]+-[0-9a-f]+\.sock")
_OVERRIDES = re.compile(r"[a-z]+-[0-9]+-[0-9a-f]+-[0-9]+")
_LONGEST_NAME = len("/executor-00000-0000.sock")
_SOCKET_PATH_LIMIT = 107  # sun_path of a Unix-domain socket, without its NUL


class ReloadTerms(Struct, frozen=True):
    """Settings of a running master for `shmserve reload`."""

    reload: str
    load_timeout_s: float
    drain_timeout_s: float


_decode_terms = json_decoder(ReloadTerms)


def lock(run_dir: str, role: str, fd: int = -1) -> FileLock:
    """Return the lock of a process or role, such as `master` or `grpc-0`. `fd`: an inherited
    descriptor of the file."""
    return FileLock(os.path.join(run_dir, f"{role}.lock"), fd)


def client_socket(settings: Settings) -> str:
    """Return the path of the socket through which local programs pass memory."""
    return os.path.abspath(settings.client_socket or os.path.join(base_dir(settings), SOCKET_NAME))


def prepare(run_dir: str) -> None:
    """Make the run directory, or check that only this user can enter the existing one. Raise
    ConfigError if the directory belongs to another user, is open to others, or has too long a
    path."""
    if len(os.fsencode(run_dir)) + _LONGEST_NAME > _SOCKET_PATH_LIMIT:
        limit = _SOCKET_PATH_LIMIT - _LONGEST_NAME
        raise ConfigError(
            f"run_dir: {run_dir} is too long for sockets in it: {limit} bytes at most"
        )
    try:
        os.makedirs(os.path.dirname(run_dir) or "/", exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(run_dir, 0o700)
        info = os.lstat(run_dir)
    except OSError as ex:
        reason = f"cannot be made: {ex.strerror}; set another (SHMSERVE_RUN_DIR)"
        raise ConfigError(f"run_dir: {run_dir} {reason}") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        reason = (
            "is not a directory of the user that runs the server; set another (SHMSERVE_RUN_DIR)"
        )
        raise ConfigError(f"run_dir: {run_dir} {reason}")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise ConfigError(f"run_dir: {run_dir} is open to other users: its mode must be 0700")


def prepare_state(state_dir: str) -> None:
    """Make the state directory, or check that files can be made in the existing one. Raise
    ConfigError if the directory cannot be made or written."""
    try:
        os.makedirs(state_dir, 0o700, exist_ok=True)
    except OSError as ex:
        raise ConfigError(f"state_dir: {state_dir} cannot be made: {ex.strerror}") from None
    if not os.access(state_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"state_dir: {state_dir} cannot be written by the server's user")


def lock_state(state_dir: str, run_dir: str) -> FileLock | None:
    """Lock the state directory for this service, like the run directory. Return None if both are
    one directory, or if files cannot be made or locked in the state directory. Raise ConfigError if
    another service uses the directory, as state directory or run directory."""
    try:
        if os.path.samefile(state_dir, run_dir):
            return None
        state_lock = lock(state_dir, "master")
        acquired = state_lock.acquire()
    except OSError:  # the history's writer reports the error, which is no reason to end a service
        return None
    if not acquired:
        pid = state_lock.holder()
        raise ConfigError(f"state_dir: {state_dir} is in use by another server (pid {pid})")
    return state_lock


def serving(base: str) -> str:
    """Return the run directory of the serving generation."""
    try:
        return os.path.join(base, os.readlink(os.path.join(base, _SERVING)))
    except OSError:
        return base


def serve(base: str, generation: str) -> None:
    """Let a generation serve from now on. Empty: the first generation, in `base` itself."""
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
    """Write down the result of a handover."""
    _replace(os.path.join(base, _HANDOVER), line)


def handed_over(base: str) -> str:
    """Return the result of the last handover: the generation, and `SERVES` or the reason of a
    failure. Empty without a handover."""
    try:
        with open(os.path.join(base, _HANDOVER), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def generations(base: str) -> list[str]:
    """Return names of all generations of reloads with a folder in `base`."""
    return list(filter(GENERATION.fullmatch, os.listdir(base)))


def drop_generation(base: str, generation: str) -> None:
    """Remove the folder of an ended generation."""
    shutil.rmtree(os.path.join(base, generation), ignore_errors=True)


def clean(run_dir: str) -> None:
    """Remove the files of an ended service, except lock files, the history and a handover's
    result."""
    clean_sockets(run_dir)
    for name in os.listdir(run_dir):
        temporary = name.endswith(".new") or name.startswith("registry.")
        if temporary or name in (EPOCH_FILE, _RELOAD_FILE, TOTALS_FILE):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(run_dir, name))
    shutil.rmtree(overrides(run_dir), ignore_errors=True)
    shutil.rmtree(os.path.join(run_dir, "single"), ignore_errors=True)


def keep_from_cleaners(run_dir: str) -> int:
    """Lock the directory against cleaners of /tmp: systemd-tmpfiles heeds such a lock. Return the
    descriptor with the lock."""
    fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without such locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


def touch(run_dir: str) -> None:
    """Make all files of the directory young, for cleaners that heed no lock."""
    for folder, folders, files in os.walk(run_dir):  # links to folders are in `folders`
        for path in (folder, *(os.path.join(folder, name) for name in (*folders, *files))):
            with contextlib.suppress(OSError):  # removed meanwhile
                os.utime(path, follow_symlinks=False)


def overrides(run_dir: str, name: str = "") -> str:
    """Return the folder of a load request's files, or the parent of all such folders."""
    return os.path.join(run_dir, "overrides", name) if name else os.path.join(run_dir, "overrides")


def is_overrides(name: str) -> bool:
    """Return whether a folder of `overrides` can have this name."""
    return _OVERRIDES.fullmatch(name) is not None


def clean_sockets(run_dir: str) -> None:
    """Remove the sockets of ended processes."""
    for name in os.listdir(run_dir):
        # Known names only: gunicorn may have its HTTP socket in this directory, too.
        if name in (COORDINATOR_SOCKET, EXPORTER_SOCKET) or _ENDPOINT.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(run_dir, name))


def endpoint(run_dir: str, process: str) -> str:
    return os.path.join(run_dir, f"{process}.sock")


def clean_endpoint(run_dir: str, process: str) -> None:
    """Remove the socket of an ended executor."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(endpoint(run_dir, process))


def write_epoch(run_dir: str, epoch: str) -> None:
    _replace(os.path.join(run_dir, EPOCH_FILE), epoch)


def _replace(path: str, text: str) -> None:
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(path + ".new", path)


def read_epoch(run_dir: str) -> str:
    """Return the service's epoch; empty if no service has been started here."""
    try:
        with open(os.path.join(run_dir, EPOCH_FILE), encoding="ascii") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def write_reload(run_dir: str, terms: ReloadTerms) -> None:
    """Record how the master of this generation reloads."""
    with open(os.path.join(run_dir, _RELOAD_FILE), "wb") as file:
        file.write(msgspec.json.encode(terms))


def read_reload(run_dir: str) -> ReloadTerms | None:
    """Return the record of `write_reload`, or None without a record."""
    try:
        with open(os.path.join(run_dir, _RELOAD_FILE), "rb") as file:
            terms: ReloadTerms = _decode_terms(file.read())
            return terms
    except (FileNotFoundError, UnreadableMessage):
        return None
