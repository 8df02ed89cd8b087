"""Coordinator loop: one thread, one selector, non-blocking sockets.

The loop never waits for a peer to send, or to make room in a socket. The only wait is the
selector's, with a deadline of at most one second.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from functools import partial

from shmserve import model_places
from shmserve.config import Settings, base_dir, state_dir
from shmserve.coordinator import assembly, pool_sizing
from shmserve.coordinator.agent_check import AgentCheck, AgentConnection
from shmserve.coordinator.assembly import Launch, Outside, RemoteStart
from shmserve.coordinator.links import Links
from shmserve.coordinator.message_router import MessageRouter
from shmserve.coordinator.models import desired_models
from shmserve.coordinator.models.desired_models import DesiredModels, Library
from shmserve.coordinator.models.repository_jobs import Background, RepositoryJobs
from shmserve.coordinator.process_connections import ProcessConnection
from shmserve.coordinator.programs.client_socket import ClientSocket
from shmserve.coordinator.programs.program_connection import ClientConnection
from shmserve.coordinator.regions.owners import Owners
from shmserve.coordinator.regions.predecessor import Predecessor
from shmserve.coordinator.state.checkpoint import Checkpoint, CheckpointFile
from shmserve.coordinator.stats.history_file import HistoryFile
from shmserve.core.control.silence import period_s
from shmserve.errors import Unavailable, UnreadableMessage
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.observe.gpu_use import GpuUse
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Welcome
from shmserve.repository import packs
from shmserve.shm import segment
from shmserve.shm.registry_page import RegistryReader, RegistryWriter
from shmserve.transport import rundir
from shmserve.transport.channel import listen
from shmserve.transport.processes import FileLock, has_ended, raise_fd_limit

_log = logging.getLogger(__name__)

_LOCK_WAIT_S = 2.0
_TICK_S = 1.0
_SOON_S = 0.05
_EARLY = 0.25  # share of the period between two beats by which a beat may be early
# after the master's end: time for requests to end unless we are stopped earlier
_AFTER_MASTER_S = 4.0


def run(launch: Launch, library: Library) -> int:
    """Run one coordinator until it ends. Return the exit status."""
    lock = rundir.lock(launch.run_dir, "coordinator")
    if not _acquire(lock):
        _log.error("another coordinator runs", extra=log_fields(pid=lock.holder()))
        return 1
    flight_recorder.start(launch.run_dir, launch.process)
    wake = WakeUp()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: wake.stop())
    raise_fd_limit()  # each region needs a descriptor
    writer = RegistryWriter(launch.run_dir, launch.epoch)
    try:
        CoordinatorLoop(launch, library, writer, wake).run(lock.beat)
    finally:
        writer.close()
        wake.close()
        segment.sweep()  # segments of processes killed while creating a segment
        lock.release()
    return 0


class WakeUp:
    """Ends the selector's wait, from signal handlers and other threads, by making `fd` readable."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.stopping = False

    def __call__(self) -> None:
        os.eventfd_write(self.fd, 1)

    def stop(self) -> None:
        """Also end the loop. Safe in a signal handler."""
        self.stopping = True
        self()

    def close(self) -> None:
        os.close(self.fd)


