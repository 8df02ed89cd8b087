"""Lane desk: gives each lane's ends to a local program and to an executor, and describes models.

The desk chooses the executor with the fewest lanes. Requests on a lane concern only the executor
and the program, and continue without a coordinator. Executors report when lanes end.
"""

import socket
from collections import Counter
from collections.abc import Callable

from msgspec import Struct, field

from shmserve.config import Settings
from shmserve.coordinator.state.publication import Publication
from shmserve.core.caller import Caller
from shmserve.core.control.lane_rules import check_model, most_of_one
from shmserve.core.registry import LiveInstance, ModelEntry, Snapshot, require_ready
from shmserve.errors import ResourceExhausted, ShmserveError, TooLarge, Unavailable
from shmserve.protocol.control.client_messages import (
    DescribedTensor,
    DescribeModel,
    LaneOpened,
    ModelDescribed,
    OpenLane,
    encode,
)
from shmserve.protocol.control.link_messages import LaneOffered, LanesOpen, MoveLanes
from shmserve.transport.stranger_channel import pass_descriptors

_LONGEST = 64 * 1024  # bytes of a description
Send = Callable[..., None]  # arguments: process, message, descriptors


class _Lanes(Struct):
    """Lanes of one executor by user id (`owners`), and the models and versions that programs asked
    for (`asked`). Nothing was noted about lanes opened before this coordinator started."""

    owners: Counter[int] = field(default_factory=Counter)
    asked: set[tuple[str, str]] = field(default_factory=set)

    def told(self, message: LanesOpen) -> None:
        """Take in an executor's report of its lanes, or of ended lanes."""
        reported = Counter(message.uids)
        # Counter subtraction leaves no zeros
        self.owners = self.owners - reported if message.ended else reported


class LaneDesk:
    """Lanes of all executors. `send` never blocks and never fails."""

    def __init__(self, settings: Settings, publication: Publication, send: Send) -> None:
        self._settings = settings
        self._publication = publication
        self._send = send
        self._lanes: dict[str, _Lanes] = {}  # by process
        self._seen: Snapshot | None = None

    def open(self, caller: Caller, message: OpenLane) -> tuple[LaneOpened, socket.socket]:
        """Open a lane for a caller. Return the reply and the program's end, which the caller of
        this method sends and closes.

        Raises:
            NotFound, Unavailable: the model does not exist, or does not run now.
            PermissionDenied, Unimplemented: the model has no lanes.
            ResourceExhausted: the limit on lanes or on descriptors is reached.
        """
        snapshot, entry = self._find(message)
        if snapshot.draining:  # an ending executor might no longer take the lane
            raise Unavailable("the server is draining")
        check_model(entry, self._settings)
        instance = self._choose(entry, caller.uid)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            raise ResourceExhausted("the server has no descriptors left for a lane") from None
        with ours:
            pass_descriptors(ours, False)
            offer = LaneOffered(caller.uid, caller.pid, caller.started)
            self._send(instance.process, offer, (ours.fileno(),))
        lanes = self._lanes.setdefault(instance.process, _Lanes())
        lanes.owners[caller.uid] += 1
        lanes.asked.add((message.model, message.version))
        spec, timeout_ns = entry.spec, int(self._settings.request_timeout_s * 1e9)
        return LaneOpened(spec.version, instance.name, spec.rerun, timeout_ns), theirs

    def describe(self, message: DescribeModel) -> ModelDescribed:
        """Return the inputs and outputs of a model.

        Raises:
            NotFound, Unavailable: the model does not exist, or is not ready.
            TooLarge: the description does not fit into a message.
        """
        _, entry = self._find(message)
        inputs, outputs = (
            tuple(DescribedTensor(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors)
            for tensors in (entry.spec.inputs, entry.spec.outputs)
        )
        described = ModelDescribed(entry.spec.version, inputs, outputs, entry.spec.decoupled)
        if len(encode(described)) > _LONGEST:
            name, count = entry.spec.name, len(inputs) + len(outputs)
            raise TooLarge(f"the {count} tensors of model '{name}' do not fit into a message")
        return described

    def told(self, process: str, message: LanesOpen) -> None:
        """Take in an executor's report of its lanes, or of ended lanes."""
        lanes = self._lanes.setdefault(process, _Lanes())
        lanes.told(message)
        if not lanes.owners:
            del self._lanes[process]

    def has(self, process: str) -> bool:
        """Return True if an executor has lanes, whose requests no other process sees."""
        return process in self._lanes

    def gone(self, process: str) -> None:
        self._lanes.pop(process, None)

    def settle(self) -> None:
        """After a publication, have executors move lanes whose model is now served elsewhere, for
        instance by a newer version."""
        snapshot = self._publication.latest
        if snapshot is None or snapshot is self._seen:
            return
        self._seen = snapshot
        for process, lanes in self._lanes.items():
            asked = lanes.asked or _served(snapshot, process)
            if not all(self._still(snapshot, process, *each) for each in asked):
                lanes.asked.clear()
                self._send(process, MoveLanes())

    def _find(self, message: OpenLane | DescribeModel) -> tuple[Snapshot, ModelEntry]:
        """Return the latest snapshot and its entry of the model. Raises NotFound, Unavailable."""
        snapshot = self._publication.latest
        if snapshot is None:
            raise Unavailable("the server is starting")
        entry = snapshot.model(message.model, message.version)
        return snapshot, require_ready(entry, message.version)

    def _still(self, snapshot: Snapshot, process: str, model: str, version: str) -> bool:
        """Return True if requests for the model may still go to this executor."""
        try:
            entry = require_ready(snapshot.model(model, version), version)
            check_model(entry, self._settings)
        except ShmserveError:
            return False
        return any(instance.process == process for instance in entry.instances)

    def _choose(self, entry: ModelEntry, uid: int) -> LiveInstance:
        """Return the instance with the fewest lanes."""
        if not entry.instances:
            raise Unavailable(f"model '{entry.spec.name}' has no executor right now")
        chosen = min(entry.instances, key=lambda instance: self._owners(instance).total())
        owners, share = self._owners(chosen), most_of_one(self._settings)
        if owners.total() >= self._settings.max_lanes or owners[uid] >= share:
            raise ResourceExhausted(
                f"model '{entry.spec.name}' has {owners.total()} lanes to each instance,"
                f" {owners[uid]} of them this user's (settings max_lanes, max_caller_share)"
            )
        return chosen

    def _owners(self, instance: LiveInstance) -> Counter[int]:
        lanes = self._lanes.get(instance.process)
        return lanes.owners if lanes is not None else Counter()


def _served(snapshot: Snapshot, process: str) -> set[tuple[str, str]]:
    """Return the models served by this executor, each with version "": programs with lanes to the
    executor may have asked for any of the models."""
    return {
        (entry.spec.name, "")
        for versions in snapshot.models.values()
        for entry in versions.values()
        if any(instance.process == process for instance in entry.instances)
    }
