"""What the supervisor is told: which executors run already, and which should run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from shmserve import ids
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import InstanceRecord, VersionRecord
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Adopt, Desired, Instance
from shmserve.tensor.spec import ModelSpec

SETTLE_S = 0.5  # after a restart: executors that still load have so long to say hello
_PART_BYTES = 96 * 1024
_MOST_HURRIED = 200  # in one message; the others are told with the next

Send = Callable[..., None]  # (process, message, fds)


class SupervisorSync:
    """The supervisor's link. `instances`: of every revision, by name."""

    def __init__(self, reconciler: Reconciler, send: Send) -> None:
        self._reconciler = reconciler
        self._send = send
        self.instances: dict[str, Instance] = {}
        self.supervisor = ""  # its link
        self._adopted = False  # whether it has been told what runs already
        self._due = False  # whether it must be told what should run
        self._hold_until = 0.0

    def version(self, spec: ModelSpec, instances: Sequence[Instance], number: int) -> VersionRecord:
        """A version's record in revision `number`; its instances can be ordered from now on."""
        records = []
        for instance in instances:
            name = ids.reborn(instance.name, number)
            self.instances[name] = msgspec.structs.replace(instance, name=name)
            records.append(InstanceRecord(name, device=instance.device))
        return VersionRecord(spec, records)

    def forget(self, instances: Iterable[str]) -> None:
        for name in instances:
            self.instances.pop(name, None)

    @property
    def waiting(self) -> bool:
        return self._due and bool(self.supervisor)

    def hold(self, now: float) -> None:
        """The coordinator was restarted: executors may not have said hello yet."""
        self._hold_until = now + SETTLE_S

    def joined(self, supervisor: str) -> None:
        self.supervisor, self._adopted = supervisor, False

    def gone(self, process: str) -> None:
        if process == self.supervisor:
            self.supervisor = ""

    def changed(self) -> None:
        """What should run is different now."""
        self._due = True

    def tell(self) -> None:
        """What runs already (once), and what should run, if it has not been told.

        Not while executors published before a restart may still say hello: they would
        be started a second time.
        """
        if self._reconciler.draining:
            self._due = False
        if not self.waiting or self._reconciler.awaiting or time.monotonic() < self._hold_until:
            return
        self._due = False
        if not self._adopted:
            self._adopted = True
            self._send(self.supervisor, Adopt(tuple(self._reconciler.running())))
        desired = [self.instances[name] for name in self._reconciler.desired()]
        for part in _parts(desired, tuple(self._reconciler.hurried()[:_MOST_HURRIED])):
            self._send(self.supervisor, part)


def _parts(instances: list[Instance], hurry: tuple[str, ...]) -> Iterator[Desired]:
    part: list[Instance] = []
    size = 0
    for instance in instances:
        nbytes = len(messages.encode(instance))
        if part and size + nbytes > _PART_BYTES:
            yield Desired(tuple(part), more=True)
            part, size = [], 0
        part.append(instance)
        size += nbytes
    if hurry and part:
        yield Desired(tuple(part), more=True)
        part = []
    yield Desired(tuple(part), hurry=hurry)
