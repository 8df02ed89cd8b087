"""Supervisor's main loop: runs coordinator, executors and gRPC processes, and ends with the
master.

One thread selects over pidfds. The link has a second thread, whose messages arrive in a queue.
Every wait has a deadline.

The end, on SIGTERM or when the master is gone, takes these steps:

- Tell the coordinator, so that frontends see `draining`.
- Let the gRPC processes finish, then the executors, and kill processes that exceed the limit.
- End the exporter, the fetcher and the coordinator, and remove the sockets.

Exporter and fetcher have 3.5 s to end, however long the drain has taken. `Supervisor.run` returns
when no process of the service is left.
"""

import logging
import os
import queue
import selectors
import signal
import time
from collections.abc import Callable
from math import inf

from msgspec import Struct

from shmserve.config import Settings, base_dir
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder, last_words
from shmserve.protocol.control import link_messages as wire
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.control.region_messages import DropRegions, StoredRegions, StoreRegions
from shmserve.protocol.control.stats_messages import DropPages, PageOwner, StoredPages, StorePages
from shmserve.supervisor.announce import Announcer
from shmserve.supervisor.fd_store import FdStore
from shmserve.supervisor.generations.lasting_regions import LastingRegions, restored
from shmserve.supervisor.generations.takeover import LoadingWatch, TakeOver
from shmserve.supervisor.processes.children import Child
from shmserve.supervisor.processes.coordinator_process import CoordinatorProcess
from shmserve.supervisor.processes.executor_template import ExecutorTemplate
from shmserve.supervisor.processes.executors import Executors
from shmserve.supervisor.processes.frontends import Frontends
from shmserve.supervisor.processes.life_watch import LifeWatch
from shmserve.supervisor.processes.serving_watch import ServingWatch
from shmserve.transport import processes, rundir
from shmserve.transport.channel import close_all
from shmserve.transport.link import Link, LinkHandlers

_log = logging.getLogger(__name__)

_BEYOND_S = 2.0  # grace beyond the longest request before an undesired executor is killed
_TELL_S = 0.2  # between "draining" and SIGTERM
_WITHOUT_MASTER_S = 3.0  # the drain's limit once the master is gone
_HELPER_STOP_S = 3.5  # the exporter itself takes up to 3 s
_TOUCH_S = 3600.0  # cleaners of /tmp remove files that are some days old


class Commands(Struct, frozen=True):
    """Command lines that start each kind of process; arguments are appended. `grpc`, `exporter`,
    `fetcher`: None if no such process should run. `template`: empty if executors are always
    exec'ed."""

    coordinator: list[str]
    executor: list[str]
    grpc: list[str] | None = None
    template: tuple[str, ...] = ()
    exporter: list[str] | None = None
    fetcher: list[str] | None = None


class Inherited(Struct, frozen=True):
    """Descriptors and facts that a supervisor is started with.

    Attributes:
        master_fd: pidfd of the gunicorn master.
        lock_fd: the supervisor's lock file.
        grpc_fds: sockets for gRPC processes to listen on.
        report_fd: pipe to a predecessor that waits; -1 if none waits.
        patient_until: until when (monotonic) clients wait on `grpc_fds` for models.
        begins: whether this is the service's first supervisor.
    """

    master_fd: int
    lock_fd: int
    grpc_fds: tuple[int, ...] = ()
    report_fd: int = -1
    patient_until: float = 0.0
    stored: tuple[tuple[str, int], ...] = ()  # kept by systemd for this start: names, descriptors
    begins: bool = False


