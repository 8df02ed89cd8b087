"""A data plane in one process: real sockets and shared memory, an executor in a thread.

The coordinator is a stand-in that grants what it is asked for (up to `budget`).
"""

from __future__ import annotations

import itertools
import select
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shmserve import config
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.core.stats import request_counters
from shmserve.core.stats.request_counters import RequestCounts
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.errors import Unavailable
from shmserve.executor.backend import Backend, BatchForm, Context, Request, Response
from shmserve.executor.devices import Devices
from shmserve.executor.loop.loop_assembly import LoopLimits, make_loop
from shmserve.executor.peers.channels import Channels
from shmserve.executor.peers.lane_counting import LaneCounting
from shmserve.executor.peers.lane_gate import LaneGate
from shmserve.executor.peers.lane_peers import LanePeers
from shmserve.executor.tensors.mapped_regions import ClientRegions
from shmserve.executor.tensors.workspace import Workspace
from shmserve.executor.wrappers.sequence_backend import SequenceBackend
from shmserve.protocol.control import messages
from shmserve.protocol.control.data_messages import ExecutorHello
from shmserve.protocol.control.link_messages import GiveBack, Grant, Granted, Hello, Welcome
from shmserve.shm.arena import ArenaMemory
from shmserve.shm.mappings import Mappings
from shmserve.shm.registry_page import RegistryWriter
from shmserve.shm.status_page import StatusPage
from shmserve.tensor.config_document import SequenceEntry
from shmserve.tensor.spec import ModelSpec, TensorSpec
from shmserve.transport import channel as channels
from shmserve.transport.channel import close_all
from shmserve.transport.pending_requests import Make
from tests.running_server import wait_until

# None: a decoupled model sends its answers separately
Model = Callable[[Request], Response | None]

SPEC = ModelSpec(
    name="m",
    version="1",
    platform="python",
    backend="python",
    max_batch_size=0,
    inputs=(TensorSpec("IN", "FP32", (-1,)),),
    outputs=(TensorSpec("OUT", "FP32", (-1,)),),
)


class Coordinator:
    """Grants budget, says welcome; nothing else."""

    def __init__(self, run_dir: Path, budget: int) -> None:
        self.budget = budget
        self.hellos: list[Hello] = []
        self._listener = channels.listen(str(run_dir / "coordinator.sock"))
        self._stop_r, self._stop_w = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        clients: dict[int, channels.Channel] = {}
        while True:
            waits: list[Any] = [self._listener, self._stop_r, *clients]
            ready, _, _ = select.select(waits, [], [])
            for fd in ready:
                if fd is self._stop_r:
                    for client in clients.values():
                        client.close()
                    return
                if fd is self._listener:
                    accepted = channels.accept(self._listener)
                    clients[accepted.fileno()] = accepted
                else:
                    try:
                        self._serve(clients[fd])
                    except Exception:
                        clients.pop(fd).close()

    def _serve(self, client: channels.Channel) -> None:
        data, fds = client.receive()
        close_all(fds)
        message = messages.decode_to_coordinator(data)
        if isinstance(message, Hello):
            self.hellos.append(message)
            client.send(messages.encode(Welcome(messages.VERSION, "cafe0123")))
        elif isinstance(message, Grant):
            granted = message.nbytes <= self.budget
            self.budget -= message.nbytes if granted else 0
            client.send(messages.encode(Granted(message.ticket, granted)))
        elif isinstance(message, GiveBack):
            self.budget += message.nbytes

    def close(self) -> None:
        self._stop_w.send(b"x")
        self._thread.join()
        for sock in (self._listener, self._stop_r, self._stop_w):
            sock.close()


class FunctionBackend:
    """A backend made of one function."""

    chooses_device = False
    device = "cpu"
    reads_on_device = False
    batching = BatchForm.LISTED

    def __init__(self, model: Model) -> None:
        self.model = model

    def load(self, context: Context) -> ModelSpec:
        return context.spec

    def execute(self, requests: Sequence[Request]) -> list[Response]:
        return [answer for r in requests if (answer := self.model(r)) is not None]

    def close(self) -> None:
        pass


class Unlimited:
    pool_bytes = 0

    def grant(self, nbytes: int, timeout_s: float) -> bool:
        return True

    def give_back(self, nbytes: int) -> None:
        pass


class NoCoordinator:
    def ask(self, make: Make, timeout_s: float) -> tuple[messages.FromCoordinator, list[int]]:
        raise Unavailable("no coordinator")

    def send(self, message: messages.ToCoordinator) -> None:
        pass


