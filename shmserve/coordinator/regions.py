"""The regions' desk: opens what clients register, keeps the descriptors, hands them out.

Decisions are `core.regions.RegionBook`'s. Changes of one turn of the coordinator's loop are
published together and acknowledged afterwards (`settle`), so that many registrations cost
one publication.

A descriptor lives as long as its region, and a little longer (`_Limbo`): requests that were
accepted before an unregistration may reach their executor after it. Copies are kept by the
supervisor, for the coordinator's successor.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable

from shmserve.config import Settings
from shmserve.coordinator.owners import Owners
from shmserve.core.fleet import Fleet
from shmserve.core.regions import Caller, RegionBook
from shmserve.core.registry import Region, Snapshot
from shmserve.errors import Code, InvalidArgument, ShmserveError, Unimplemented
from shmserve.protocol.messages import FromCoordinator
from shmserve.protocol.region_messages import (
    DropRegions,
    NeedRegion,
    RegionAnswer,
    RegionGiven,
    RegionsGone,
    RegisterRegion,
    StoreRegions,
    UnregisterRegions,
)
from shmserve.shm import client_object
from shmserve.transport.channel import MAX_FDS
from shmserve.transport.questions import close_all

_log = logging.getLogger(__name__)

_LIMBO_S = 10.0
_LIMBO_SIZE = 256
_PATIENCE_S = 1.5  # after a restart: for the supervisor to hand back what it keeps
_MANY = 4096  # numbers in one message

Send = Callable[[str, FromCoordinator, "tuple[int, ...]"], None]
OFF = (
    "Client shared memory is disabled. Set client_shm_mode to map or copy"
    " (SHMSERVE_CLIENT_SHM_MODE) to enable."
)


class Regions:
    """See the module. `send` never blocks and never fails; `watch` is told of pidfds."""

    def __init__(
        self, settings: Settings, run_dir: str, fleet: Fleet, send: Send, owners: Owners
    ) -> None:
        self.book = RegionBook(settings, os.geteuid())
        self._settings = settings
        self._run_dir = run_dir
        self._fleet = fleet
        self._send = send
        self._owners = owners
        self._fds: dict[int, int] = {}
        self._limbo: OrderedDict[int, tuple[Region, int, float]] = OrderedDict()
        self._answers: list[tuple[str, RegionAnswer]] = []
        self._gone: list[int] = []
        self._unstored: list[int] = []
        self._parked: list[tuple[str, NeedRegion]] = []
        self._awaited_until = 0.0
        self.changed = False

    # ---------------------------------------------------------------- a restart

    def restore(self, previous: Snapshot, now: float) -> None:
        """Continue an earlier coordinator's regions; their fds come from the supervisor."""
        self.book.restore(previous.regions, previous.next_region)
        self._awaited_until = now + _PATIENCE_S if previous.regions else 0.0
        for region in list(previous.regions.values()):
            if not self._owners.add(region):
                self._drop([region.number], "its process has ended", now)

    def stored(self, numbers: Iterable[int], fds: list[int], more: bool, now: float) -> list[int]:
        """What the supervisor kept; returns the numbers it need not keep any more."""
        useless = []
        numbers = list(numbers)
        for number, fd in zip(numbers, fds, strict=False):
            region = self.book.get(number)
            if (
                region is not None
                and number not in self._fds
                and client_object.is_object_of(region, fd)
            ):
                self._fds[number] = fd
            else:
                os.close(fd)
                if region is None:
                    useless.append(number)
        if not more:
            self._complete(now)
        return useless

    def store_all(self, supervisor: str) -> None:
        """Give a supervisor copies of every descriptor."""
        numbers = list(self._fds)
        for start in range(0, len(numbers), MAX_FDS):
            part = tuple(numbers[start : start + MAX_FDS])
            self._send(supervisor, StoreRegions(part), tuple(self._fds[n] for n in part))

    def _complete(self, now: float) -> None:
        """Nothing more is handed back: open again by key what is missing."""
        self._awaited_until = 0.0
        missing = [r for r in self.book.regions.values() if r.number not in self._fds]
        for region in missing:
            fd = client_object.reopen(region)
            if fd is None:
                self._drop([region.number], "its object could not be found again", now)
            else:
                self._fds[region.number] = fd
        parked, self._parked = self._parked, []
        for process, message in parked:
            self.need(process, message, now)

    # ----------------------------------------------------------------- requests

    def register(self, process: str, message: RegisterRegion, supervisor: str) -> None:
        """Open, check, enter, and have the supervisor keep a copy."""
        caller = Caller(message.uid, message.pid, message.started)
        try:
            region = self._registered(caller, message)
        except ShmserveError as ex:
            self._answer(process, RegionAnswer(message.ticket, ex.code, ex.message))
            return
        self.changed = True
        if supervisor:
            fd = self._fds[region.number]
            self._send(supervisor, StoreRegions((region.number,)), (fd,))
        self._answer(process, RegionAnswer(message.ticket))

    def _registered(self, caller: Caller, message: RegisterRegion) -> Region:
        if self._settings.client_shm_mode == "off":
            raise Unimplemented(OFF)
        self.book.may_register(caller)
        fd = client_object.open_object(message.key, message.name)
        try:
            facts = client_object.facts(fd, client_object.own_files(self._run_dir))
            region = self.book.register(
                caller,
                message.name,
                message.key,
                message.offset,
                message.byte_size,
                facts,
                message.again,
            )
        except ShmserveError:
            os.close(fd)
            raise
        return self._keep(region, fd)

    def register_sealed(
        self, caller: Caller, name: str, offset: int, byte_size: int, fd: int
    ) -> None:
        """Enter a sealed object (`client_object.check_sealed`); takes over `fd`. To register
        the very same thing twice is no error: the first answer may have been lost.

        Raises:
            ShmserveError: it was refused.
        """
        try:
            facts = client_object.facts(fd)
            region = self.book.register(
                caller, name, "", offset, byte_size, facts, again=True, sealed=True
            )
        except ShmserveError:
            os.close(fd)
            raise
        self._keep(region, fd)
        self.changed = True
        self._unstored.append(region.number)

    def _keep(self, region: Region, fd: int) -> Region:
        if region.number in self._fds:  # asked again: the first time counts
            os.close(fd)
            return region
        self._fds[region.number] = fd
        if not self._owners.add(region):
            self.forget(self.book.drop([region.number]), 0.0)
            raise InvalidArgument(f"shared memory region '{region.name}': its process has ended")
        return region

    def unregister(self, process: str, message: UnregisterRegions, now: float) -> None:
        gone = self.book.unregister(Caller(message.uid), message.name)
        self.forget(gone, now)
        self._answer(process, RegionAnswer(message.ticket))

    def need(self, process: str, message: NeedRegion, now: float) -> None:
        """An executor maps a region: give it the descriptor."""
        number = message.number
        region, fd, gone = self.book.get(number), self._fds.get(number), False
        if region is None and number in self._limbo:
            region, fd, _ = self._limbo[number]
            gone = True
        if region is not None and fd is None and self._awaited_until:
            self._parked.append((process, message))
            return
        if region is None or fd is None:
            text = "the shared memory region has been unregistered"
            given = RegionGiven(message.ticket, None, True, Code.NOT_FOUND, text)
            self._send(process, given, ())
            return
        self._send(process, RegionGiven(message.ticket, region, gone), (fd,))

    def shrunk(self, number: int) -> None:
        """An executor has found a region's object too small, in time."""
        self._quarantine(number, strike=False)

    def executor_ended(self) -> None:
        """Was it a client that took memory away? Then its region is out of use."""
        for number, fd in self._fds.items():
            region = self.book.get(number)
            if region is not None and os.fstat(fd).st_size < region.end:
                self._quarantine(number, strike=True)

    def process_ended(self, pid: int, started: int, now: float) -> None:
        """A process that registered regions is no more."""
        gone = self.book.of_process(pid, started)
        self._drop([region.number for region in gone], "its process has ended", now)

    # -------------------------------------------------------------------- turns

    def tick(self, now: float) -> None:
        if self._awaited_until and now >= self._awaited_until:
            self._complete(now)
        while self._limbo:
            number, (_, fd, until) = next(iter(self._limbo.items()))
            if now < until and len(self._limbo) <= _LIMBO_SIZE:
                break
            del self._limbo[number]
            os.close(fd)

    def settle(self, publish: Callable[[], None], supervisor: str) -> None:
        """Publish what has changed, then let everybody know."""
        unstored, self._unstored = self._unstored, []
        for number in unstored:
            if supervisor and number in self._fds:
                self._send(supervisor, StoreRegions((number,)), (self._fds[number],))
        if self.changed:
            self.changed = False
            publish()
        answers, self._answers = self._answers, []
        for process, answer in answers:
            self._send(process, answer, ())
        if self._gone:
            gone, self._gone = self._gone, []
            executors = [p.name for p in self._fleet.processes.values() if p.role == "executor"]
            for start in range(0, len(gone), _MANY):
                part = tuple(gone[start : start + _MANY])
                for name in executors:
                    self._send(name, RegionsGone(part), ())
                if supervisor:
                    self._send(supervisor, DropRegions(part), ())

    def close(self) -> None:
        close_all(self._fds.values())
        close_all(fd for _, fd, _ in self._limbo.values())
        self._owners.close()

    # ------------------------------------------------------------------- inside

    def _answer(self, process: str, answer: RegionAnswer) -> None:
        self._answers.append((process, answer))

    def _quarantine(self, number: int, strike: bool) -> None:
        reason = "its object was truncated after it was registered; unregister it"
        region = self.book.quarantine(number, reason, strike)
        if region is not None:
            self.changed = True
            _log.warning(
                "region quarantined name=%r uid=%d pid=%d killed_an_executor=%s",
                region.name, region.uid, region.pid, strike,
            )  # fmt: skip

    def _drop(self, numbers: list[int], why: str, now: float) -> None:
        gone = self.book.drop(numbers)
        for region in gone:
            _log.info("region dropped name=%r uid=%d reason=%s", region.name, region.uid, why)
        self.forget(gone, now)

    def forget(self, gone: list[Region], now: float) -> None:
        """The book has dropped these: their descriptors go, and everybody is told."""
        for region in gone:
            self.changed = True
            self._gone.append(region.number)
            self._owners.remove(region)
            fd = self._fds.pop(region.number, None)
            if fd is not None:
                self._limbo[region.number] = (region, fd, now + _LIMBO_S)
