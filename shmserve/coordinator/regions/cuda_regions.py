"""Registration of CUDA regions: an executor checks the handle before a region is entered.

The coordinator makes no CUDA call. It asks an executor on a GPU whether the handle can be opened,
and how large the allocation is. The registration is parked here meanwhile. If no executor answers
in time, the region is entered unproved: executors check a region when they first use it.

CUDA regions share namespace, quotas and the watch on owners with system regions. They differ in
four points:

- No descriptor. The handle is in the snapshot, whose file only the server's user can read, so a
  restarted coordinator needs nothing else. `RegionGiven` carries the handle to executors. No
  `repr`, log, table or error shows a handle, because a handle is enough to open the memory.
- Owner. The owning process is identified over TCP, too (`transport.trust.peer_credentials`). An
  executor keeps exported memory on the GPU, so the owner's death must not go unnoticed.
- Registering. The order of checks is: remote callers; name; handle, device and size as numbers;
  number of devices (`observe.gpus`, without CUDA); name taken; quotas. Then an executor on a GPU,
  if possible on the region's device, opens the handle in its link's thread, reports the
  allocation's size, and closes the handle. A registration waits at most 2 s; at most 256
  registrations wait.
- Choice of an instance. Instances on the device with most of the request's bytes in CUDA regions
  come first (`dispatch.pool.load_balancer`).

An executor's death is not blamed on a CUDA region. A request that used a CUDA region is still not
run again.
"""

import logging
from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from shmserve.core.caller import Caller
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.regions.region_names import check_allocation, cuda_region, refusal
from shmserve.core.registry import Region
from shmserve.errors import Code, InvalidArgument, ResourceExhausted, ShmserveError
from shmserve.log_fields import log_fields
from shmserve.protocol.control import region_messages as wire

_log = logging.getLogger(__name__)

_PROBE_S = 2.0
_MAX_PARKED = 256
_PATIENCE_S = 1.0  # for executors to close unregistered memory

Opened = set[tuple[int, str]]  # pairs of region number and executor


class _ParkedRegistration(Struct, frozen=True):
    """A registration that waits for `executor`. `process`, `ticket`: frontend to answer, and its
    ticket."""

    process: str
    ticket: int
    region: Region
    again: bool
    executor: str
    deadline: float


class CudaRegions(Struct):
    """Checks registrations, has executors check handles, and enters regions.

    Args:
        devices: returns the number of GPUs visible to the server. Called until the number is not 0
            and never again, because a broken driver may make the call slow.
        entered: called with each region entered in the book; raises if the region cannot stay.
        answer: answers a frontend once the change is published.
    """

    _book: RegionBook
    _reconciler: Reconciler
    _devices: Callable[[], int]
    _send: Callable[[str, wire.ProbeRegion, tuple[int, ...]], None]
    _entered: Callable[[Region], None]
    _answer: Callable[[str, wire.RegionAnswer], None]
    parked: dict[int, _ParkedRegistration] = {}  # while not empty, call `tick` soon
    _count: int = 0
    _next: int = 1

    def register(self, process: str, message: wire.RegisterCudaRegion, now: float) -> None:
        """Check everything that needs no CUDA, then have an executor check the handle."""
        asked = (process, message.ticket)
        if any((parked.process, parked.ticket) == asked for parked in self.parked.values()):
            return  # asked again over a new link; the first answer will follow
        try:
            region = self._book.admit(self._drafted(message), message.again)
            executor = "" if region.number else self._prober(region.device_id)
            if executor and len(self.parked) >= _MAX_PARKED:
                raise ResourceExhausted("too many CUDA regions are being registered at once")
        except ShmserveError as ex:
            self._refuse(*asked, ex)
            return
        parked = _ParkedRegistration(*asked, region, message.again, executor, now + _PROBE_S)
        if not executor:
            self._enter(parked)
            return
        number, self._next = self._next, self._next + 1
        self.parked[number] = parked
        self._send(executor, wire.ProbeRegion(number, region), ())

    def probed(self, process: str, message: wire.RegionProbed) -> None:
        """Take in an executor's report about a handle."""
        parked = self.parked.get(message.ticket)
        if parked is None or parked.executor != process:
            return  # too late
        del self.parked[message.ticket]
        region = parked.region
        if message.error_code == Code.INVALID_ARGUMENT:
            self._refuse(parked.process, parked.ticket, refusal(region.name, message.error))
        elif message.error_code:
            self._unproved(parked, message.error)
        else:
            try:
                check_allocation(region, message.nbytes)
            except InvalidArgument as ex:
                self._refuse(parked.process, parked.ticket, ex)
                return
            self._enter(parked)

    def gone(self, process: str) -> None:
        """Stop waiting for an executor that has ended."""
        self._give_up(lambda parked: parked.executor == process, "the executor has ended")

    def tick(self, now: float) -> None:
        self._give_up(lambda parked: now >= parked.deadline, "the executor did not answer in time")

    def _drafted(self, message: wire.RegisterCudaRegion) -> Region:
        caller = Caller(message.uid, message.pid, message.started)
        self._book.may_register(caller)
        self._count = self._count or self._devices()
        return cuda_region(
            caller, message.name, message.handle, message.device_id, message.byte_size, self._count
        )

    def _prober(self, device_id: int) -> str:
        """Return an executor that computes on a GPU, if possible on `device_id`. Return "" if
        there is no such executor."""
        instances = self._reconciler.instances.values()
        linked = self._reconciler.processes
        candidates = [i for i in instances if i.device != "cpu" and i.live and i.process in linked]
        best = min(candidates, key=lambda i: i.device != f"cuda:{device_id}", default=None)
        return best.process if best is not None else ""

    def _give_up(self, over: Callable[[_ParkedRegistration], bool], reason: str) -> None:
        for number, parked in list(self.parked.items()):
            if over(parked):
                del self.parked[number]
                self._unproved(parked, reason)

    def _unproved(self, parked: _ParkedRegistration, reason: str) -> None:
        region = parked.region
        about = log_fields(name=region.name, uid=region.uid, reason=reason)
        _log.info("CUDA region unproved", extra=about)
        self._enter(parked)

    def _enter(self, parked: _ParkedRegistration) -> None:
        try:
            self._entered(self._book.enter(parked.region, parked.again))
        except ShmserveError as ex:
            self._refuse(parked.process, parked.ticket, ex)
            return
        self._answer(parked.process, wire.RegionAnswer(parked.ticket))

    def _refuse(self, process: str, ticket: int, error: ShmserveError) -> None:
        self._answer(process, wire.RegionAnswer(ticket, error.code, error.message))


