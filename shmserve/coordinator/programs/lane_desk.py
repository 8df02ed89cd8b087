"""Gives local programs their lanes: one end to the program, the other to an executor.

Which executor is decided here, by how many lanes each has; what happens on a lane is the
executor's business alone, and goes on without a coordinator. Executors tell when lanes end.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable

from msgspec import Struct, field

from shmserve.config import Settings
from shmserve.coordinator.state.publication import Publication
from shmserve.core.caller import Caller
from shmserve.core.control.lane_rules import check_model, most_of_one
from shmserve.core.registry import LiveInstance, ModelEntry, Snapshot, require_ready
from shmserve.errors import ResourceExhausted, ShmserveError, Unavailable
from shmserve.protocol.control.client_messages import LaneOpened, OpenLane
from shmserve.protocol.control.link_messages import LaneOffered, LanesOpen, MoveLanes

Send = Callable[..., None]  # (process, message, fds)


class _Lanes(Struct):
    """Those of one executor, and the models and versions that were asked for: none is known of
    lanes from before this coordinator."""

    owners: Counter[int] = field(default_factory=Counter)
    asked: set[tuple[str, str]] = field(default_factory=set)

    def told(self, message: LanesOpen) -> None:
        """The executor says which lanes it has, or which have ended."""
        told = Counter(message.uids)
        self.owners = self.owners - told if message.ended else told  # which leaves no zeros


class LaneDesk:
    """`send` never blocks and never fails."""

    def __init__(self, settings: Settings, publication: Publication, send: Send) -> None:
        self._settings = settings
        self._publication = publication
        self._send = send
        self._lanes: dict[str, _Lanes] = {}  # by process
        self._seen: Snapshot | None = None

    def open(self, caller: Caller, message: OpenLane) -> tuple[LaneOpened, socket.socket]:
        """A lane for a caller: the reply, and the end that rides along, which is then closed.

        Raises:
            NotFound, Unavailable: there is no such model, or it does not run now.
            PermissionDenied, Unimplemented: this one has no lanes.
            ResourceExhausted: there are enough of them.
        """
        snapshot = self._publication.latest
        if snapshot is None:
            raise Unavailable("the server is starting")
        if snapshot.draining:  # an executor that ends might not take it any more
            raise Unavailable("the server is draining")
        entry = require_ready(snapshot.model(message.model, message.version), message.version)
        check_model(entry, self._settings)
        instance = self._choose(entry, caller.uid)
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            raise ResourceExhausted("the server has no descriptors left for a lane") from None
        with ours:
            offer = LaneOffered(caller.uid, caller.pid, caller.started)
            self._send(instance.process, offer, (ours.fileno(),))
        lanes = self._lanes.setdefault(instance.process, _Lanes())
        lanes.owners[caller.uid] += 1
        lanes.asked.add((message.model, message.version))
        spec, timeout_ns = entry.spec, int(self._settings.request_timeout_s * 1e9)
        return LaneOpened(spec.version, instance.name, spec.rerun, timeout_ns), theirs

    def told(self, process: str, message: LanesOpen) -> None:
        """An executor says which lanes it has, or which have ended."""
        lanes = self._lanes.setdefault(process, _Lanes())
        lanes.told(message)
        if not lanes.owners:
            del self._lanes[process]

    def has(self, process: str) -> bool:
        """Whether an executor has lanes: what is asked over them nobody else sees."""
        return process in self._lanes

    def gone(self, process: str) -> None:
        self._lanes.pop(process, None)

    def settle(self) -> None:
        """What was published may send lanes elsewhere: a newer version, for instance."""
        snapshot = self._publication.latest
        if snapshot is None or snapshot is self._seen:
            return
        self._seen = snapshot
        for process, lanes in self._lanes.items():
            asked = lanes.asked or _served(snapshot, process)
            if not all(self._still(snapshot, process, *each) for each in asked):
                lanes.asked.clear()
                self._send(process, MoveLanes())

    def _still(self, snapshot: Snapshot, process: str, model: str, version: str) -> bool:
        """Whether who asks for this model may still be sent to this executor."""
        try:
            entry = require_ready(snapshot.model(model, version), version)
            check_model(entry, self._settings)
        except ShmserveError:
            return False
        return any(instance.process == process for instance in entry.instances)

    def _choose(self, entry: ModelEntry, uid: int) -> LiveInstance:
        """The instance with the fewest lanes."""
        if not entry.instances:
            raise Unavailable(f"model '{entry.spec.name}' has no executor right now")
        chosen = min(entry.instances, key=lambda instance: self._owners(instance).total())
        owners, most = self._owners(chosen), most_of_one(self._settings)
        if owners.total() >= self._settings.max_lanes or owners[uid] >= most:
            raise ResourceExhausted(
                f"model '{entry.spec.name}' has {owners.total()} lanes to each instance,"
                f" {owners[uid]} of them this user's (settings max_lanes, max_caller_share)"
            )
        return chosen

    def _owners(self, instance: LiveInstance) -> Counter[int]:
        lanes = self._lanes.get(instance.process)
        return lanes.owners if lanes is not None else Counter()


def _served(snapshot: Snapshot, process: str) -> set[tuple[str, str]]:
    """What somebody may have asked for who was sent to this executor."""
    return {
        (entry.spec.name, "")
        for versions in snapshot.models.values()
        for entry in versions.values()
        if any(instance.process == process for instance in entry.instances)
    }
