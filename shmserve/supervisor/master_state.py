"""State of the gunicorn master: settings, passed sockets, and everything that stays open.

A reload of gunicorn.conf.py leaves the state alone, and the master's forks (HTTP workers) inherit
the state.
"""

import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from typing import BinaryIO

from shmserve import config
from shmserve.config import Settings
from shmserve.observe import last_words
from shmserve.supervisor.generations import activation, keeper
from shmserve.supervisor.generations.generation_processes import StoppedWatch
from shmserve.transport import listen_addresses, rundir
from shmserve.transport.processes import FileLock, end_with_parent, pidfd_open

_log = logging.getLogger(__name__)


class MasterState:
    settings: Settings | None = None
    lock: FileLock | None = None
    # Of the history's directory, and of directories still held by a predecessor
    also: tuple[FileLock, ...] = ()
    report: tuple[int, ...] = ()  # pipe to a predecessor, which waits for a report
    keeper_fd: int = -1  # the keeper's pipe, in the master alone; -1: no keeper
    keeper_pid: int = 0  # 0: gunicorn was started directly
    tied: bool = False  # whether the kernel ends the master with the keeper
    handover_watch = StoppedWatch()
    stored: Sequence[tuple[str, int]] = ()  # clients' memory, from the service before
    passed: bool = False  # systemd or a predecessor has passed gunicorn's sockets
    bound: bool = False  # a predecessor has bound gunicorn's sockets
    supervisor: FileLock | None = None  # on the lock file of the service's start
    master_fd: int = -1
    failure: BinaryIO | None = None  # supervisors' standard input: why the start has failed
    stopping_fd: int = -1  # eventfd for a handover: the master has begun to stop
    notify_socket: str = ""
    ending: bool = False
    run_dir_fd: int = -1
    grpc_fds: tuple[int, ...] = ()  # listening sockets passed by systemd
    places: tuple[socket.socket, ...] = ()  # addresses reserved for gRPC processes and the agent
    watchdog_usec: int = 0
    begun: float = 0.0  # time of `prepare` (monotonic)
    warnings: tuple[str, ...] = ()  # about settings

    def read_settings(self) -> Settings:
        self.report = activation.take(os.environ, activation.REPORT)
        if passed := os.environ.pop(keeper.VARIABLE, ""):
            self.keeper_fd, self.keeper_pid = map(int, passed.split(":"))
            os.set_inheritable(self.keeper_fd, False)
        found = config.read()
        listen_addresses.check_http(found.settings)
        self.settings, self.warnings = found.settings, found.warnings
        return found.settings

    def tie(self) -> None:
        """Have the kernel end the master with its parent, the keeper."""
        end_with_parent()
        self.tied = True

    def take_passed(self) -> None:
        """Take the descriptors passed to the master by systemd or a predecessor."""
        self.begun = time.monotonic()
        self.grpc_fds = activation.take(os.environ, activation.GRPC)
        self.stored = activation.take_all(os.environ, activation.REGIONS)
        self.passed = activation.has_http(os.environ)
        self.bound = activation.are_bound(os.environ)

    def own_folders(self, settings: Settings, lock: FileLock, also: tuple[FileLock, ...]) -> None:
        """Keep the locks of the run directory (`lock`) and of further directories (`also`)."""
        self.settings, self.lock, self.also = settings, lock, also
        self.run_dir_fd = rundir.keep_from_cleaners(config.base_dir(settings))

    def be_master(self, run_dir: str) -> None:
        """Take the master's part: the supervisor's lock file, sd_notify, and a pidfd of itself."""
        self.supervisor = rundir.lock(run_dir, "supervisor")
        self.supervisor.pin()
        # gunicorn would announce readiness before any model is loaded, so the supervisor announces
        # readiness.
        self.notify_socket = os.environ.pop("NOTIFY_SOCKET", "")
        self.watchdog_usec = int(os.environ.pop("WATCHDOG_USEC", "") or 0)
        own = pidfd_open(os.getpid())
        assert own is not None
        self.master_fd = own
        self.stopping_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.failure = last_words.make()

    def let_go_of_report(self) -> None:
        """Close the pipe to the predecessor, which waits no longer."""
        for fd in self.report:
            os.close(fd)
        self.report = ()

    def let_go_of_stored(self) -> None:
        """Close clients' memory, which the supervisor has now."""
        for _, fd in self.stored:
            os.close(fd)
        self.stored = ()

    def keep_places(self, places: Iterable[socket.socket]) -> None:
        self.places += tuple(places)

    def let_go_of_places(self) -> None:
        for place in self.places:
            place.close()
        self.places = ()

    def let_go_of_keeper(self) -> None:
        if self.keeper_fd >= 0:
            os.close(self.keeper_fd)
            self.keeper_fd = -1

    def end(self, level: int, reason: str) -> None:
        """End the master, by the signal that ends gunicorn."""
        _log.log(level, "%s: ending", reason)
        if not self.ending:
            self.ending = True
            os.kill(os.getpid(), signal.SIGTERM)

    def supervisor_arguments(self, load_timeout_s: float, serves: bool) -> list[str]:
        """Return arguments for a supervisor. `serves`: whether the master's generation serves."""
        arguments = ["--grpc-fds", *map(str, self.grpc_fds)]
        if self.report and not serves:
            arguments += ["--report-fd", str(self.report[0])]
        if self.grpc_fds:
            arguments += ["--patient-until", str(self.begun + load_timeout_s)]
        if self.notify_socket:
            arguments += ["--notify-socket", self.notify_socket]
            arguments += ["--watchdog-usec", str(self.watchdog_usec)]
            if not self.keeper_pid:  # a keeper stays the main process
                arguments += ["--main-is-master"]
        return arguments

    @property
    def supervisor_fds(self) -> tuple[int, ...]:
        """Return descriptors for a supervisor: named in arguments, and clients' memory."""
        return (*self.grpc_fds, *self.report, *(fd for _, fd in self.stored))
