"""Registrations of client memory: keeps registered regions, hands regions to executors, and
releases regions.

`core.regions.region_book.RegionBook` decides. Changes of one turn of the coordinator's loop are
published together and acknowledged afterwards (`settle`), so many registrations cost one
publication.

A descriptor lives as long as its region and a little longer (`Tombstones`), because a request
accepted before an unregistration may reach its executor afterwards. The supervisor keeps copies of
descriptors for the coordinator's successor. CUDA regions have no descriptor and are otherwise
handled alike. `system_regions` and `cuda_regions` describe how each kind is registered.
"""

import logging
import os
from collections.abc import Callable
from itertools import zip_longest

from shmserve.config import Settings
from shmserve.coordinator.regions.cuda_regions import CudaCloseBarrier, CudaRegions
from shmserve.coordinator.regions.owners import Owners
from shmserve.coordinator.regions.region_sharing import RegionSharing
from shmserve.coordinator.regions.system_regions import SystemRegions
from shmserve.coordinator.regions.tombstones import Tombstones
from shmserve.core.caller import Caller
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.regions.region_book import RegionBook
from shmserve.core.registry import Region, Snapshot
from shmserve.errors import Code, InvalidArgument
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.protocol.control import region_messages as wire
from shmserve.protocol.control.messages import FromCoordinator, ToCoordinator
from shmserve.shm import client_object
from shmserve.transport.channel import MAX_FDS, close_all

_log = logging.getLogger(__name__)

# Seconds after a restart. The supervisor hands back descriptors within the first limit; then
# regions with a key are opened again. Regions not found within the second limit are lost. Only a
# supervisor that hangs, or starves on a busy host, needs so long.
_PATIENCE_S, _LOST_S = 1.5, 30.0
_MAX_NUMBERS = 4096  # most numbers in one message
_APART = 1 << 30  # distance between the region numbers of two generations

Registration = wire.RegisterRegion | wire.RegisterCudaRegion
Send = Callable[[str, FromCoordinator, "tuple[int, ...]"], None]
OFF = (
    "Client shared memory is disabled. Set client_shm_mode to map or copy"
    " (SHMSERVE_CLIENT_SHM_MODE) to enable."
)


