"""Executor process: runs one model instance. The supervisor execs this program, or `template`
forks it.

The process reads one `Instance` from stdin, loads the model and tells the coordinator. Then the
process serves until told to stop or until the gunicorn master is gone.
"""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from shmserve import config, ids
from shmserve.core.scheduling.rate_limit_policy import RateLimit
from shmserve.errors import ArenaExhausted, ConfigError, ShmserveError, TooLarge
from shmserve.executor import custom_metrics, rate_limited
from shmserve.executor.backend import CPU, Backend
from shmserve.executor.backends.model_errors import from_load, sanitised
from shmserve.executor.devices import Devices
from shmserve.executor.loop.loop import Loop
from shmserve.executor.loop.loop_assembly import LoopLimits, make_loop
from shmserve.executor.peers.channels import Channels
from shmserve.executor.peers.lane_counting import LaneCounting
from shmserve.executor.peers.lane_gate import LaneGate
from shmserve.executor.peers.lane_peers import LanePeers
from shmserve.executor.process import environments, host_policy, model_loading
from shmserve.executor.process.model_calls import ModelCalls
from shmserve.executor.tensors.mapped_regions import ClientRegions
from shmserve.executor.tensors.workspace import Workspace
from shmserve.observe import flight_recorder, log_output, logs, model_output
from shmserve.protocol.control import link_messages, messages
from shmserve.protocol.control.data_messages import ExecutorHello
from shmserve.protocol.control.messages import FromCoordinator
from shmserve.protocol.control.region_messages import ProbeRegion, RegionProbed, RegionsGone
from shmserve.protocol.control.stats_messages import CounterPage
from shmserve.protocol.decoding import msgpack_decoder
from shmserve.protocol.triton_config import model_config
from shmserve.repository import folder_reader
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.metrics_area import MetricsArea
from shmserve.shm.registry_page import RegistryReader
from shmserve.shm.status_page import SIZE, VALUES, StatusPage
from shmserve.tensor.spec import ModelSpec
from shmserve.transport import channel as transport
from shmserve.transport import looking
from shmserve.transport.link import Link, LinkHandlers
from shmserve.transport.processes import follow, raise_oom_score

log = logging.getLogger("shmserve.executor")

_decode = msgpack_decoder(link_messages.Instance)
# at least: if memory runs out, the kernel kills executors before the other processes
_OOM_SCORE_ADJ = 500
_LOG_LINES_PER_S = 1000  # limit of lines that the model prints and logs
_FIRST_SEGMENT = 1 << 20  # bytes, enough for most models


