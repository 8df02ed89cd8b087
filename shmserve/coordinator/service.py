"""The coordinator's shell: one thread, one selector, non-blocking sockets.

Nothing here waits for a peer: not for its messages, not for room in its socket. The wait
that there is (the selector's) has a deadline of at most a second.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time

from shmserve.config import Settings
from shmserve.coordinator import pool_sizing as limits
from shmserve.coordinator.background import Background
from shmserve.coordinator.client_socket import ClientDoor, Connection
from shmserve.coordinator.connections import Peer
from shmserve.coordinator.desk import Desk
from shmserve.coordinator.links import Links
from shmserve.coordinator.models import desired_models as wanted
from shmserve.coordinator.models.model_control import ModelControl
from shmserve.coordinator.models.supervisor_sync import Orders
from shmserve.coordinator.plan import Plan, PlanFile
from shmserve.coordinator.regions.owners import Owners, Process
from shmserve.coordinator.regions.registrations import Regions
from shmserve.coordinator.runtime_settings import TuningDesk
from shmserve.coordinator.stats.counter_totals import SETTLE_S, Counters
from shmserve.coordinator.stats.introspection import Information
from shmserve.coordinator.stats.monitoring import Monitoring
from shmserve.core.control.reconciler import Fleet
from shmserve.core.control.runtime_settings import initial_log
from shmserve.core.memory.budget import Ledger
from shmserve.errors import ConfigError
from shmserve.observe import gpus
from shmserve.observe.gpu_use import GpuUse
from shmserve.protocol import messages
from shmserve.protocol.control.link_messages import Welcome
from shmserve.shm import segment
from shmserve.shm.registry_page import RegistryWriter
from shmserve.transport import rundir
from shmserve.transport.channel import listen
from shmserve.transport.processes import FileLock, has_ended, raise_fd_limit

_log = logging.getLogger(__name__)

_LOCK_WAIT_S = 2.0
_TICK_S = 1.0
_SOON_S = 0.05
_AFTER_MASTER_S = 4.0  # with the master gone: for requests to end, if nobody stops us earlier
_LEDGER_SETTLE_S = 0.2  # after a restart: holders say what they hold before more is granted


class Coordinator:
    """One life of the coordinator. `run` returns its exit status."""

    def __init__(
        self,
        settings: Settings,
        run_dir: str,
        process: str,
        epoch: str,
        master_fd: int,
        library: wanted.Library,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._process = process
        self._epoch = epoch
        self._master_fd = master_fd
        self._library = library
        self._selector = selectors.DefaultSelector()
        self._links = Links(self._selector, self._welcome, lambda: self._desk)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop_at: float | None = None
        self._desk: Desk
        self._background: Background
        self._door: ClientDoor | None = None
        self._gpus = GpuUse()

    def run(self) -> int:
        lock = rundir.lock(self._run_dir, "coordinator")
        if not _acquire(lock):
            _log.error("another coordinator runs pid=%s", lock.holder())
            return 1
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stop())
        raise_fd_limit()  # a region is a descriptor
        writer = RegistryWriter(self._run_dir, self._epoch)
        try:
            self._start(writer)
            while self._stop_at is None or time.monotonic() < self._stop_at:
                self._turn()
        finally:
            self._close()
            writer.close()
            segment.sweep()  # of processes killed at birth of a segment
            lock.release()
        return 0

    def stop(self) -> None:
        """End the loop; safe in a signal handler."""
        self._stop_at = 0.0
        os.eventfd_write(self._wake_fd, 1)

    # --------------------------------------------------------------------- start

    def _start(self, writer: RegistryWriter) -> None:
        now = time.monotonic()
        again = writer.previous is not None
        if not again:
            swept = segment.sweep()
            if swept:
                _log.info("removed what earlier services left segments=%d", swept)
        plan_file = PlanFile(self._run_dir, self._epoch)
        plan = plan_file.read()
        marks = {} if plan else self._survey()
        chosen = wanted.Wanted() if plan else wanted.choose(self._settings, self._library.scan)
        pool = self._pool_bytes()
        self._arena_bytes = self._arena_size(pool, _instances(plan, chosen))
        ledger = Ledger(pool, self._arena_bytes, now + _LEDGER_SETTLE_S if again else 0.0)
        fleet = self._fleet(ledger)
        owners = Owners(
            self._watch_owner, self._unwatch_owner, self._settings.client_shm_reap_dead_owners
        )
        regions = Regions(self._settings, self._run_dir, fleet, self._links.send, owners, _gpus)
        information = self._information(fleet, regions, now, again)
        tuning = TuningDesk(initial_log(self._settings.log_level), self._links.send)
        orders = Orders(fleet, self._links.send)
        self._background = Background(lambda: os.eventfd_write(self._wake_fd, 1))
        self._desk = Desk(
            fleet,
            writer,
            self._epoch,
            self._links.send,
            regions,
            information,
            tuning,
            orders,
            plan_file,
            self._settings.grps_online,
        )
        self._desk.control = ModelControl(
            self._settings,
            self._run_dir,
            fleet,
            self._library,
            self._background,
            orders,
            self._links.send,
            self._desk.perform,
        )
        listener = listen(os.path.join(self._run_dir, rundir.COORDINATOR_SOCKET))
        listener.setblocking(False)
        if plan is not None:
            self._desk.resume(plan, self._settings.load_timeout_s, now)
        else:
            if not again:
                writer.publish(fleet.snapshot(self._epoch))
            self._desk.begin(chosen, marks, now)
        self._door = ClientDoor(self._settings, self._run_dir, regions, self._selector)
        self._door.open()
        self._gpus.start()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._selector.register(self._master_fd, selectors.EVENT_READ, None)
        _log.info("ready epoch=%s again=%s pool_bytes=%d", self._epoch, again, ledger.pool_bytes)

    def _fleet(self, ledger: Ledger) -> Fleet:
        settings = self._settings
        return Fleet(
            ledger, settings.execute_timeout_s, settings.load_timeout_s, settings.load_attempts
        )

    def _survey(self) -> dict[str, str]:
        try:
            return self._library.survey(self._settings.model_repository)
        except ConfigError:  # scanning it will say so
            return {}

    def _information(self, fleet: Fleet, regions: Regions, now: float, again: bool) -> Information:
        settings, most = self._settings, self._settings.max_counted_models
        settled_at = now + SETTLE_S if again else 0.0
        counters = Counters(self._run_dir, self._epoch, self._links.send, most, settled_at)
        own = (self._process, os.getpid(), now)
        information = Information(fleet, regions, counters, self._gpus, self._links.send, own)
        if settings.dashboard:
            information.monitoring = Monitoring(
                counters,
                fleet,
                regions.book,
                self._gpus,
                self._links.send,
                self._epoch,
                most,
                again,
                now,
            )
        return information

    def _pool_bytes(self) -> int:
        size, free = limits.shm_space()
        wanted_bytes = self._settings.pool_bytes
        pool, advice = limits.pool_size(wanted_bytes, size, free, limits.cgroup_limit())
        if advice:
            _log.warning("%s", advice)
        return pool

    def _arena_size(self, pool: int, instances: int) -> int:
        processes = self._settings.http_workers + instances
        size, advice = limits.arena_size(pool, processes, self._settings.arena_bytes)
        if advice:
            _log.warning("%s", advice)
        return size

    # ---------------------------------------------------------------------- loop

    def _turn(self) -> None:
        """Wait for events, handle them, then do what is due."""
        patience = _SOON_S if self._desk.urgent else _TICK_S
        until_due = max(0.0, self._desk.due - time.monotonic())
        for key, ready in self._selector.select(min(patience, until_due)):
            if isinstance(key.data, Peer):
                self._links.ready(key.data, ready)
            elif key.fd == self._master_fd:
                self._master_ended()
            elif key.fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)
            elif isinstance(key.data, Connection) and self._door is not None:
                self._door.ready(key.data, ready)
            elif isinstance(key.data, tuple):
                pid, started = key.data
                self._desk.regions.process_ended(pid, started, time.monotonic())
            elif isinstance(key.fileobj, socket.socket):
                if isinstance(key.data, ClientDoor):
                    key.data.accept(key.fileobj)
                else:
                    self._links.accept(key.fileobj)
        self._background.settle()
        self._desk.tick(time.monotonic())
        if self._door is not None:
            self._door.settle(time.monotonic())
        self._links.bury()

    def _welcome(self) -> Welcome:
        return Welcome(messages.VERSION, self._epoch, self._arena_bytes)

    def _watch_owner(self, pidfd: int, process: Process) -> None:
        self._selector.register(pidfd, selectors.EVENT_READ, process)

    def _unwatch_owner(self, pidfd: int) -> None:
        self._selector.unregister(pidfd)

    def _master_ended(self) -> None:
        """Stop with it: soon by ourselves, earlier if the supervisor says so."""
        self._selector.unregister(self._master_fd)
        self._desk.drain("the gunicorn master is gone")
        if self._stop_at is None:
            self._stop_at = time.monotonic() + _AFTER_MASTER_S

    def _close(self) -> None:
        self._gpus.stop()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        if self._door is not None:
            self._door.close()
        os.close(self._wake_fd)


def _instances(plan: Plan | None, chosen: wanted.Wanted) -> int:
    """How many executors there will be."""
    if plan is None:
        return sum(len(instances) for _, instances in chosen.versions)
    serving = [model.serving for model in plan.models if model.serving is not None]
    return sum(len(v.instances) for incarnation in serving for v in incarnation.versions)


def _gpus() -> int:
    return len(gpus.visible_devices())


def _acquire(lock: FileLock) -> bool:
    """Take the lock, waiting a little for a predecessor that is just ending."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not lock.acquire():
        found = lock.holder_pidfd()
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if found is not None:
            has_ended(found[1], left)
            os.close(found[1])
    return True
