"""How CUDA regions are registered: an executor looks at the handle first.

The coordinator makes no CUDA call, so it asks an executor on a GPU whether the handle can be
opened and how large the allocation behind it is. The registration waits here meanwhile. Where
nobody can tell in time it is entered unproved: executors check a region when they first use it.

CUDA regions share namespace, quotas and the watch on their owners with system regions, and live
alike but for four things:

- No descriptor: the handle is in the snapshot, whose file only the server's user can read, so a
  restarted coordinator has all it needs. `RegionGiven` tells it to executors. No `repr`, log, table
  or error shows a handle, since whoever has it can open the memory.
- Owner: the process is looked for on TCP, too (`transport.trust.peer_credentials`). An executor
  keeps exported memory on the GPU, so the owner's death must not go unnoticed.
- Registering is checked in this order: remote callers; name; handle, device and size as numbers;
  how many devices there are (`observe.gpus`, without CUDA); name taken; quotas. Then an executor on
  a GPU, best on that one, opens the handle on its link's thread, tells the allocation's size, and
  closes what it opened. A registration waits 2 s at most, and 256 of them in all.
- Choice of an instance: those on the device with most of the request's bytes in CUDA regions come
  first (`dispatch.pool.load_balancer`).

An executor's death is not blamed on a CUDA region. A request that named one is still not run again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from msgspec import Struct

from shmserve.core.caller import Caller
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.regions.cuda_allocation import check_allocation, cuda_region, refusal
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.registry import Region
from shmserve.errors import Code, InvalidArgument, ResourceExhausted, ShmserveError
from shmserve.log_fields import log_fields
from shmserve.protocol.control.region_messages import (
    ProbeRegion,
    RegionAnswer,
    RegionProbed,
    RegisterCudaRegion,
)

_log = logging.getLogger(__name__)

_PROBE_S = 2.0
_MOST_PARKED = 256


class _ParkedRegistration(Struct, frozen=True):
    """A registration that waits for `executor`; `process` and `ticket`: of who asked for it."""

    process: str
    ticket: int
    region: Region
    again: bool
    executor: str
    deadline: float


class CudaRegions(Struct):
    """Checks registrations, has executors look at them, and enters them.

    Args:
        devices: tells how many GPUs the server sees; asked until there are any, since a sick
            driver may keep it waiting.
        entered: is told of each region that the book has now; raises if it cannot stay.
        answer: answers a frontend, once the change is published.
    """

    _book: RegionBook
    _reconciler: Reconciler
    _devices: Callable[[], int]
    _send: Callable[[str, ProbeRegion, tuple[int, ...]], None]
    _entered: Callable[[Region], None]
    _answer: Callable[[str, RegionAnswer], None]
    parked: dict[int, _ParkedRegistration] = {}  # with any `tick` should come soon
    _count: int = 0
    _next: int = 1

    def register(self, process: str, message: RegisterCudaRegion, now: float) -> None:
        """Check what can be checked here, and have an executor look at the handle."""
        asked = (process, message.ticket)
        if any((parked.process, parked.ticket) == asked for parked in self.parked.values()):
            return  # asked again over a new link; the answer is on its way
        try:
            region = self._book.admit(self._drafted(message), message.again)
            executor = "" if region.number else self._prober(region.device_id)
            if executor and len(self.parked) >= _MOST_PARKED:
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
        self._send(executor, ProbeRegion(number, region), ())

    def probed(self, process: str, message: RegionProbed) -> None:
        """What an executor has found behind a handle."""
        parked = self.parked.get(message.ticket)
        if parked is None or parked.executor != process:
            return  # late
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
        """An executor has ended: it will tell nothing."""
        self._give_up(lambda parked: parked.executor == process, "the executor has ended")

    def tick(self, now: float) -> None:
        self._give_up(lambda parked: now >= parked.deadline, "the executor did not answer in time")

    def _drafted(self, message: RegisterCudaRegion) -> Region:
        caller = Caller(message.uid, message.pid, message.started)
        self._book.may_register(caller)
        self._count = self._count or self._devices()
        return cuda_region(
            caller, message.name, message.handle, message.device_id, message.byte_size, self._count
        )

    def _prober(self, device_id: int) -> str:
        """An executor that computes on a GPU, best on this one; empty: there is none."""
        instances = self._reconciler.instances.values()
        linked = self._reconciler.processes
        candidates = [i for i in instances if i.device != "cpu" and i.live and i.process in linked]
        best = min(candidates, key=lambda i: i.device != f"cuda:{device_id}", default=None)
        return best.process if best is not None else ""

    def _give_up(self, over: Callable[[_ParkedRegistration], bool], why: str) -> None:
        for number, parked in list(self.parked.items()):
            if over(parked):
                del self.parked[number]
                self._unproved(parked, why)

    def _unproved(self, parked: _ParkedRegistration, why: str) -> None:
        region = parked.region
        about = log_fields(name=region.name, uid=region.uid, reason=why)
        _log.info("CUDA region unproved", extra=about)
        self._enter(parked)

    def _enter(self, parked: _ParkedRegistration) -> None:
        try:
            self._entered(self._book.enter(parked.region, parked.again))
        except ShmserveError as ex:
            self._refuse(parked.process, parked.ticket, ex)
            return
        self._answer(parked.process, RegionAnswer(parked.ticket))

    def _refuse(self, process: str, ticket: int, error: ShmserveError) -> None:
        self._answer(process, RegionAnswer(ticket, error.code, error.message))