class Executor:
    """The parts of one executor process, created and connected in the right order."""

    def __init__(
        self,
        instance: link_messages.Instance,
        process: str,
        settings: config.Settings,
        refusal: ConfigError | None = None,
    ) -> None:
        """`refusal`: reason why the model's own environment cannot be used."""
        self.instance = instance
        self.process = process
        self.settings = settings
        self.refusal = refusal
        self.run_dir = config.run_dir(settings)
        self.endpoint = f"{process}.sock"
        self.loaded: link_messages.Loaded | None = None
        self.loop: Loop | None = None
        self.resources: rate_limited.SharedResources | None = None
        self.stopping = False
        mappings = Mappings()
        self.devices = Devices.of(instance.device, mappings)
        # With a GPU, segments are pinned, which takes long: a single segment of full size is
        # better than several.
        first_size = _FIRST_SEGMENT if self.devices.ordinal is None else 0
        self.link = Link(
            self.run_dir,
            "executor",
            process,
            LinkHandlers(
                on_trim=self._trim,
                on_stats=self.stats,
                on_stop=self.stop,
                held_bytes=lambda: self.memory.held_bytes,
                loaded=lambda: self.loaded,
                acquired=lambda: self.resources.ticket if self.resources is not None else 0,
                on_message=self._on_message,
                on_fds=self._on_fds,
            ),
            instance.name,
            first_size,
        )
        # The model's parameter narrows the setting: "copy" of either holds
        modes = settings.client_shm_mode, instance.spec.parameters.get("client_shm_mode")
        self.regions = ClientRegions(self.link, self.devices, copy="copy" in modes)
        epoch = self.epoch = process.rsplit("-", 1)[-1]
        self.channels: Channels | None = None
        self.memory = ArenaMemory(
            self.link,
            lambda: epoch,
            self.link.arena_bytes,
            mappings=mappings,
            first_size=first_size,
        )
        self.status = StatusPage(epoch)
        self.calls = ModelCalls(settings, instance.spec.name, process)
        self.metrics = custom_metrics.registry
        self.metrics.publish(MetricsArea(self.status.segment.fd), self.status.words, VALUES)

    def run(self) -> int:
        """Load the model, serve, and stop. Return the exit status."""
        self.link.start()
        loaded: tuple[Backend, ModelSpec] | None = None
        try:
            try:
                if self.refusal is not None:
                    raise self.refusal
                host_policy.apply(self.instance, self.settings.host_policies)
                loaded = self._load()
                name = self.instance.name
                limit = rate_limited.limit_of(self.settings, name, loaded[1], self.device)
            except ShmserveError as ex:
                # else the coordinator logs the whole text
                if sanitised(ex.message) != ex.message:
                    log.error("model not loaded: %s", ex.message)
                self.link.send(link_messages.LoadFailed(self.instance.name, sanitised(ex.message)))
                return 1
            try:
                listener = transport.listen(os.path.join(self.run_dir, self.endpoint))
            # perhaps no inode is left: the supervisor starts another executor
            except OSError as ex:
                log.error("no socket can be made in run_dir: %s", ex.strerror)
                return 1
            self._serve(listener, *loaded, limit)
        finally:
            if loaded is not None:
                loaded[0].close()
            self.calls.close()
            self.link.close()
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.run_dir, self.endpoint))
        return 0

    def _load(self) -> tuple[Backend, ModelSpec]:
        started = time.monotonic()
        try:
            backend, spec = model_loading.load(
                self.instance,
                self.devices,
                self.calls,
                self.status.show_threads,
                self.settings.allow_model_code,
            )
        except Exception as ex:
            raise from_load(ex, log, self.instance.name) from ex
        log.info("loaded in %.2f s", time.monotonic() - started)
        # The first instance logs, for all, the options of the configuration that have no effect.
        if ids.instance_index(self.instance.name) == 0:
            notes = model_config.of_spec(spec, folder_reader.kinds()).notes
            for note in filter(None, (*notes, spec.batch_note)):
                log.info("configuration: %s", note)
            if spec.caches_answers and not self.settings.response_cache_bytes:
                log.info("configuration: response_cache: no effect (response_cache_bytes is 0)")
        return backend, spec

    @property
    def device(self) -> str:
        """Return the device that the loaded model computes on."""
        return self.instance.device if self.devices.ordinal is not None else CPU

    def _serve(
        self, listener: socket.socket, backend: Backend, spec: ModelSpec, limit: RateLimit | None
    ) -> None:
        try:
            self.memory.prepare()
        except (ArenaExhausted, TooLarge) as ex:  # the first request asks for a segment again
            log.warning("no first segment yet: %s", ex)
        hello = ExecutorHello(messages.VERSION, self.process, self.instance.name)
        lanes, mappings = self._lanes(spec), self.devices.mappings
        looking.permit(self.settings.look_us)
        channels = Channels(listener, hello, self.memory, self.status, mappings, lanes)
        self.channels = channels
        workspace = Workspace(spec, self.memory, self.regions)
        settings = self.settings
        share = settings.max_caller_share
        limits = LoopLimits(settings.segment_idle_s, settings.max_streams, caller_share=share)
        if limit is not None:
            self.resources = rate_limited.SharedResources(self.link.send, channels.wake)
        self.loop = make_loop(backend, channels, workspace, limits, self.resources)
        gc.collect()
        gc.freeze()  # later collections skip the objects that the model keeps for life
        if self.stopping:
            return
        self.loaded = link_messages.Loaded(
            self.instance.name, spec, self.endpoint, self.device, limit
        )
        self.link.send(self.loaded)
        self.loop.run()

    def _lanes(self, spec: ModelSpec) -> LanePeers:
        registry = RegistryReader(self.run_dir)
        return LanePeers(
            LaneGate(spec, self.settings, registry.current, os.geteuid()),
            self.memory,
            LaneCounting(spec, self.epoch, self.link.send),
            self.settings,
            self.link.send,
        )

    def stop(self, reason: str) -> None:
        """Finish accepted requests, then end `run`."""
        log.info("stopping: %s", reason)
        self.stopping = True
        if self.loop is not None:
            self.loop.stop()

    def _trim(self, nbytes: int) -> None:
        self.memory.trim(0.0, nbytes)
        if self.loop is not None:
            self.loop.wake()

    def _on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, RegionsGone):
            self.regions.forget(message.numbers)
        elif isinstance(message, ProbeRegion):
            try:
                probed = RegionProbed(message.ticket, self.devices.probe(message.region))
            except ShmserveError as ex:
                probed = RegionProbed(message.ticket, 0, ex.code, ex.message)
            self.link.send(probed)
        elif isinstance(message, link_messages.Welcome):
            self.regions.clear()
            self._tell_page()
            if self.channels is not None:
                self.channels.introduce_lanes()
            if self.resources is not None:
                self.resources.welcomed()
        elif isinstance(message, link_messages.LaneOffered):
            self._on_lane(message, [])
        elif isinstance(message, link_messages.MoveLanes) and self.channels is not None:
            self.channels.move_lanes()
        elif isinstance(message, link_messages.ResourcesAcquired) and self.resources is not None:
            self.resources.acquired(message.ticket)

    def _on_fds(self, message: FromCoordinator, fds: list[int]) -> None:
        if isinstance(message, link_messages.LaneOffered):
            self._on_lane(message, fds)
        transport.close_all(fds)

    def _on_lane(self, message: link_messages.LaneOffered, fds: list[int]) -> None:
        if self.channels is not None and fds:
            self.channels.offer_lane(message, fds.pop())
        else:  # the coordinator has counted the lane
            self.link.send(link_messages.LanesOpen((message.uid,), ended=True))

    def _tell_page(self) -> None:
        """Send the page of counters to a coordinator that has just welcomed this executor."""
        spec = self.instance.spec
        page = CounterPage(SIZE, spec.name, spec.version, self.instance.name)
        fd = self.status.segment.reader_fd()
        try:
            self.link.send(page, [fd])
        finally:
            os.close(fd)

    def stats(self, what: str) -> dict[str, Any]:
        """Return numbers for the coordinator. Called on the link's thread, even while a model
        runs."""
        since = self.status.busy_since
        stats: dict[str, Any] = {
            "instance": self.instance.name,
            "busy_ms": (time.monotonic_ns() - since) // 1_000_000 if since else 0,
            "queued": self.loop.queued if self.loop is not None else 0,
            "executed": self.loop.executed if self.loop is not None else 0,
        }
        if what in ("segments", "slots"):
            stats[what] = self.memory.rows(what)
        elif what == "values":
            stats[what] = self.metrics.values.last_second()
        elif what == "monitor":
            stats[what] = [
                {"instance": self.instance.name, "name": name, **values}
                for name, values in self.metrics.values.snapshot().items()
            ]
        return stats