def no_lanes(memory: ArenaMemory, spec: ModelSpec = SPEC) -> LanePeers:
    """Return the lane peers of an executor without lanes."""

    def nothing_published() -> Snapshot:
        raise Unavailable("nothing is published")

    gate = LaneGate(spec, config.Settings(), nothing_published, 0)
    counting = LaneCounting(spec, "cafe0123", lambda *_: None)
    return LanePeers(gate, memory, counting, config.Settings(), lambda _: None)


class ThreadExecutor:
    """An executor's loop in a thread."""

    def __init__(
        self,
        run_dir: Path,
        name: str,
        model: Model,
        spec: ModelSpec,
        limits: LoopLimits = LoopLimits(60.0, 256, 4),  # noqa: B008 (it never changes)
    ) -> None:
        self.instance = LiveInstance(f"{spec.name}/1/0", name, f"{name}.sock", 1)
        self.memory = ArenaMemory(Unlimited(), lambda: "cafe0123", lambda: 1 << 20)
        self.status = StatusPage("cafe0123")
        self.listener = channels.listen(str(run_dir / f"{name}.sock"))
        regions = ClientRegions(NoCoordinator(), Devices(None, Mappings()))
        self.lanes = no_lanes(self.memory, spec)
        self.channels = Channels(
            self.listener,
            ExecutorHello(messages.VERSION, name, self.instance.name),
            self.memory,
            self.status,
            regions.devices.mappings,
            self.lanes,
        )
        backend: Backend = model if isinstance(model, FunctionBackend) else FunctionBackend(model)
        if isinstance(spec.config.sequence_batching, SequenceEntry):
            context = Context(spec, str(run_dir), self.instance.name, "cpu")
            backend = SequenceBackend(backend, spec, spec.config.sequence_batching, context)
        workspace = Workspace(spec, self.memory, regions)
        self.loop = make_loop(backend, self.channels, workspace, limits)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.loop.stop()
        self.thread.join(30)
        self.channels.close()
        self.listener.close()
        self.status.close()
        self.memory.close()


def feed(call: Any, array: np.ndarray[Any, Any], name: str = "IN") -> None:
    """Give a call an FP32 input."""
    slot = call.reserve(array.nbytes)
    slot.view[:] = array.data.cast("B") if array.nbytes else b""
    call.add_input(name, "FP32", array.shape, slot)


class Rig:
    """Dispatcher, stand-in coordinator and executors in one place."""

    def __init__(self, run_dir: Path, budget: int = 1 << 30, **settings: object) -> None:
        self.run_dir = run_dir
        self.coordinator = Coordinator(run_dir, budget)
        self.executors: list[ThreadExecutor] = []
        self.models: dict[str, dict[str, ModelEntry]] = {}
        self._names = (f"x{number}" for number in itertools.count())
        self.writer = RegistryWriter(str(run_dir), "cafe0123")
        self.settings = msgspec.convert(
            {"run_dir": str(run_dir), "arena_bytes": 1 << 20, **settings}, config.Settings
        )
        self.dispatcher = Dispatcher(self.settings)
        self.dispatcher.start()

    def serve(self, *models: Model, spec: ModelSpec = SPEC) -> ModelEntry:
        """Start an executor for each model function; publish the executors as instances of one
        model, beside models of other names."""
        settings = self.settings
        limits = LoopLimits(60.0, settings.max_streams, 4, settings.max_caller_share)
        started = [
            ThreadExecutor(self.run_dir, next(self._names), model, spec, limits) for model in models
        ]
        self.executors += started
        entry = ModelEntry(spec, ModelState.READY, tuple(e.instance for e in started))
        self.models[spec.name] = {spec.version: entry}
        self.writer.publish(Snapshot("cafe0123", 0, models=self.models, complete=True))
        return entry

    def counts(self) -> dict[tuple[str, str], RequestCounts]:
        """Return the frontend's counts of requests, by model and version."""
        rows = request_counters.read(self.dispatcher.counting.page.words)
        assert rows is not None
        return rows

    def cut_off(self, executor: int = 0) -> None:
        """End the connections of an executor, as its death does."""
        for connection in list(self.executors[executor].channels._connections.values()):
            connection.channel._socket.shutdown(2)

    def assert_nothing_held(self) -> None:
        memory = self.dispatcher.memory
        wait_until(lambda: memory.stats().slots == memory.stats().free, "input slots are held")
        wait_until(lambda: not memory.forwarded, "outputs are still passed on")
        self.dispatcher.executors.flush()
        for executor in self.executors:
            wait_until(lambda e=executor: not e.memory.rows("slots"), "output slots are held")  # type: ignore[misc]

    def close(self) -> None:
        self.dispatcher.close()
        for executor in self.executors:
            executor.close()
        self.coordinator.close()
        self.writer.close()