class Supervisor:
    """Main loop and processes of a supervisor with the id `process`."""

    def __init__(
        self,
        settings: Settings,
        run_dir: str,
        process: str,
        inherited: Inherited,
        commands: Commands,
        announcer: Announcer,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._process = process
        self._master_fd = master_fd = inherited.master_fd
        self._lock = rundir.lock(run_dir, "supervisor", inherited.lock_fd)
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox: queue.SimpleQueue[FromCoordinator] = queue.SimpleQueue()
        self._announcer = announcer
        self._healthy = True
        self._take_over = TakeOver(
            inherited.report_fd, LoadingWatch(run_dir, inherited.patient_until)
        )
        self._link = Link(
            run_dir,
            "supervisor",
            process,
            LinkHandlers(on_message=self._from_link, on_fds=self._fds_from_link),
        )
        self._regions, fds = restored(inherited.stored)
        self._store = FdStore[int](self._stored_regions)
        self._store.keep([*fds], [*fds.values()])
        self._lasting = LastingRegions(announcer.notifier)
        self._pages = FdStore[PageOwner](StoredPages)
        count = settings.grpc_processes if commands.grpc is not None else 0
        turn, keep = self._take_over.turn_fd, inherited.grpc_fds
        command = [*(commands.grpc or []), "--turn-fd", str(turn), "--listen-fds", *map(str, keep)]
        self._frontends = Frontends(run_dir, "grpc", command, count, master_fd, (turn, *keep))
        waits = inherited.report_fd >= 0 or inherited.patient_until > 0
        self._serving = ServingWatch(self._frontends, self._link.send, inherited.begins, waits)
        helpers = {"exporter": commands.exporter, "fetcher": commands.fetcher}
        self._helpers = [
            Frontends(run_dir, role, command, 1, master_fd)
            for role, command in helpers.items()
            if command is not None
        ]
        finish_s = settings.request_timeout_s + _BEYOND_S
        self._template = ExecutorTemplate(list(commands.template), master_fd)
        self._executors = Executors(
            run_dir,
            commands.executor,
            master_fd,
            self._link.send,
            self._watch,
            self._template,
            finish_s,
        )
        self._coordinator = CoordinatorProcess(run_dir, commands.coordinator, master_fd)
        self._life = LifeWatch(run_dir, settings.watchdog_s, settings.master_silence_s)
        self._looked_at = 0.0
        self._touched_at = time.monotonic()
        self._part: list[wire.Instance] = []
        self._drain_reason = ""
        self._drain_limit_s = 0.0

    def run(self) -> int:
        """Run until the service ends. Return 0, at once if another supervisor runs."""
        if not self._lock.acquire():
            _log.debug("another supervisor runs", extra=log_fields(pid=self._lock.holder()))
            return 0
        flight_recorder.start(self._run_dir, self._process)
        flight_recorder.record("process started", "supervisor", f"pid {os.getpid()}")
        processes.adopt_orphans()  # executors that the template has forked
        # each region takes a descriptor here, in the coordinator and in executors
        processes.raise_fd_limit()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self.stop(signal.Signals(number).name))
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._selector.register(self._master_fd, selectors.EVENT_READ, None)
        self._link.start()
        try:
            while not self._drain_reason:
                self._turn()
            self._drain()
        finally:
            self._link.close()
            self._lock.release()
        return 0

    def stop(self, reason: str) -> None:
        """Begin the drain; safe in a signal handler."""
        if not self._drain_reason:
            self._drain_reason, self._drain_limit_s = reason, self._settings.drain_timeout_s
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------- on the link's thread

    def _stored_regions(self, numbers: tuple[int, ...], more: bool) -> StoredRegions:
        """Return the message that hands regions over, with their registrations."""
        regions = tuple(self._regions[n] for n in numbers if n in self._regions)
        return StoredRegions(numbers, more, regions)

    def _from_link(self, message: FromCoordinator) -> None:
        if isinstance(message, wire.Welcome):
            self._store.hand_over(self._link, sorted(self._regions.keys() - self._store.fds))
            self._pages.hand_over(self._link)
        elif isinstance(message, DropRegions):
            self._store.drop(message.numbers)
            self._regions = {n: r for n, r in self._regions.items() if n not in message.numbers}
            os.eventfd_write(self._wake_fd, 1)
            return
        elif isinstance(message, DropPages):
            self._pages.drop(message.owners)
            return
        self._inbox.put(message)
        os.eventfd_write(self._wake_fd, 1)

    def _fds_from_link(self, message: FromCoordinator, fds: list[int]) -> None:
        if isinstance(message, StoreRegions):
            self._store.keep(message.numbers, fds)
            self._regions = {**self._regions, **{r.number: r for r in message.regions}}
            os.eventfd_write(self._wake_fd, 1)
        elif isinstance(message, StorePages):
            self._pages.keep(message.owners, fds)
        else:
            close_all(fds)

    # ------------------------------------------------------------------- the loop

    def _due(self) -> float:
        """Return when (monotonic) the loop has work although no event has come."""
        dues = [group.next_due() for group in (self._frontends, *self._helpers)]
        dues += (self._coordinator.next_due(), self._executors.next_due())
        dues.append(self._template.next_due())
        if self._take_over.pending:
            dues.append(time.monotonic() + _TELL_S)
        return min(self._looked_at + self._life.look_s, self._announcer.due, *dues)

    def _turn(self, limit_s: float = inf) -> None:
        wait_s = max(0.0, min(limit_s, self._due() - time.monotonic()))
        for key, _ in self._selector.select(wait_s):
            if isinstance(key.data, Child):
                self._ended(key.data)
            elif key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif key.fd == self._master_fd:
                self._selector.unregister(self._master_fd)
                if not self._drain_reason:
                    self.stop("the gunicorn master is gone")
                self._drain_limit_s = min(self._drain_limit_s, _WITHOUT_MASTER_S)
        while not self._inbox.empty():
            self._handle(self._inbox.get())
        now = time.monotonic()
        coordinator = self._coordinator.turn(now, self._serving.reason)
        for started in filter(None, (self._template.start(now), coordinator)):
            self._watch(started)
        self._executors.turn(now)
        for group in (self._frontends, *self._helpers):
            for child in group.turn(now):
                self._watch(child)
        processes.reap_orphans(
            {key.data.pid for key in self._selector.get_map().values() if key.data}
        )
        if now >= self._looked_at + self._life.look_s:
            self._looked_at = now
            self._look(now)
        broken = ""
        if not self._drain_reason:
            broken = self._serving.turn(now, self._take_over.may_listen)
        if reason := self._take_over.turn(self._frontends.listening, broken):
            _log.error("this generation will not serve: %s", reason)
            processes.send_signal(self._master_fd, signal.SIGTERM)
        elif broken:
            _log.critical("the service ends: %s", broken)
            last_words.tell(broken)  # to the master, which ends with status 1
            processes.send_signal(self._master_fd, signal.SIGTERM)
        self._announcer.turn(now, self._healthy)
        # A restarted supervisor knows no region until its coordinator has sent them.
        regions_known = self._link.connected and not self._drain_reason
        if regions_known and self._announcer.speaks():
            self._lasting.turn(self._regions, self._store.fds)

    def _look(self, now: float) -> None:
        """Give this process's sign of life, and check the signs of other processes."""
        self._lock.beat()
        if now - self._touched_at >= _TOUCH_S:
            self._touched_at = now
            rundir.touch(base_dir(self._settings))  # with the folders of all generations
        if self._coordinator.child is not None:
            self._life.look("coordinator", self._coordinator.child, now)
        frontends = self._frontends.running() if self._take_over.may_listen else []
        helpers = (alive for helper in self._helpers for alive in helper.running())
        for role, child in (*frontends, *helpers):
            self._life.look(role, child, now)
        self._healthy = self._life.healthy(now)

    def _handle(self, message: FromCoordinator) -> None:
        now = time.monotonic()
        if isinstance(message, wire.Welcome):
            self._part.clear()
            self._serving.tell_again()
            self._executors.report()
        elif isinstance(message, wire.Adopt):
            for name, pid, process in message.instances:
                self._executors.adopt(name, pid, process, now)
        elif isinstance(message, wire.Desired):
            self._part += message.instances
            if not message.more:
                desired, self._part = self._part, []
                self._executors.desire(desired, now, message.hurry)
        elif isinstance(message, wire.Forgive):
            self._executors.forgive(message.instance, now)

    def _watch(self, child: Child) -> None:
        kind = "process adopted" if child.popen is None else "process started"
        flight_recorder.record(kind, child.name, f"pid {child.pid}")
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)

    def _ended(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        now = time.monotonic()
        ends = [group.ended for group in (self._frontends, *self._helpers)]
        ends += (self._template.ended, self._coordinator.ended)
        if not any(ended(child, now) for ended in ends):
            self._executors.ended(child, now)

    # ------------------------------------------------------------------ the drain

    def _drain(self) -> None:
        about = log_fields(reason=self._drain_reason, limit_s=self._drain_limit_s)
        _log.info("draining", extra=about)
        flight_recorder.record("service draining", "supervisor", self._drain_reason)
        started = time.monotonic()
        self._announcer.stopping()
        self._coordinator.halt()
        self._executors.halt()
        self._template.close()
        for group in (self._frontends, *self._helpers):
            group.halt()
        if self._frontends.children:  # their accepted requests still need the executors
            self._link.send(wire.Drain(self._drain_reason, announce=True))
            self._end_all(lambda: self._frontends.children, started)
        self._link.send(wire.Drain(self._drain_reason))
        self._end_all(lambda: list(self._executors.children.values()), started)
        self._end_helpers()  # last, because the others still send spans to the exporter
        if (coordinator := self._coordinator.stop()) is not None:
            self._ended(coordinator)
        if not self._lock.intact():
            return  # the files of these names are another service's now
        rundir.clean_sockets(self._run_dir)
        if processes.has_ended(self._master_fd):
            flight_recorder.keep(self._run_dir)
            rundir.clean(self._run_dir)

    def _end_all(self, remaining: Callable[[], list[Child]], started: float) -> None:
        """Stop processes, and kill those that remain at the end of the drain's limit."""
        begun = time.monotonic()
        while children := remaining():
            now = time.monotonic()
            remaining_s = started + self._drain_limit_s - now
            for child in children:
                if now - begun >= _TELL_S:
                    child.stop(now, max(0.0, remaining_s))
                if remaining_s <= 0:  # the limit may have become shorter since `stop`
                    child.kill()
            self._turn(_TELL_S)
            if remaining_s < -5.0:  # killed and still there: stuck in the kernel
                pids = [child.pid for child in children]
                _log.error("processes do not end", extra=log_fields(pids=pids))
                return

    def _end_helpers(self) -> None:
        begun = time.monotonic()
        while children := [child for helper in self._helpers for child in helper.children]:
            for child in children:
                child.stop(begun, _HELPER_STOP_S)
            if time.monotonic() >= begun + 2 * _HELPER_STOP_S:
                return
            self._turn(_TELL_S)  # kills helpers whose time is over