class _PendingClose(Struct, eq=False):
    process: str
    answer: wire.RegionAnswer
    opened: Opened
    until: float


class CudaCloseBarrier:
    """Answers an unregistration once executors have closed the GPU memory.

    After the answer the owner may free the memory. Freeing memory still open in another process is
    undefined (CUDA Runtime API, cudaIpcCloseMemHandle). So the answer waits for all executors with
    the handle, but at most one second. An executor that still works on the memory, or whose model
    keeps a reference, delays the answer no longer.
    """

    def __init__(self, answer: Callable[[str, wire.RegionAnswer], None]) -> None:
        self._answer = answer
        self._given: dict[int, set[str]] = {}
        self.waiting: list[_PendingClose] = []  # while not empty, call `tick` soon

    def given(self, number: int, executor: str) -> None:
        """Note that an executor has been given a region's handle."""
        self._given.setdefault(number, set()).add(executor)

    def gone(self, numbers: Iterable[int]) -> Opened:
        """Forget unregistered regions. Return the executors that may still have the regions
        open."""
        return {(n, executor) for n in numbers for executor in self._given.pop(n, ())}

    def answer(self, process: str, answer: wire.RegionAnswer, opened: Opened, now: float) -> None:
        """Send the answer once all `opened` regions are closed."""
        if opened:
            self.waiting.append(_PendingClose(process, answer, opened, now + _PATIENCE_S))
        else:
            self._answer(process, answer)

    def closed(self, executor: str, numbers: Collection[int]) -> None:
        """Note that an executor has closed regions, or could not open the regions."""
        for number in numbers:
            self._given.get(number, set()).discard(executor)
        closed = {(number, executor) for number in numbers}
        self._over(closed.__contains__)

    def ended(self, executor: str) -> None:
        """Note that an executor has ended, which closes all of its regions."""
        for executors in self._given.values():
            executors.discard(executor)
        self._over(lambda handle: handle[1] == executor)

    def tick(self, now: float) -> None:
        """Send overdue answers without waiting any longer."""
        self._end([pending for pending in self.waiting if now >= pending.until])

    def _over(self, closed: Callable[[tuple[int, str]], bool]) -> None:
        for pending in self.waiting:
            pending.opened.difference_update([h for h in pending.opened if closed(h)])
        self._end([pending for pending in self.waiting if not pending.opened])

    def _end(self, over: list[_PendingClose]) -> None:
        self.waiting = [pending for pending in self.waiting if pending not in over]
        for pending in over:
            self._answer(pending.process, pending.answer)
