"""Supervisor sync: tells the supervisor which executors run already and which should run."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from shmserve import ids
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import InstanceRecord, VersionRecord
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Adopt, Desired, Instance
from shmserve.tensor.spec import ModelSpec

SETTLE_S = 0.5  # after a restart: time for loading executors to say hello
_PART_BYTES = 96 * 1024
_MOST_HURRIED = 200  # most in one message; the next message tells the others

Send = Callable[..., None]  # arguments: process, message, descriptors


class SupervisorSync:
    """Messages to the supervisor. `instances`: instances of every revision, by name."""

    def __init__(self, reconciler: Reconciler, send: Send) -> None:
        self._reconciler = reconciler
        self._send = send
        self.instances: dict[str, Instance] = {}
        self.supervisor = ""  # process id of the linked supervisor, or empty
        self._adopted = False  # true once the supervisor knows the running executors
        self._due = False  # true while the supervisor must be told what to run
        self._hold_until = 0.0

    def version(self, spec: ModelSpec, instances: Sequence[Instance], number: int) -> VersionRecord:
        """Return the record of a version in revision `number`, and make its instances known."""
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
        """Wait after a restart of the coordinator, because executors may not have said hello
        yet."""
        self._hold_until = now + SETTLE_S

    def joined(self, supervisor: str) -> None:
        self.supervisor, self._adopted = supervisor, False

    def gone(self, process: str) -> None:
        if process == self.supervisor:
            self.supervisor = ""

    def changed(self) -> None:
        """Note that the executors to run have changed."""
        self._due = True

    def tell(self) -> None:
        """Send the running executors (once per link), then the executors that should run, if
        changed.

        Nothing is sent while executors published before a restart may still say hello: the
        supervisor would start them a second time.
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