def main() -> int:
    """Parse the arguments and run the instance."""
    parser = argparse.ArgumentParser(prog="shmserve.executor")
    parser.add_argument("--process-id", required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    # Given by `environments` and `environment_start`, if the model has its own environment
    parser.add_argument("--pack-lock", type=int, default=-1)
    parser.add_argument("--fault")
    arguments = parser.parse_args()
    process, master_fd, settings = arguments.process_id, arguments.master_fd, config.load()
    status = run_instance(process, master_fd, settings, arguments.fault)
    environments.give_back(arguments.pack_lock, settings)
    return status


def run_instance(
    process: str, master_fd: int, settings: config.Settings, fault: str | None = None
) -> int:
    """Run the instance that standard input describes, until the end. Return the exit status.
    `process`: process id of the executor, as shmserve names processes. `master_fd`: pidfd of the
    gunicorn master. `settings`: settings of the server. `fault`: as in `environments.enter`."""
    instance: link_messages.Instance = _decode(sys.stdin.buffer.read())
    environments.set_title(f"shmserve: executor {instance.name}")
    words = ["--process-id", process, "--master-fd", str(master_fd)]
    refusal = environments.enter(instance, settings, words, master_fd, fault)
    with open(os.devnull, "rb") as nothing:  # the model's standard input is empty
        os.dup2(nothing.fileno(), 0)
    sys.argv = [""]  # a model that parses arguments must not see the server's options
    sys.dont_write_bytecode = True  # repositories are read-only for the server
    # Spinning OpenMP threads (torch's) keep cores from other processes of the server: a small
    # TorchScript model is 20 times slower. libgomp reads the variable when libgomp is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    raise_oom_score(_OOM_SCORE_ADJ)
    logs.setup(f"executor {instance.name}", settings.log_level, settings.log_format)
    model_output.limit(_LOG_LINES_PER_S)
    flight_recorder.start(config.run_dir(settings), process)
    environments.note(log, instance, fault, refusal)
    executor = Executor(instance, process, settings, refusal)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the master, which drains
    signal.signal(signal.SIGTERM, lambda *_: executor.stop("SIGTERM"))
    follow(master_fd, lambda: executor.stop("the gunicorn master is gone"))
    status = executor.run()
    log_output.end()
    return status


if __name__ == "__main__":
    # Threads of a model's libraries must not keep a finished executor from ending.
    os._exit(main())