class CoordinatorLoop:
    """Parts of one coordinator, and the loop that hands events and time to the parts."""

    def __init__(
        self, launch: Launch, library: Library, writer: RegistryWriter, wake: WakeUp
    ) -> None:
        settings, run_dir = launch.settings, launch.run_dir
        self._wake = wake
        self._master_fd = launch.master_fd
        self._base_dir, self._run_dir = base_dir(settings), run_dir
        self._beat_s, self._beat_at = period_s(settings.watchdog_s), 0.0
        self._stop_at = math.inf
        again = writer.previous is not None
        if not again:
            swept = segment.sweep()
            if swept:
                _log.info("removed what earlier services left", extra=log_fields(segments=swept))
        file = CheckpointFile(run_dir, launch.epoch)
        checkpoint = file.read()
        waits = checkpoint is None and assembly.waits_for_models(settings, library)
        known = checkpoint is not None or waits
        fingerprints = {} if known else assembly.survey(settings, library)
        desired = DesiredModels() if known else self._desired(settings, library)
        pool_bytes = _advised(*pool_sizing.host_pool(settings.pool_bytes))
        frontends = settings.http_workers + settings.grpc_processes
        processes = frontends + _instances(checkpoint, desired)
        # the service itself uses part of /dev/shm by now, so keep the first result
        if writer.previous is not None:
            shortage = writer.previous.shortage
        else:
            shortage = pool_sizing.shortage(pool_bytes, pool_sizing.shm_space()[1], processes)
        # A pool larger than /dev/shm is only warned about. Size arenas by the smaller of both, or
        # the first processes would take all memory.
        there = min(pool_bytes, pool_sizing.shm_space()[0])
        sizes = (there, processes, settings.arena_bytes, pool_sizing.largest_file())
        arena_bytes = _advised(*pool_sizing.arena_size(*sizes))
        self._selector = selectors.DefaultSelector()
        welcome = Welcome(messages.VERSION, launch.epoch, arena_bytes, pool_bytes)
        self._links = Links(self._selector, welcome)
        self._background = Background(wake)
        if not again:
            packs_root = packs.folder_in(model_places.cache_dir(settings))
            self._background.submit(lambda: packs.sweep(packs_root), lambda _: None)
        self._gpus = GpuUse()
        owners = Owners(
            lambda pidfd, process: self._selector.register(pidfd, selectors.EVENT_READ, process),
            self._selector.unregister,
            settings.client_shm_reap_dead_owners,
        )
        jobs = RepositoryJobs(
            library, model_places.repository_paths(settings), run_dir, self._background
        )
        jobs.tried.update(checkpoint.tried if checkpoint else fingerprints)
        send = self._links.send
        outside = Outside(writer, file, owners, jobs, self._gpus, send)
        parts = assembly.assemble(launch, outside, pool_bytes, arena_bytes, shortage)
        if shortage:
            _log.error("not ready: %s (pool_bytes, %s)", shortage, pool_sizing.SHM)
        parts.reconciler.serving("grpc", launch.grpc_unserved)
        self._regions, self._introspection = parts.regions, parts.introspection
        self._control = parts.control
        self._history = self._history_file(settings)
        self._router = MessageRouter(parts, send)
        self._client_socket = ClientSocket(settings, parts.regions, parts.lanes, self._selector)
        free = parts.introspection.free_percent
        self._agent = AgentCheck(
            settings.agent_bind, lambda: free(parts.publication.latest), self._selector
        )
        self._known: Callable[[], bool] = lambda: not parts.reconciler.awaiting
        listener = listen(os.path.join(run_dir, rundir.COORDINATOR_SOCKET))
        listener.setblocking(False)
        if checkpoint is not None:
            assembly.resume(parts, checkpoint, writer.previous)
        else:
            if not again:
                writer.publish(parts.reconciler.snapshot(launch.epoch))
            if not waits:
                assembly.begin(parts, desired, fingerprints)
        start = RemoteStart(settings, library, self._background, parts, jobs.tried, waits)
        parts.control.remote.on_round = start.fetched
        self._client_socket.serve(self._serves())
        self._gpus.start()
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(wake.fd, selectors.EVENT_READ, None)
        self._selector.register(self._master_fd, selectors.EVENT_READ, None)
        self._predecessor: Predecessor | None = None
        if not self._serves():
            before = rundir.serving(self._base_dir)
            self._predecessor = Predecessor(before, launch.process, parts.regions, wake)
        about = log_fields(epoch=launch.epoch, again=again, pool_bytes=pool_bytes)
        _log.info("ready", extra=about)

    def run(self, beat: Callable[[], bool]) -> None:
        """Run until the supervisor stops the loop or the gunicorn master ends. `beat`: writes the
        sign of life; returns False if the run directory is no longer ours."""
        try:
            while not self._wake.stopping and (now := time.monotonic()) < self._stop_at:
                # A beat slightly early, in a turn with other work, saves a separate turn.
                if now + self._beat_s * _EARLY >= self._beat_at:
                    self._beat_at = now + self._beat_s
                    if not beat():
                        _log.error("run_dir: files have been removed, ending for a successor")
                        return
                self._turn()
        finally:
            self._close()

    def _turn(self) -> None:
        patience = _SOON_S if self._router.urgent else _TICK_S
        next_due = min(self._introspection.due, self._beat_at, self._control.due)
        until_due = max(0.0, next_due - time.monotonic())
        for key, ready in self._selector.select(min(patience, until_due)):
            if isinstance(key.data, ProcessConnection):
                self._links.ready(key.data, ready, self._router)
            elif key.fd == self._master_fd:
                self._master_ended()
            elif key.fd == self._wake.fd:
                os.eventfd_read(self._wake.fd)
            elif isinstance(key.data, ClientConnection):
                self._client_socket.ready(key.data, ready)
            elif isinstance(key.data, AgentConnection):
                self._agent.ready(key.data)
            elif isinstance(key.data, tuple):
                pid, started = key.data
                self._regions.process_ended(pid, started, time.monotonic())
            elif isinstance(key.fileobj, socket.socket):
                if isinstance(key.data, ClientSocket):
                    key.data.accept(key.fileobj)
                elif isinstance(key.data, AgentCheck):
                    key.data.accept(key.fileobj, time.monotonic())
                else:
                    self._links.accept(key.fileobj)
        self._background.settle()
        if self._predecessor is not None:
            self._predecessor.turn(time.monotonic())
        self._router.tick(time.monotonic())
        if self._history is not None and self._serves():
            self._history.tick(time.monotonic())
        self._client_socket.serve(self._serves())
        self._client_socket.settle(time.monotonic())
        self._agent.settle(time.monotonic(), self._known() and self._serves())
        self._links.bury(self._router)

    def _desired(self, settings: Settings, library: Library) -> DesiredModels:
        """Return the models to run. While another generation serves, include the models loaded in
        that generation."""
        if not self._serves():
            try:
                before = RegistryReader(rundir.serving(self._base_dir)).current()
                settings = desired_models.continued(settings, before)
            except (Unavailable, UnreadableMessage) as ex:
                _log.warning("the old generation does not tell its loaded models: %s", ex)
        return desired_models.choose(settings, library.scan)

    def _serves(self) -> bool:
        """Return True if this generation of the service is the serving generation."""
        return rundir.serving(self._base_dir) == self._run_dir

    def _master_ended(self) -> None:
        """Drain, and end soon even if no supervisor stops this process."""
        self._selector.unregister(self._master_fd)
        self._router.drain("the gunicorn master is gone")
        self._stop_at = min(self._stop_at, time.monotonic() + _AFTER_MASTER_S)

    def _history_file(self, settings: Settings) -> HistoryFile | None:
        """Return the file by which history survives a coordinator. Return None if nothing is
        monitored."""
        monitoring = self._introspection.monitoring
        if monitoring is None:
            return None
        later = partial(self._background.submit, done=lambda _: None)
        file = HistoryFile(state_dir(settings), monitoring, later, time.monotonic())
        file.read()
        return file

    def _close(self) -> None:
        if self._predecessor is not None:
            self._predecessor.close()
        self._gpus.stop()
        if self._history is not None and self._serves():
            self._history.close(time.monotonic())
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._client_socket.close()


def _instances(checkpoint: Checkpoint | None, desired: DesiredModels) -> int:
    """Return the number of executors to come."""
    if checkpoint is None:
        return sum(len(instances) for _, instances in desired.versions)
    serving = [model.serving for model in checkpoint.models if model.serving is not None]
    return sum(len(v.instances) for revision in serving for v in revision.versions)


def _advised(size: int, advice: str) -> int:
    if advice:
        _log.warning("%s", advice)
    return size


def _acquire(lock: FileLock) -> bool:
    """Take the lock, waiting briefly for a predecessor to end. Return False if the lock stays
    held."""
    deadline = time.monotonic() + _LOCK_WAIT_S
    while not lock.acquire():
        holder = lock.holder_pidfd()
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return False
        if holder is not None:
            _, pidfd = holder
            has_ended(pidfd, remaining_s)
            os.close(pidfd)
    return True