class RegionRegistrations:
    """All regions. `send` never blocks and never fails; `devices` returns the number of GPUs."""

    def __init__(
        self,
        settings: Settings,
        run_dir: str,
        reconciler: Reconciler,
        send: Send,
        owners: Owners,
        devices: Callable[[], int],
    ) -> None:
        self.book = RegionBook(settings, os.geteuid())
        self.system = SystemRegions(self.book, run_dir, self._keep, self._answer)
        self.closing = CudaCloseBarrier(self._answer)
        self.cuda = CudaRegions(self.book, reconciler, devices, send, self._entered, self._answer)
        self._settings = settings
        self._reconciler = reconciler
        self._send = send
        self._owners = owners
        self._fds: dict[int, int] = {}
        self._tombstones = Tombstones()
        self._answers: list[tuple[str, wire.RegionAnswer]] = []
        self._gone: list[int] = []
        self._remapped: list[int] = []
        self._unstored: list[int] = []
        self._parked: list[tuple[str, wire.NeedRegion]] = []
        self._reopen_at = self._awaited_until = 0.0  # monotonic times; 0: no descriptor is awaited
        self._restored = False  # true once earlier regions are known
        self.sharing = RegionSharing()
        self._changed = False

    # ------------------------------------------------------ another generation

    def take(self, message: wire.SharedRegions, fds: list[int], now: float) -> None:
        """Take in regions from another generation's coordinator. `fds`: descriptors of the regions
        that have a descriptor, in order."""
        remaining_fds = iter(fds)
        for region in message.regions:
            fd = next(remaining_fds, None) if region.memory.has_descriptor else None
            if region.number not in self.sharing.gone:
                self._adopt(region, fd, now)
            elif fd is not None:
                os.close(fd)
        close_all(list(remaining_fds))
        self._drop(list(message.gone), "its client unregistered it at the other generation", now)
        if self.sharing.first and message.next_number:  # numbers of both generations must differ
            self.book.skip_to(message.next_number + _APART)
        self.sharing.taken(message)

    def _adopt(self, region: Region, fd: int | None, now: float) -> None:
        """Enter a region registered in another generation or before a restart. Ignore the region
        if its number is taken, its descriptor is missing, or the descriptor is of another
        object."""
        there = self.book.get(region.number)
        missing = fd is None and region.memory.has_descriptor
        if there is not None or missing or (fd and not client_object.is_object_of(region, fd)):
            if fd is not None:
                os.close(fd)
            return
        replaced = self.book.adopt(region)
        if replaced is not None:
            self.forget([replaced], now)
        if fd is not None:
            self._fds[region.number] = fd
        self._unstored.append(region.number)
        self._changed = True
        self.sharing.theirs.add(region.number)
        if not self._owners.add(region):
            self._drop([region.number], "its process has ended", now)

    # ---------------------------------------------------------------- a restart

    def restore(self, previous: Snapshot, now: float) -> None:
        """Continue an earlier coordinator's regions. The supervisor hands back their
        descriptors."""
        self._restored = True
        self.book.restore(previous.regions, previous.next_region)
        regions = list(previous.regions.values())
        if any(r.memory.has_descriptor for r in regions):
            self._reopen_at, self._awaited_until = now + _PATIENCE_S, now + _LOST_S
        for region in regions:
            if not self._owners.add(region):
                self._drop([region.number], "its process has ended", now)

    def stored(self, message: wire.StoredRegions, fds: list[int], now: float) -> list[int]:
        """Take in descriptors kept by the supervisor, and regions of which it has kept none. Return
        region numbers that the supervisor can drop."""
        close_all(fds[len(message.numbers) :])
        useless = []
        known_regions = {} if self._restored else {r.number: r for r in message.regions}
        for number, fd in zip_longest(message.numbers, fds[: len(message.numbers)]):
            there, kept = self.book.get(number), known_regions.get(number)
            if there is None and kept is not None:
                fd = client_object.reopen(kept) if fd is None else fd
                if fd is not None:
                    self._adopt(kept, fd, now)
                    self.book.skip_to(number + 1)
            elif there is not None and number not in self._fds and fd is not None:
                if client_object.is_object_of(there, fd):
                    self._fds[number] = fd
                else:
                    os.close(fd)
            elif fd is not None:
                os.close(fd)
            if self.book.get(number) is None:
                useless.append(number)
        if not message.more:
            self._restored = True
            self._complete(now)
        return useless

    def store_all(self, supervisor: str) -> None:
        """Give a supervisor copies of all descriptors."""
        self._store(supervisor, list(self._fds))

    def _store(self, supervisor: str, numbers: list[int]) -> None:
        for start in range(0, len(numbers), MAX_FDS):
            part = tuple(numbers[start : start + MAX_FDS])
            regions = tuple(region for n in part if (region := self.book.get(n)) is not None)
            fds = tuple(self._fds[number] for number in part)
            self._send(supervisor, wire.StoreRegions(part, regions), fds)

    def _complete(self, now: float) -> None:
        """Drop regions that the supervisor did not hand back and that cannot be opened again by
        key."""
        self._awaited_until = 0.0
        for region in self._reopen():
            self._drop([region.number], "its object could not be found again", now)
        self._give_parked()

    def _reopen(self) -> list[Region]:
        """Open missing regions again by key. Return the regions for which opening failed."""
        self._reopen_at = 0.0
        lost = []
        for region in self.book.regions.values():
            if region.memory.has_descriptor and region.number not in self._fds:
                fd = client_object.reopen(region)
                if fd is None:
                    lost.append(region)
                else:
                    self._fds[region.number] = fd
        return lost

    def _give_parked(self) -> None:
        parked, self._parked = self._parked, []
        for process, message in parked:
            self._give(process, message)

    # ----------------------------------------------------------------- requests

    def handle(self, process: str, role: str, message: ToCoordinator, now: float) -> bool:
        """Handle a message about regions. Return False for any other message, or from a wrong
        role."""
        match message, role:
            case ((wire.RegisterRegion() | wire.RegisterCudaRegion()), ("http" | "grpc")):
                self._register(process, message, now)
            case wire.UnregisterRegions(), ("http" | "grpc"):
                self._unregister(process, message, now)
            case wire.NeedRegion(), "executor":
                self._give(process, message)
            case wire.RegionShrunk(), "executor":
                self._quarantine(message.number)
            case wire.RegionProbed(), "executor":
                self.cuda.probed(process, message)
            case wire.RegionsTaken(), "successor":
                self.sharing.confirmed(message)
            case wire.RegionsClosed(), "executor":
                self.closing.closed(process, message.numbers)
            case _:
                return False
        return True

    def _register(self, process: str, message: Registration, now: float) -> None:
        if self._settings.client_shm_mode == "off":
            self._answer(process, wire.RegionAnswer(message.ticket, Code.UNIMPLEMENTED, OFF))
        elif isinstance(message, wire.RegisterRegion):
            self.system.register(process, message)
        else:
            self.cuda.register(process, message, now)

    def _keep(self, region: Region, fd: int) -> None:
        """Keep the descriptor of an entered region, and have the supervisor store a copy."""
        if region.number in self._fds:  # registered again: keep the first descriptor
            os.close(fd)
        else:
            self._fds[region.number] = fd
            self._entered(region)

    def _entered(self, region: Region) -> None:
        """Have a region published, if its owner lives."""
        if not self._owners.add(region):
            self.forget(self.book.drop([region.number]), 0.0)
            raise InvalidArgument(f"shared memory region '{region.name}': its process has ended")
        self._unstored.append(region.number)
        self._changed = True

    def _unregister(self, process: str, message: wire.UnregisterRegions, now: float) -> None:
        gone = self.book.unregister(Caller(message.uid), message.name, message.kind)
        opened = self.closing.gone(region.number for region in gone)
        self.forget(gone, now)
        self.closing.answer(process, wire.RegionAnswer(message.ticket), opened, now)

    def _give(self, process: str, message: wire.NeedRegion) -> None:
        """Give an executor a region to map, with the descriptor, if any."""
        number = message.number
        region, fd, gone = self.book.get(number), self._fds.get(number), False
        if region is None:
            region, fd = self._tombstones.get(number)
            gone = True
        missing = region is not None and region.memory.has_descriptor and fd is None
        if missing and self._awaited_until:
            self._parked.append((process, message))
            return
        if region is None or missing:
            text = "the shared memory region has been unregistered"
            given = wire.RegionGiven(message.ticket, None, True, Code.NOT_FOUND, text)
            self._send(process, given, ())
            return
        if region.memory.closes_late and not gone:
            self.closing.given(number, process)
        fds = () if fd is None else (fd,)
        self._send(process, wire.RegionGiven(message.ticket, region, gone), fds)

    def gone(self, process: str) -> None:
        self.cuda.gone(process)
        self.closing.ended(process)

    def executor_ended(self, by_bus_error: bool = False) -> bool:
        """Find regions truncated by their owners, after an executor's end. Such a region is taken
        out of use, and other regions of a blamed owner are copied instead of mapped. Return
        True if a truncation was not known before."""
        blamed: set[int] = set()
        new = False
        for number, fd in self._fds.items():
            region = self.book.get(number)
            if region is not None and os.fstat(fd).st_size < region.end:
                found = self._quarantine(number)
                new |= found
                if found or by_bus_error:  # another executor may just have reported the region
                    blamed.add(region.uid)
        for uid in blamed:
            self._remapped += self.book.strike(uid)
            text = "its region killed an executor"
            flight_recorder.record("region strike", f"uid {uid}", text)
            _log.warning(
                "a region killed an executor: its owner's regions are copied from now on",
                extra=log_fields(uid=uid),
            )
            self._changed = True
        return new

    def process_ended(self, pid: int, started: int, now: float) -> None:
        gone = self.book.of_process(pid, started)
        self._drop([region.number for region in gone], "its process has ended", now)

    # -------------------------------------------------------------------- turns

    @property
    def urgent(self) -> bool:
        """True if an answer waits, so `tick` and `settle` should be called soon."""
        waiting = self.cuda.parked or self.closing.waiting or self._answers
        return bool(waiting or self.sharing.waiting)

    def tick(self, now: float) -> None:
        if self._awaited_until and now >= self._awaited_until:
            self._complete(now)
        elif self._reopen_at and now >= self._reopen_at:
            self._reopen()
            self._give_parked()
        self.cuda.tick(now)
        self.closing.tick(now)
        self._tombstones.expire(now)

    def settle(self, publish: Callable[[], bool], supervisor: str) -> None:
        """Publish changes, then send answers and news. Send nothing while publishing fails."""
        if self._changed and not publish():
            return
        unstored, self._unstored = self._unstored, []
        if supervisor:
            self._store(supervisor, [number for number in unstored if number in self._fds])
        self.sharing.tell(self.book, self._fds, unstored, self._gone)
        answers, self._answers = self.sharing.released(self._answers), []
        for process, answer in answers:
            self._send(process, answer, ())
        remapped, self._remapped = self._remapped, []
        self._have_forgotten(remapped)
        gone, self._gone = self._gone, []
        self._have_forgotten(gone)
        if supervisor:
            for start in range(0, len(gone), _MAX_NUMBERS):
                self._send(
                    supervisor, wire.DropRegions(tuple(gone[start : start + _MAX_NUMBERS])), ()
                )

    def _have_forgotten(self, numbers: list[int]) -> None:
        """Have executors unmap regions. Executors ask again for regions that are still
        registered."""
        executors = [p.name for p in self._reconciler.processes.values() if p.role == "executor"]
        for start in range(0, len(numbers), _MAX_NUMBERS):
            part = tuple(numbers[start : start + _MAX_NUMBERS])
            for name in executors:
                self._send(name, wire.RegionsGone(part), ())

    def published(self) -> None:
        """Note that all changes so far are published."""
        self._changed = False

    def close(self) -> None:
        close_all(self._fds.values())
        self._tombstones.close()
        self._owners.close()

    def _answer(self, process: str, answer: wire.RegionAnswer) -> None:
        self._answers.append((process, answer))

    def _quarantine(self, number: int) -> bool:
        """Take a region out of use. Return False if the region is already out of use or unknown."""
        reason = "its object was truncated after it was registered; unregister it"
        region = self.book.quarantine(number, reason)
        if region is None:
            return False
        self._changed = True
        flight_recorder.record("region quarantined", f"uid {region.uid}", f"pid {region.pid}")
        about = log_fields(name=region.name, uid=region.uid, pid=region.pid)
        _log.warning("region quarantined", extra=about)
        return True

    def _drop(self, numbers: list[int], reason: str, now: float) -> None:
        gone = self.book.drop(numbers)
        for region in gone:
            about = log_fields(name=region.name, uid=region.uid, reason=reason)
            _log.info("region dropped", extra=about)
        self.forget(gone, now)

    def forget(self, gone: list[Region], now: float) -> None:
        """Release the descriptors of dropped regions, and have all processes told."""
        for region in gone:
            self._changed = True
            self._gone.append(region.number)
            self.closing.gone([region.number])
            self._owners.remove(region)
            self._tombstones.put(region, self._fds.pop(region.number, None), now)
